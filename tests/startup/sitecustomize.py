"""Imported at its start by each Python process of the tests, which find it on their PYTHONPATH.

The imports of a process with torch or MLflow make a million objects that stay. Full collections
among them are a quarter of its start, and the last collection takes as long again: import and end
of MLflow last 1.4 s instead of 2.2 s. Ray's workers keep Python's thresholds, as tests measure
their memory.
"""

import atexit
import gc
import sys

if not any("default_worker" in word for word in sys.orig_argv):
    gc.set_threshold(700, 10, 100)
    atexit.register(gc.freeze)
