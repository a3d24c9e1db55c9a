"""Blocks that several networks share: ResNet's encoder, the blocks of YOLOv8 and YOLO11, SECOND's BEV backbone.

Imports models.net alone.
"""
