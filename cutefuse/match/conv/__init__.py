"""Convolutions: read.py says what stands in front of one and what it computes, pools.py what a wider filter computes,
build.py makes calls of it."""
