"""The demo: a small base model from a PyPI wheel and the four trained adapters in this folder."""
