"""`python -m cutefuse <command>`."""

import sys

from cutefuse.cli import main

if __name__ == "__main__":
    sys.exit(main())
