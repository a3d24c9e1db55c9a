"""Refusals by cause, for the summary that ends a run: a table of words in reasons, the first that is found counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

OTHER = "other reasons"
CAUSES = (
    ("inside the ", "in control flow or a local function"),
    ("ConvTranspose", "ConvTranspose"),
    (" groups; only group=1", "groups"),
    ("only 2-D convolutions", "not 2-D"),
    ("channel shuffle", "channel shuffle behind the Concat"),
    ("this Conv and Concat", "operators between Concat and Conv"),
    ("only nearest by a whole factor", "Resize that is not nearest"),
    ("Resize '", "Resize by other factors or coordinates"),
    ("Upsample '", "Resize by other factors or coordinates"),
    ("known to have the same sizes", "sum with another or unknown size"),
    ("only a sum of two", "sum with another or unknown size"),
    ("HardSwish and SiLU can be fused", "activation of another kind"),
    ("only alpha=1", "activation of another kind"),
    ("only a BatchNormalization can be fused", "norm over pixels"),
    ("goes over the pixels", "norm over pixels"),
    ("the last axis is normalised over", "norm over another axis"),
    ("quantised site", "quantisation that TensorRT fuses itself or that is not symmetric"),
    ("computed at run time", "filter computed at run time"),
    ("is made of constants", "filter that is not folded"),
    ("sparse initializer", "filter that is stored sparsely"),
    ("callers may replace it", "filter that callers may replace"),
    ("Concat joins axis", "Concat along another axis"),
    ("can be fused; split the Concat", "Concat of too many tensors"),
    ("is fused into the site", "taken by another site"),
    ("it overlaps with", "taken by another site"),
    ("one body cannot", "function bodies of an old opset"),
    ("is older than", "function bodies of an old opset"),
    ("--no-functions", "function bodies of an old opset"),
    (" is unknown", "unknown sizes"),
    ("needs a static input size", "unknown sizes"),
    ("loses precision", "BatchNormalization that cannot be folded"),
    ("convert the model", "types"),
    ("both must be one of", "types"),
    ("stash_type", "types"),
    ("all parameters of one type", "parameters of another size or type"),
    ("takes multiples of", "channels in no whole vectors"),
    ("gives its statistics", "statistics of a norm that are read"),
    ("repair ", "broken models"),
    ("does not multiply float8", "no kernels for this GPU"),
    ("older than 8.9 and without float8", "no kernels for this GPU"),
    ("skip this fusion", "beyond the kernels"),
    ("concat_conv: ", "beyond the kernels"),  # what the library says of a call
    ("row_norm: ", "beyond the kernels"),
)


def cause_of(reason: str) -> str:
    """The cause of a refusal in a few words."""
    return next((cause for words, cause in CAUSES if words in reason), OTHER)


def by_cause(reasons: Iterable[str]) -> dict[str, int]:
    """cause -> how many refusals have it, most first, other reasons last."""
    found = Counter(map(cause_of, reasons))
    return dict(sorted(found.items(), key=lambda item: (item[0] == OTHER, -item[1], item[0])))


def sentence(causes: Mapping[str, int]) -> str:
    """ "12 refused: 7 groups, 3 ConvTranspose, 2 unknown sizes"; "" for none."""
    parts = ", ".join(f"{count} {cause}" for cause, count in causes.items())
    return f"{sum(causes.values())} refused: {parts}" if causes else ""
