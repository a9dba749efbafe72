"""The commands of `loraplex`, one a file. Ignorant of Ray, except that `serve` starts its CLI."""
