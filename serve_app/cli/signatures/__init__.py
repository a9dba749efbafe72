"""The signatures of `loraplex`'s commands: names, options, help.

No module here imports more than typer, so that --help answers at once; the bodies are in
`../commands/`.
"""
