"""One module a figure: `python -m tests.benchmarks.NAME`; JSON lines, the last with `pass`."""
