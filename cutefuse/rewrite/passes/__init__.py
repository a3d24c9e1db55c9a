"""The passes of `patch`, one a file: each reads and changes a `State`, and says what it reads and what it leaves."""
