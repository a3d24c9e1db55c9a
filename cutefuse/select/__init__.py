"""Decides which of the legal sites pay: what an engine does by itself, what kernels cost, what a fused node saves."""
