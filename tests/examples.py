"""How many random examples a test takes: a tenth of them, unless pytest was given --hypothesis-profile=all."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("all")


def examples(number: int) -> settings:
    """Settings of a test that takes this many examples in `make test-all`."""
    every = settings.get_current_profile_name() == "all"
    return settings(max_examples=number if every else max(1, number // 10), deadline=None, derandomize=True)
