"""Files of untrusted origin: opened, parsed and quoted with care.

A file is opened only if it is a regular file of its folder: no link that leaves it, no pipe, no
device. JSON has one accepted reading only: UTF-8, no key twice. Quoted text is short and printable,
because it ends in logs and responses. Free of adapters.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable
from functools import partial
from io import FileIO
from pathlib import Path

from lora.errors import AdapterError

_MAX_SHOWN = 160  # characters


def open_regular(path: Path) -> FileIO:
    """Opens a file unbuffered. Raises FileNotFoundError if it does not exist, otherwise
    AdapterError."""
    name = path.name
    try:
        if not os.path.lexists(path):
            raise FileNotFoundError(name)
        real = path.resolve(strict=True)
        if not _is_inside(real, path.parent.resolve(strict=True)):
            raise AdapterError(f"{name} is a link that leaves the folder")
        # Not blocking: a pipe would wait for its writer.
        descriptor = os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        if os.path.lexists(path):
            raise AdapterError(f"{name} is a link to nothing") from None
        raise
    except OSError as error:
        raise AdapterError(f"{name} cannot be read: {error.strerror}") from None
    except RuntimeError:  # Python 3.11 and 3.12 raise it for a loop of links
        raise AdapterError(f"{name} is a link to itself") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise AdapterError(f"{name} is not a regular file")
    return FileIO(descriptor)


def read_up_to(file: FileIO, num_bytes: int) -> bytes:
    """Reads a number of bytes, fewer if the file ends."""
    parts: list[bytes] = []
    while num_bytes and (part := file.read(num_bytes)):
        parts.append(part)
        num_bytes -= len(part)
    return b"".join(parts)


def parse_object(text: bytes, name: str) -> dict[str, object]:
    """Parses a JSON object. Errors call the text `name`."""
    try:
        value: object = json.loads(text.decode(), object_pairs_hook=partial(_no_key_twice, name))
    except (ValueError, RecursionError):
        raise AdapterError(f"{name} is not valid JSON") from None
    if not isinstance(value, dict):
        raise AdapterError(f"{name} is not a JSON object")
    return value


def shown(text: str) -> str:
    """Returns a harmless name as it is, otherwise escaped and cut."""
    if len(text) <= _MAX_SHOWN and text.isascii() and text.isprintable():
        return text
    short = ascii(text[:_MAX_SHOWN])
    return short if len(text) <= _MAX_SHOWN else f"{short}... ({len(text)} characters)"


def shown_value(value: object) -> str:
    """Returns a JSON value in words; of a list or an object only its length."""
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        return f"an object of {len(value)}"
    text = ascii(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}... ({len(text)} characters)"


def _no_key_twice(name: str, pairs: Iterable[tuple[str, object]]) -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in pairs:
        if key in found:
            raise AdapterError(f"{name} names {shown(key)} twice")
        found[key] = value
    return found


def _is_inside(real: Path, folder: Path) -> bool:
    if real.is_relative_to(folder):
        return True
    # Hugging Face's cache: snapshots/<revision>/ holds links into blobs/.
    return folder.parent.name == "snapshots" and real.is_relative_to(folder.parent.parent / "blobs")
