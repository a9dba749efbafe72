"""Runs `pip install` with a short account: the large downloads, the installation, and a sign of
life while pip is silent. pip itself prints some six hundred lines, or with -q none for minutes.

Usage: python .ci/pip_install.py ARGUMENTS, as for pip install. The exit code is pip's.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from queue import Empty, Queue
from threading import Thread

_LARGE_MB = 20.0
_SILENCE_S = 30.0
_DOWNLOAD = re.compile(r"\s*Downloading (\S+?)-(\d\S*?)-\S* \(([\d.]+) ([MG])B\)")
_INSTALL = re.compile(r"Installing collected packages: (.*)")


def shown(line: str) -> str | None:
    """Returns the words to show for a line of pip's, or None, which most lines give."""
    if (found := _DOWNLOAD.match(line)) is not None:
        size_mb = float(found[3]) * (1000 if found[4] == "G" else 1)
        return (
            f"downloading {found[1]} {found[2]} ({size_mb:.0f} MB)" if size_mb > _LARGE_MB else None
        )
    if (found := _INSTALL.match(line)) is not None:
        count = found[1].count(",") + 1
        return f"installing {count} package{'s' if count > 1 else ''}"
    return None


def main(arguments: list[str]) -> int:
    words = [sys.executable, "-m", "pip", "install", "--progress-bar", "off"]
    words += ["--disable-pip-version-check", *arguments]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    lines: Queue[str | None] = Queue()
    Thread(target=_read, args=(process, lines), daemon=True).start()
    began_s = time.monotonic()
    doing = "resolving"
    try:
        while (line := _next(lines, doing, began_s)) is not None:
            if (words_shown := shown(line)) is not None:
                doing = words_shown
                print(f"  {doing}", flush=True)
    except KeyboardInterrupt:  # the terminal sends pip the same signal
        process.wait()
        return 130
    return process.wait()


def _read(process: subprocess.Popen[str], lines: Queue[str | None]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line)
    lines.put(None)


def _next(lines: Queue[str | None], doing: str, began_s: float) -> str | None:
    """Returns the next line, or None after the last. Prints a sign of life while it waits."""
    while True:
        try:
            return lines.get(timeout=_SILENCE_S)
        except Empty:
            print(f"  still {doing} ({time.monotonic() - began_s:.0f} s)", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
