"""One file a command: its arguments, what it prints, its exit code."""
