"""The routes of the HTTP API, and the ingress deployment that serves them."""
