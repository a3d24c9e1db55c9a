"""Whole networks at deployment size, as PyTorch's exporter writes them: BatchNormalizations folded into their Conv.

Imports models.net and models.blocks alone.
"""
