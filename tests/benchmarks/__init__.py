"""One module a figure, run as `python -m tests.benchmarks.NAME`; JSON lines out, the last with `pass`."""
