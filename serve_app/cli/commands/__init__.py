"""The bodies of `loraplex`'s commands, one file each; their signatures are in `../signatures/`.

Ignorant of Ray, except that `serve` starts its CLI.
"""
