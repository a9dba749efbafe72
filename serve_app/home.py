"""LORAPLEX_HOME (default ~/.loraplex): the folder of the embedded registry, the cache, the logs and
the admin token. It is created for its owner alone, and a failure that it causes names it.

Imports no slow module, because the command line looks here for the cause of a failure.
"""

from __future__ import annotations

import os
import secrets
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

NAME = "LORAPLEX_HOME"
API_KEY = "LORAPLEX_API_KEY"  # of the commands that call the API as a client
ADMIN_TOKEN = "LORAPLEX_ADMIN_TOKEN"
_TOKEN_FILE = "admin_token"
_DEFAULT = ".loraplex"
_ROOM_BYTES = 4 * 1024**2  # a new registry needs 1 MB
_FULL = ("no space left", "disk is full", "quota exceeded")  # the words of the kernel and of SQLite


class HomeError(OSError):
    """The home cannot be used; the message names LORAPLEX_HOME, the folder and the reason."""


def default_home() -> Path:
    return Path(os.environ.get(NAME) or Path.home() / _DEFAULT).expanduser()


def api_headers() -> dict[str, str]:
    """Returns the headers of a command that calls the API: with the key of LORAPLEX_API_KEY, if it
    is set."""
    key = os.environ.get(API_KEY)
    return {"authorization": f"Bearer {key}"} if key else {}


def kept_token(home: Path) -> str | None:
    """Returns the admin token of the environment, otherwise that of `home`, or None."""
    if token := os.environ.get(ADMIN_TOKEN):
        return token
    try:
        return (home / _TOKEN_FILE).read_text().strip() or None
    except FileNotFoundError:
        return None


def ensure_token(home: Path) -> str:
    """Returns the admin token of `home`, made if it is missing; concurrent starts agree on it.
    Raises HomeError if its file is empty."""
    home.mkdir(parents=True, exist_ok=True)
    if (token := kept_token(home)) is not None:
        return token
    path = home / _TOKEN_FILE
    create_secret(path, secrets.token_urlsafe(32))
    if (token := kept_token(home)) is None:
        raise HomeError(f"{path} is empty; remove it, and the next start makes a token")
    return token


def prepare(home: Path) -> Path:
    """Creates the home if it is missing, with mode 0700, and returns it.

    Raises HomeError if files cannot be kept there. The mode of an existing folder stays, because
    LORAPLEX_HOME may name any folder, /tmp included. Only ~/.loraplex, which no other program uses,
    is closed to others if it belongs to the caller.
    """
    if (reason := problem(home)) is not None:
        raise HomeError(f"{_named(home)} {reason}; set {NAME} to a folder of yours")
    try:
        home.parent.mkdir(parents=True, exist_ok=True)
        try:
            home.mkdir(mode=0o700)
        except FileExistsError:
            _close_default(home)
    except OSError as error:
        raise HomeError(f"{_named(home)} cannot be created: {error.strerror}") from error
    return home


def problem(home: Path) -> str | None:
    """Returns the reason why files cannot be kept there, as the end of a sentence, or None."""
    existing = next(path for path in (home, *home.parents) if path.exists())
    if not existing.is_dir():
        where = "" if existing == home else f"below {existing}, which is "
        return f"is {where}a file, not a folder"
    try:
        if shutil.disk_usage(existing).free < _ROOM_BYTES:
            return f"has less than {_ROOM_BYTES // 1024**2} MiB free"
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(bytes(4096))
    except OSError as error:
        return f"cannot be written: {error.strerror}"
    return None


def create_secret(path: Path, content: str) -> None:
    """Creates a file that only its owner can read, whole. Leaves it as it is if a process that
    starts at the same time was first."""
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    temporary.touch(mode=0o600, exist_ok=False)
    try:
        temporary.write_text(content)
        with suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        temporary.unlink()


def is_open_to_others(home: Path) -> bool:
    return home.is_dir() and bool(stat.S_IMODE(home.stat().st_mode) & 0o077)


def cause(error: Exception) -> str:
    """Returns the home's part in a failure, as a sentence to append to its message, or ""."""
    if isinstance(error, HomeError):
        return ""
    home = default_home()
    if (reason := problem(home)) is not None:
        return f". {_named(home)} {reason}"
    if any(words in str(error).lower() for words in _FULL):
        free_mb = shutil.disk_usage(next(p for p in (home, *home.parents) if p.exists())).free / 1e6
        return f". {_named(home)} has {free_mb:.0f} MB free"
    return ""


def _named(home: Path) -> str:
    return f"{NAME} ({home})"


def _close_default(home: Path) -> None:
    if home != Path.home() / _DEFAULT or home.is_symlink():
        return
    if home.stat().st_uid == os.geteuid() and is_open_to_others(home):
        home.chmod(0o700)
