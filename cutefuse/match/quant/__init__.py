"""Quantised convolutions of Q/DQ graphs: read.py says which numbers and scales one works on, build.py makes calls."""
