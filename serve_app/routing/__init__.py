"""Chooses the engine replica of a request: views, scores, policies, and the router inside Serve."""
