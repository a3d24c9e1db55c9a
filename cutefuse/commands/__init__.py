"""One file a command: its arguments, what it prints, its exit code, and work that nothing else needs.

May import every room; nothing imports it but `cutefuse.cli`, by name.
"""
