"""Generators of the pages in `docs/` that describe the product's own names: configuration keys,
commands, metric families and modules."""
