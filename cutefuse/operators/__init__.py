"""What an operator is in Python, apart from any model: packing, body, float64 reference, cases, tolerance, cost."""

from __future__ import annotations

import functools

from cutefuse.operators.op import FusedOp


@functools.cache
def operators() -> tuple[FusedOp, ...]:
    """All operators, in alphabetical order of their stems."""
    from cutefuse.operators import concat_conv, quant_concat_conv, row_norm

    return concat_conv.OPERATOR, quant_concat_conv.OPERATOR, row_norm.OPERATOR
