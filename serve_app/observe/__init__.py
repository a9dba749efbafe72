"""Finished requests: the record of each, its counts, its line in the request log and its trace."""
