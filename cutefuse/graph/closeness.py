"""How far tensors of two models are apart: floats by channel, quantised numbers in steps, other integers by count.

A channel is one index of the second axis (feature maps) or of the last one (features of a token). Against the largest
value of the whole tensor, a channel of small values could be wrong altogether and the error would still look small.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from cutefuse.graph.numbers import NUMBERS, Number

INTEGER_MISMATCH = 1e-3  # share of integers that may differ: an argmax between two equal scores is not an error
MIN_CHANNEL = 8  # values; a channel of fewer may be small by chance, so these are judged by the whole tensor
_FLOATS = "fV"  # kinds of floats; some of those that ml_dtypes adds to NumPy are of kind V
MIN_SCALE = 1e-6  # of the tensor's largest value: a channel of zeros has no scale of its own


Floor = tuple[int, np.ndarray]  # an axis, and a value for each of its channels


def compare(
    expected: Any, actual: Any, tolerance: float, same_type: bool = True, floor: Floor | None = None,
    exact: np.ndarray | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Figures of one tensor, or of a sequence of them, and its verdict.

    Floats: `max_rel_error` is the largest error of a channel relative to the channel's largest absolute value, and must
    not pass `tolerance`; `axis` and `channel` say where (absent where the tensor was judged as a whole). `floor` holds
    values that went into each channel of an axis, such as those before an activation: rounding errors are relative to
    these, so a channel's scale is at least its floor, up to the tensor's largest value. `exact` holds
    the same values in float64: they count where one of the two alone has NaN or infinity; "overflows" says in
    how many places.

    "values" are all, "compared" those that are finite; "says_nothing" is there where they prove nothing, and says why.
    """
    if isinstance(expected, list | dict):
        return _sequence(_parts(expected), _parts(actual), tolerance, same_type)
    a = np.asarray(expected)
    found = _figures(a, np.asarray(actual), tolerance, same_type, floor, exact)
    known = a[np.isfinite(a.astype(np.float64))] if a.dtype.kind in _FLOATS else a
    found |= {"values": int(a.size), "compared": int(known.size)}
    nothing = says_nothing(a)
    return found | {"says_nothing": nothing} if nothing else found


def says_nothing(value: Any) -> str:
    """Why equal values of a tensor prove nothing, as the predicate of a sentence; "" where they do."""
    a = np.asarray(value)
    if not a.size:
        return "is empty"
    if a.dtype.kind not in f"{_FLOATS}biu":
        return ""
    wide = a.astype(np.float64)
    known = wide[np.isfinite(wide)]
    if not known.size:
        return "is NaN or infinite everywhere"
    least, most = float(known.min()), float(known.max())
    return f"is {least:g} everywhere" if least == most and (a.size > 1 or not least) else ""


def _parts(value: Any) -> list[Any]:
    """The tensors of a sequence; of a map, its keys and its values."""
    if isinstance(value, dict):
        return [np.array(list(value)), np.array(list(value.values()))]
    return list(value) if isinstance(value, list) else [value]


def _sequence(expected: Sequence[Any], actual: Sequence[Any], tolerance: float, same_type: bool) -> dict[str, Any]:
    """The figures of the tensor that is furthest apart, all of them counted."""
    if len(expected) != len(actual):
        return {"passed": False, "why": f"{len(actual)} tensors instead of {len(expected)}"}
    parts = [compare(a, b, tolerance, same_type) for a, b in zip(expected, actual, strict=True)]
    worst = max(parts, key=lambda r: (not r["passed"], r.get("max_rel_error", 0.0)), default={"passed": True})
    counts = {word: sum(p.get(word, 0) for p in parts) for word in ("values", "compared")}
    found = {name: value for name, value in worst.items() if name != "says_nothing"} | counts
    if all("says_nothing" in part for part in parts):
        found["says_nothing"] = parts[0]["says_nothing"] if parts else "is empty"
    return found


