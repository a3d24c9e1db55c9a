"""Convolutions: front.py says what stands in front of one, read.py what it computes, pools.py what a wider filter
computes, spread.py where outputs are spread over squares of pixels, image.py when the source is the network's image;
build.py makes calls of it all."""
