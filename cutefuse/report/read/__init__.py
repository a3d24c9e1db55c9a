"""Engines as data: their files read, their graph, what a layer costs, and what is only moved."""