def _figures(
    a: np.ndarray, b: np.ndarray, tolerance: float, same_type: bool, floor: Floor | None, exact: np.ndarray | None
) -> dict[str, Any]:
    if a.shape != b.shape or (same_type and a.dtype != b.dtype):
        return {"passed": False, "why": f"{b.dtype}{list(b.shape)} instead of {a.dtype}{list(a.shape)}"}
    if (number := NUMBERS.get(a.dtype.name)) is not None and a.dtype == b.dtype:
        return _steps(a.astype(np.float64), b.astype(np.float64), tolerance, number)
    if a.dtype.kind not in _FLOATS:
        wrong = float(np.mean(a != b)) if a.size else 0.0
        return {"passed": wrong <= INTEGER_MISMATCH, "mismatch_share": wrong}
    kind, a, b = a.dtype, a.astype(np.float64), b.astype(np.float64)
    finite = np.isfinite(a)
    strange = ~(finite & np.isfinite(b)) & (a != b) & ~(np.isnan(a) & np.isnan(b))
    if strange.any():
        if exact is None or exact.shape != a.shape:
            return {"passed": False, "why": "NaN or infinity appears in one of the two only"}
        with np.errstate(over="ignore"):  # what is too large for the type is its infinity here, too
            right = np.where(strange, exact, 0).astype(kind).astype(np.float64)
        # Apart from the others, of which errors would be nothing beside values this large.
        apart = _figures(right, np.where(strange, b, 0.0), tolerance, True, None, None)
        others = _figures(np.where(strange, 0.0, a), np.where(strange, 0.0, b), tolerance, True, floor, None)
        worse = max(others, apart, key=lambda r: (not r["passed"], r.get("max_rel_error", 0.0)))
        return worse | {"overflows": int(strange.sum())}
    return _floats(np.where(finite, a, 0.0), np.where(finite, b, 0.0), tolerance, floor)


