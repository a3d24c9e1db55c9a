"""One file a command: its arguments, what it prints and its exit code; the work is done in the rooms below.

May import every room; nothing imports it but `cutefuse.cli`, by name.
"""
