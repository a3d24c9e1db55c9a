"""Turns a model into its patched one: types lowered, fused nodes put in, proved, and taken back out."""
