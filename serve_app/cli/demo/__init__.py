"""The demo: one small base model out of a PyPI wheel, three trained adapters beside this file."""
