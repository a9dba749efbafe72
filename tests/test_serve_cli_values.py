"""Refusals of wrong values of the command line, which typer converts by pydantic."""

from __future__ import annotations

import pytest

from serve_app.cli.main import main


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("serve x.yaml --timeout abc", "'--timeout': must be a number"),
        ("serve x.yaml --log-format y", "'--log-format': 'y' is not one of 'text', 'json'."),
        ("keys create --lowest-priority x", "'--lowest-priority': must be an integer"),
        ("keys create --rpm 0", "'--rpm': must be at least 1"),
        ("keys create --tokens-per-day -5", "'--tokens-per-day': must be at least 1"),
        ("doctor --port 0", "'--port': must be at least 1"),
        ("doctor --port 70000", "'--port': must be at most 65535"),
        ("canary start sql --version 1.5", "'--version': must be an integer"),
    ],
)
def test_a_wrong_value_is_refused_in_our_words(
    words: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(words.split())
    shown = " ".join(line.strip("│ ") for line in capsys.readouterr().err.splitlines())
    assert f"Invalid value for {problem} ╰" in shown
