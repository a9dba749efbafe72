"""Checks of an adapter or a base before it is served: validity, and the effect it has."""
