"""The output of commands where no terminal shows it, and of doctor about a port."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

import pytest

from serve_app.cli.commands import doctor
from serve_app.cli.commands.common import byte_progress, console
from serve_app.cli.main import main


def test_progress_leaves_no_empty_line_in_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    with byte_progress() as show:
        show("copying", 1, 2)
        show("copying", 2, 2)
    console.print("done")
    assert capsys.readouterr().out == "done\n"


def test_a_refused_folder_prints_nothing_but_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LORAPLEX_HOME", str(tmp_path))
    folder = tmp_path / "missing"
    with pytest.raises(SystemExit):
        main(["register", "base", str(folder), "--name", "tiny"])
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "does not exist" in shown.err


def test_doctor_says_why_a_port_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        port = listening.getsockname()[1]
        assert doctor._port(port).words == f"{port} is taken"

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(socket.socket, "bind", refuse)
    found = doctor._port(80)
    assert (found.state, found.words) == ("warn", "80 cannot be used: Permission denied")
    assert found.remedy == "change http_options.port"
