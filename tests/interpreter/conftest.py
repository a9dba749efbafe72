"""Collected only by tests/test_interpreter.py, whose process has the interpreter on."""

from __future__ import annotations

from kernels.backend import IS_INTERPRETED

collect_ignore_glob = [] if IS_INTERPRETED else ["*"]
