"""Contention on a GPU: a load on a second stream covers the samples, one in another process runs and ends."""

from __future__ import annotations

import pytest

from cutefuse.profilers.kernels.contention import Load, event_sampler, measure

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("load", ["stream:matmul", "process:matmul"])
def test_a_product_beside_another_is_slower_and_recovers(load: str) -> None:
    import torch

    a = torch.randn(4096, 4096, device="cuda").half()
    sampler = event_sampler(lambda: torch.mm(a, a))
    alone, beside, again = (t.median_us for t in measure(sampler, [Load.of(load)], rounds=11))
    assert beside > 1.3 * alone
    assert again < 0.5 * (alone + beside)
