"""`python -m serve_app` is `loraplex`, also where the command is not on the path."""

from serve_app.cli.main import main

main()
