"""Parts of networks around one kind of site: heads, necks and blocks, a BatchNormalization behind its Conv as trained.

Imports models.net alone.
"""
