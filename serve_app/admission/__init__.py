"""Admission: the account of each request, the order in which requests go to engines, refusals."""
