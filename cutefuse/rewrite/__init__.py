"""Turns a model into its patched one: sites chosen, types lowered, fused nodes put in, proved, and taken back out.

May import the base, the C interface, graph/, ops/ and sites/.
"""
