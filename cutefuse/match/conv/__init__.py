"""Convolutions: read.py says what stands in front of one and what it computes, build.py makes calls of it."""
