"""`loraplex chat`: a conversation in the terminal, streamed; `/adapter NAME` switches adapters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import httpx

from serve_app.cli.commands.client import ModelLine, refusal, served_models, server_errors
from serve_app.cli.commands.common import Failure, console
from serve_app.cli.sse import IncompleteStreamError, StreamReader
from serve_app.home import API_KEY, api_headers

_HELP = """/adapter NAME  answer with this adapter (none: the base model)
/models        what the server serves
/system TEXT   instructions for the model (empty: none)
/reset         forget the conversation
/quit          leave; Ctrl-D does too, Ctrl-C stops an answer"""
# The model's text must not control the terminal.
_NO_CONTROLS = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
Message = dict[str, str]


@dataclass(slots=True)
class Session:
    client: httpx.Client
    url: str
    base: str
    model: str
    max_tokens: int
    temperature: float
    system: str = ""
    history: list[Message] = field(default_factory=list)

    def messages(self, text: str) -> list[Message]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self.history, {"role": "user", "content": text}]


def chat(model: str | None, url: str, max_tokens: int, temperature: float) -> None:
    url = url.rstrip("/")
    # No read timeout: a queued request may wait long for its first token.
    with httpx.Client(timeout=httpx.Timeout(10, read=None), headers=api_headers()) as client:
        base, chosen = _choose(served_models(client, url), model)
        session = Session(client, url, base, chosen, max_tokens, temperature)
        console.print(f"Talking to [bold]{chosen}[/]. /help lists the commands.")
        for line in _lines(session):
            if line.startswith("/"):
                if not _command(session, line):
                    return
            else:
                _answer(session, line)


def _choose(served: list[ModelLine], model: str | None) -> tuple[str, str]:
    """(base, model) to talk to."""
    bases = [line.id for line in served if line.parent is None]
    if model is None:
        if not bases:
            raise Failure("The server serves no model")
        return bases[0], bases[0]
    first, _, second = model.partition(":")
    name = (second or first).partition("@")[0]
    parents = {line.id: line.parent for line in served}
    if name not in parents:
        known = ", ".join(sorted(parents)) or "none"
        raise Failure(f"The server does not serve {model!r}; it serves: {known}")
    return parents[name] or name, model


def _lines(session: Session) -> Iterator[str]:
    while True:
        try:
            line = console.input(f"[bold cyan]{session.model}>[/] ").strip()
        except EOFError:
            console.print()
            return
        except KeyboardInterrupt:
            console.print("  (/quit leaves)")
            continue
        if line:
            yield line


def _command(session: Session, line: str) -> bool:
    """False when it was the last."""
    word, _, rest = line.partition(" ")
    rest = rest.strip()
    try:
        if word == "/quit":
            return False
        if word == "/adapter":
            _switch(session, rest)
        elif word == "/models":
            for one in served_models(session.client, session.url):
                indent = "" if one.parent is None else "  "
                console.print(f"{indent}{one.model}", highlight=False)
        elif word == "/system":
            session.system = rest
            console.print("Instructions set." if rest else "No instructions.")
        elif word == "/reset":
            session.history.clear()
            console.print("Conversation forgotten.")
        else:
            console.print(_HELP, markup=False, highlight=False)
    except Failure as failure:
        console.print(str(failure), style="red", markup=False)
    return True


def _switch(session: Session, name: str) -> None:
    if name in ("", "none"):
        session.model = session.base
    else:
        served = served_models(session.client, session.url)
        session.base, session.model = _choose(served, name)
    console.print(f"Now talking to [bold]{session.model}[/].")


def _answer(session: Session, text: str) -> None:
    """Runs a turn. A failed turn is dropped; a turn stopped by Ctrl-C is kept as far as it got."""
    parts: list[str] = []
    try:
        with server_errors(session.url):
            _stream(session, text, parts)
    except KeyboardInterrupt:
        console.print(" [dim](stopped)[/]")
    except (Failure, IncompleteStreamError) as error:
        console.print()
        console.print(str(error), style="red", markup=False)
        return
    else:
        console.print()
    if parts:
        session.history += [
            {"role": "user", "content": text},
            {"role": "assistant", "content": "".join(parts)},
        ]


def _stream(session: Session, text: str, parts: list[str]) -> None:
    body = {
        "model": session.model,
        "messages": session.messages(text),
        "max_tokens": session.max_tokens,
        "temperature": session.temperature,
        "stream": True,
    }
    reader = StreamReader()
    address = f"{session.url}/v1/chat/completions"
    # Leaving early closes the connection, which makes the server abort the request.
    with session.client.stream("POST", address, json=body) as answer:
        if answer.status_code != 200:
            raise Failure(refusal(answer.status_code, answer.read(), API_KEY))
        for line in answer.iter_lines():
            if piece := reader.read(line):
                parts.append(piece)
                shown = piece.translate(_NO_CONTROLS)
                # Ctrl-C amid a `console.print` would leave the console in its buffering state.
                console.file.write(shown)
                console.file.flush()
    reader.finish()
