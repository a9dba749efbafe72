"""The bodies of `loraplex`'s commands, one a file; their signatures are
in `serve_app/command_line/`. Ignorant of Ray, except that `serve` starts its CLI."""
