"""Finds the places of a graph that an operator can compute: what is there, what one call can fuse, and why not."""
