"""The `loraplex` command line, and the server process that it starts."""
