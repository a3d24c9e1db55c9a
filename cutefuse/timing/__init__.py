"""What measured times mean: equal calls timed once and kept between runs, tiles in the order of a network, noise."""
