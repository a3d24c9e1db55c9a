"""Builds, times and takes back until nothing improves; and the compiler as judge of a patch."""