def passed(results: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether every tensor was judged to be right."""
    return all(r["passed"] for r in results.values())


class Judge:
    """Compares what a patched model makes with what the unfused one made, tensor by tensor.

    A channel that an activation leaves almost empty has the rounding errors of the values before it. So where a probed
    tensor fails, its channels are measured by the tensors inside the site too; `fetch` gets their values from the
    unfused model. And where it failed and the unfused model made NaN or infinity, what is right is what the site's
    nodes make in float64: x * relu6(x + 3) / 6 overflows in the middle where HardSwish(x) does not.
    """

    def __init__(
        self, names: Sequence[str], outputs: int, expected: Sequence[Any], tolerance: float,
        probed: Mapping[str, Sequence[str]], fetch: Callable[[Sequence[str]], list[Any]],
        exact: Callable[[str], np.ndarray | None] = lambda tensor: None, gains: Mapping[str, np.ndarray] | None = None,
    ) -> None:  # fmt: skip
        """names: the model's outputs, `outputs` many, then other tensors; probed: tensor -> tensors inside its site;
        exact: a probed tensor -> what its site's nodes make in float64, None where that is not known; gains: what a
        norm makes -> its factors of the last axis' channels."""
        self.names, self.outputs, self.expected, self.probed = names, outputs, expected, probed
        self._tolerance, self._fetch, self._exact, self._gains = tolerance, fetch, exact, gains or {}
        self._floors: dict[str, Floor | None] = {}
        self._wide: dict[str, np.ndarray | None] = {}

    def __call__(self, actual: Sequence[Any]) -> dict[str, dict[str, Any]]:
        """Tensor name -> figures."""
        results = self._compare(actual)
        failed = [n for n, r in results.items() if not r["passed"] and n in self.probed and n not in self._floors]
        if failed:
            self._measure(failed)
            results = self._compare(actual)
        return results

    def against(self, expected: Sequence[Any]) -> Judge:
        """The same judge of other values of the unfused model."""
        other = copy.copy(self)
        other.expected, other._floors, other._wide = expected, {}, {}
        return other

    def _compare(self, actual: Sequence[Any]) -> dict[str, dict[str, Any]]:
        results = {}
        for i, (name, a, b) in enumerate(zip(self.names, self.expected, actual, strict=True)):
            floor, wide = self._floors.get(name), self._wide.get(name)
            results[name] = compare(a, b, self._tolerance, i < self.outputs, floor, wide)
        return results

    def _measure(self, failed: Sequence[str]) -> None:
        tensors = list(dict.fromkeys(t for name in failed for t in self.probed[name]))
        try:
            values = dict(zip(tensors, map(np.asarray, self._fetch(tensors)), strict=True))
        except Exception:  # ONNX Runtime's exceptions share no public base class; without them the verdict is stricter
            values = {}
        for name in failed:
            expected = np.asarray(self.expected[self.names.index(name)])
            shape = expected.shape
            if not np.isfinite(expected.astype(np.float64)).all():
                self._wide[name] = self._exact(name)
            alike = [values[t] for t in self.probed[name] if t in values and values[t].shape == shape]
            maxima = [_by_channel(np.abs(v.astype(np.float64)), 1).max(axis=1, initial=0.0) for v in alike]
            self._floors[name] = (1, np.max(maxima, axis=0)) if maxima else None
            gain = self._gains.get(name)
            if gain is not None and shape and gain.size == shape[-1]:
                # A normalised row has a mean square of 1, and its channels the rounding errors of the row: also one
                # that lies near the row's mean, and is small therefore.
                self._floors[name] = len(shape) - 1, np.abs(gain.astype(np.float64)).reshape(-1)


def _floats(a: np.ndarray, b: np.ndarray, tolerance: float, floor: Floor | None) -> dict[str, Any]:
    error, scale = np.abs(a - b), np.abs(a)
    largest, worst = float(scale.max(initial=0.0)), float(error.max(initial=0.0))
    relative, where = (worst / largest if largest else worst), {}
    for axis in _channel_axes(a) if largest else ():
        scales = _by_channel(scale, axis).max(axis=1)
        if floor is not None and axis == floor[0]:
            scales = np.maximum(scales, np.minimum(floor[1], largest))
        ratios = _by_channel(error, axis).max(axis=1) / np.maximum(scales, MIN_SCALE * largest)
        if ratios.max() > relative:
            relative, where = float(ratios.max()), {"axis": axis, "channel": int(ratios.argmax())}
    return {
        "passed": relative <= tolerance if largest else worst == 0.0,
        "max_abs_error": worst,
        "max_rel_error": relative,
        **where,
        "max_abs_value": largest,
        "tolerance": tolerance,
    }


def _steps(a: np.ndarray, b: np.ndarray, tolerance: float, number: Number) -> dict[str, Any]:
    """Quantised numbers. Where one was rounded from two neighbours, many values may be one step apart: in a channel
    their distances make about its error before rounding; four deviations more, and one step, come by chance."""
    known = ~np.isnan(a)
    if not np.array_equal(known, ~np.isnan(b)):
        return {"passed": False, "why": "NaN appears in one of the two only"}
    a, b = np.where(known, a, 0.0), np.where(known, b, 0.0)
    error, scale = np.abs(a - b), np.abs(a)
    step = number.step(np.maximum(scale, np.abs(b)))
    passed = bool((error <= np.maximum(step, tolerance * scale.max(initial=0))).all())
    for axis in _channel_axes(a):
        expected = tolerance * _by_channel(scale, axis).max(axis=1) * (a.size // a.shape[axis])
        widest = _by_channel(step, axis).max(axis=1)
        chance = 4 * np.sqrt(expected * widest) + widest
        passed &= bool((_by_channel(error, axis).sum(axis=1) <= expected + chance).all())
    wrong = float(np.mean(a != b)) if a.size else 0.0
    return {"passed": passed, "mismatch_share": wrong, "max_steps": round(float((error / step).max(initial=0)))}


def _channel_axes(a: np.ndarray) -> Iterator[int]:
    for axis in sorted({1, a.ndim - 1}) if a.ndim > 1 and a.size else ():
        if a.size // a.shape[axis] >= MIN_CHANNEL:
            yield axis


def _by_channel(a: np.ndarray, axis: int) -> np.ndarray:
    """[channels, values]."""
    return np.moveaxis(a, axis, 0).reshape(a.shape[axis], -1)
