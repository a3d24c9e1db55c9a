"""Turns the chosen sites of a model into fused nodes, lowers types for them, and takes fused nodes back out.

May import the base, the C interface, graph/, ops/ and sites/.
"""
