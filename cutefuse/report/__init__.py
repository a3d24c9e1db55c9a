"""Turns the JSON files of engines into tables, drawings, pages and a ranking of what to fuse next.

May import the base, the C interface, graph/, ops/, sites/, rewrite/, roofline/ and engine/.
"""
