"""The `loraplex` command line, and what it starts."""
