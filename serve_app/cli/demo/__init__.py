"""The demo: a small base model from a PyPI wheel and the three trained adapters in this folder."""
