"""Public clients at their newest versions, run unmodified against the demo: `make conformance`."""
