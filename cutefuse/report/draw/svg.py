"""The engine graph as SVG. Colours are CSS variables, so that it follows the page's light and dark."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from html import escape
from pathlib import Path

from cutefuse.engines.kinds import KINDS
from cutefuse.engines.layers import Layer, layer_bytes
from cutefuse.engines.tensors import Tensor
from cutefuse.report.draw.layout import NODE_HEIGHT, NODE_WIDTH, Drawing
from cutefuse.report.read.engine import Engine
from cutefuse.report.read.graph import Edge
from cutefuse.table import time_text

# Colours of a file that stands alone: the light ones of pages, which are light-dark(in light, in dark).
CSS = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
_LIGHT = "".join(f"{name}:{light};" for name, light in re.findall(r"(--[\w-]+):light-dark\(([^,()]+),", CSS))
_STYLE = f"svg{{{_LIGHT}font-family:system-ui,sans-serif;background:var(--bg)}}"
GRAPH_STYLE = """
.g-n use{fill:var(--card);stroke:var(--line)}.g-n .g-h{fill:var(--heat);stroke:none}
.g-n text{fill:var(--ink);font-size:12px}
.g-n .g-t{fill:var(--mute);font-size:11px}.g-r{text-anchor:end}
.g-e{fill:none;stroke:var(--mute);stroke-opacity:.6;stroke-width:1.4}
.g-FP32,.g-TF32{stroke:var(--k-pool)}.g-FP16,.g-BF16{stroke:var(--k-conv)}.g-INT8,.g-FP8{stroke:var(--k-plugin)}
.g-l,.g-io{fill:var(--mute);font-size:10px;paint-order:stroke;stroke:var(--bg);stroke-width:3px}.g-io{fill:var(--k-plugin);font-weight:600}
""" + "".join(f".g-n .k-{kind}{{fill:var(--k-{kind});stroke:none}}" for kind in KINDS)

_RICH_LIMIT = 3000
_LINE = 11.0  # from one line of a label to the next, in pixels
_CHARACTER = 6.4  # at most, of a label's font on average
_LINES = 3
_GAP = 7.0  # beside an edge


@dataclass(frozen=True)
class _Label:
    """A text at the start (or end) of its line; `y` is the base line."""

    text: str
    x: float
    y: float
    ends: bool = False  # at x, instead of beginning there

    @property
    def span(self) -> tuple[float, float]:
        """Left and right border in pixels, by the widest characters that a browser may take."""
        width = _CHARACTER * len(self.text)
        return (self.x - width, self.x) if self.ends else (self.x, self.x + width)


class _Labels:
    """Labels of a drawing of this width that were placed so far, so that none lies on another."""

    def __init__(self, width: float) -> None:
        self._width = width
        self._rows: dict[int, list[_Label]] = defaultdict(list)

    def place(self, text: str, x: float, y: float, up: bool) -> _Label | None:
        """A free place on either side of x, from the line at y downwards or `up`; None where all are taken."""
        for line in range(_LINES):
            at = y - _LINE * line if up else y + _LINE * line
            for label in (_Label(text, x + _GAP, at), _Label(text, x - _GAP, at, ends=True)):
                left, right = label.span
                if left >= 0 and right <= self._width and not self._taken(label):
                    self._rows[int(at // _LINE)].append(label)
                    return label
        return None

    def _taken(self, label: _Label) -> bool:
        left, right = label.span
        row = int(label.y // _LINE)
        near = (other for r in (row - 1, row, row + 1) for other in self._rows.get(r, ()))
        return any(abs(other.y - label.y) < _LINE and left < other.span[1] and other.span[0] < right for other in near)


def number(value: float) -> str:
    """A coordinate with at most one decimal."""
    return f"{value:.1f}".rstrip("0").rstrip(".")


def text(value: object) -> str:
    """Escaped for XML 1.0, which allows none of TensorRT's control characters."""
    return escape("".join(c for c in str(value) if c >= " " or c in "\t\n"), quote=True)


def edge_label(tensor: Tensor) -> str:
    return " ".join(filter(None, (tensor.dtype, tensor.layout if tensor.layout != "linear" else "")))


