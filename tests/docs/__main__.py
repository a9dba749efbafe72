"""`python -m tests.docs [--write]`: checks or writes the generated pages of `docs/`."""

from __future__ import annotations

import sys

from tests.docs.pages import stale, write

if "--write" in sys.argv[1:]:
    write()
elif names := stale():
    sys.exit(f"not current: {', '.join(names)}; run: make docs")
