"""The engine replica that a request goes to: views, scores, policies, Serve's router."""
