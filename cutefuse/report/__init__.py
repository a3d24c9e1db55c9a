"""Turns the JSON files of engines into tables, drawings, pages and a ranking of what to fuse next."""
