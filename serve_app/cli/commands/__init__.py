"""`loraplex`'s commands, one file each; those with many libraries have their signatures in
`../signatures.py`.

Ignorant of Ray, except that `serve` starts its CLI.
"""
