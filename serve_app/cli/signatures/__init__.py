"""The signatures of the commands whose bodies import many libraries: names, options, help.

No module here imports more than typer, so that --help answers at once; the bodies are in
`../commands/`.
"""