def graph(engine: Engine, edges: list[Edge], drawing: Drawing, standalone: bool) -> str:
    """The engine graph: nodes shaded by their time, edges coloured by type and labelled with format."""
    width, height = number(drawing.width), number(drawing.height)
    size = f' width="{width}" height="{height}"' if standalone else ""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"{size} id="graph" role="img"'
    first = min((e.target for e in edges if e.source < 0 <= e.target), default=0)
    start = f"{number(drawing.x[first] + NODE_WIDTH / 2)} {number(drawing.y[first])}"  # where the page begins to look
    parts = [f'{head} data-start="{start}" aria-label="engine graph">']
    if standalone:
        parts.append(f"<title>{text(engine.name)}</title><style>{_STYLE}{GRAPH_STYLE}</style>")
    parts.append(
        f'<defs><rect id="gb" width="{NODE_WIDTH}" height="{NODE_HEIGHT}" rx="6"/>'
        f'<rect id="gk" width="4" height="{NODE_HEIGHT}" rx="2"/></defs>'
    )
    # Titles and edge labels would only make a huge graph heavier: the page shows a clicked layer's tensors anyway.
    rich = len(engine.layers) <= _RICH_LIMIT
    for edge, points in zip(edges, drawing.paths, strict=True):
        if len(points) > 1:
            tip = f"{text(edge.tensor.name)}: {edge.tensor.shape_text} {text(edge.tensor.text)}"
            end = f"><title>{tip}</title></path>" if rich else "/>"
            parts.append(f'<path class="g-e g-{edge.tensor.dtype}" d="{_curve(points)}"{end}')
    # Shade and note tell the time; of an engine without times, the bytes that a layer reads and writes.
    timed = engine.profiled
    weights = [(layer.time_us or 0.0) if timed else layer_bytes(layer) / 1e6 for layer in engine.layers]
    most = max(weights, default=0.0) or 1.0
    for layer, weight in zip(engine.layers, weights, strict=True):
        known = layer.time_us is not None if timed else weight > 0
        note = (time_text(weight) if timed else f"{weight:.1f} MB") if known else ""
        parts.append(_node(layer, drawing, weight / most, note, rich))
    return "".join(parts + _labels(edges, drawing, rich)) + "</svg>"


def _labels(edges: list[Edge], drawing: Drawing, rich: bool) -> list[str]:
    """Inputs and outputs of the engine above and below the layers that take and make them, and under each layer the
    types, layouts and sizes of the tensors that it hands on. One that finds no free place is left to the tooltip."""
    labels = _Labels(drawing.width)
    out: list[str] = []

    def place(kind: str, content: str, x: float, y: float, up: bool = False) -> None:
        if label := labels.place(content, x, y, up):
            anchor = ' text-anchor="end"' if label.ends else ""
            at = f'x="{number(label.x)}" y="{number(label.y)}"'
            out.append(f'<text class="{kind}" {at}{anchor}>{text(content)}</text>')

    ends: dict[tuple[int, bool], list[Tensor]] = {}
    for edge in edges:
        if edge.source < 0 or edge.target < 0:
            ends.setdefault((max(edge.source, edge.target), edge.source < 0), []).append(edge.tensor)
    for (node, above), tensors in ends.items():
        more = f" and {len(tensors) - 1} more" if len(tensors) > 1 else ""
        told = " ".join(filter(None, (_fit(tensors[0].name, 20), edge_label(tensors[0]), tensors[0].shape_text)))
        y = drawing.y[node] + (-8 if above else NODE_HEIGHT + 12)
        place("g-io", f"{'▾' if above else '▴'} {told}{more}", drawing.x[node] + NODE_WIDTH / 2, y, above)
    seen: set[tuple[int, str]] = set()
    for edge, points in zip(edges, drawing.paths, strict=True) if rich else ():
        shape = edge.tensor.shape_text if len(edge.tensor.dims) <= 5 else ""
        content = _fit(f"{edge_label(edge.tensor)} {shape}".strip(), 34)
        if len(points) > 1 and content and (edge.source, content) not in seen:
            seen.add((edge.source, content))
            place("g-l", content, points[0][0], drawing.y[edge.source] + NODE_HEIGHT + 12)
    return out


def _node(layer: Layer, drawing: Drawing, share: float, note: str, rich: bool) -> str:
    left, top = number(drawing.x[layer.index]), number(drawing.y[layer.index])
    # The first part of a fused name, the end of a path, the layer that a copy serves.
    own = layer.title.split(" + ")[0].rpartition("CopyNode for ")[2]
    own = own if len(own) <= 25 else f"…{own[-24:]}"
    heat = f'<use href="#gb" class="g-h" style="fill-opacity:{0.04 + 0.42 * share:.2f}"/>' if share > 0.01 else ""
    title = f"<title>{text(layer.title)}</title>" if rich else ""
    kind = _fit(str(layer.raw.get("ParameterType") or layer.type), 20)
    return (
        f'<g class="g-n" data-i="{layer.index}" transform="translate({left} {top})">{title}<use href="#gb"/>{heat}'
        f'<use href="#gk" class="k-{layer.kind}"/><text x="12" y="19">{text(own)}</text>'
        f'<text class="g-t" x="12" y="36">{text(kind)}</text>'
        f'<text class="g-t g-r" x="{NODE_WIDTH - 8}" y="36">{note}</text></g>'
    )


def _fit(value: str, length: int) -> str:
    return value if len(value) <= length else f"{value[: length // 2 - 1]}…{value[-(length // 2) :]}"


def _curve(points: list[tuple[float, float]]) -> str:
    """Vertical tangents at both ends of every piece; straight where nothing bends."""
    x0, y0 = points[0]
    d = [f"M{number(x0)} {number(y0)}"]
    for i, (x, y) in enumerate(points[1:], start=2):
        if abs(x - x0) >= 0.5:
            middle = number((y0 + y) / 2)
            d.append(f"C{number(x0)} {middle} {number(x)} {middle} {number(x)} {number(y)}")
        elif i == len(points) or abs(points[i][0] - x) >= 0.5:
            # Straight pieces in a row are drawn as one.
            d.append(f"V{number(y)}")
        x0, y0 = x, y
    return "".join(d)
