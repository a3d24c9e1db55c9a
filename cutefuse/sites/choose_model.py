"""What a fused site saves in an engine, over the graph: its own kernels against ours, and what its neighbours cost."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from onnx import NodeProto

from cutefuse import kernels
from cutefuse.graph.clean import has_no_effect
from cutefuse.graph.read import Graph, label
from cutefuse.kernels import Call
from cutefuse.ops.conv_form import AFTER
from cutefuse.ops.layouts import RTX, TENSORRT, TORCH
from cutefuse.sites.choose_cost import ELEMENT_BYTES, Convolution, Device, convolution_us, fused_us
from cutefuse.sites.choose_engine import ELEMENTWISE, ENLARGED, MEANS, RANGES, Wiring, is_between, shortcut_fault
from cutefuse.sites.compiled import Record
from cutefuse.sites.engines import TANH_SILU, Engine
from cutefuse.sites.find import Site
from cutefuse.sites.match import Joined, Match, tensors_of

# Forward row norms against torch.compile, geometric means on an H200, for the bytes they move. Inside a
# network Triton's kernel takes as long as a pass, and ours so much longer: a norm of 4.8 MB 3.9 us for 2.4.
_NORM_RATIOS = {False: 0.83, True: 0.74}
_NORM_US = 1.5
# How much longer Triton takes over a Concat that it also normalises: 116 of DenseNet-121, one image and eight. Of more
# than a few inputs it joins some beforehand.
_NORMALISED_US = 1.6
LEAST_SAID_US = 0.05  # what a figure with one digit can show
# A part of a gain -> what takes less time, or more, where the site is fused.
_PARTS = {
    "measured": "measured, the site takes",
    "merged": "1x1 convolutions in one kernel take",
    "neighbours": "copies and passes beside it take",
    "widened": "copying what it reads to a layout of ours takes",
    "late_start": "a late start behind a kernel that is not ours takes",
    "casts": "Casts take",
}
_WORDS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


@dataclass(frozen=True)
class Own:
    """A site by itself: time of the engine's kernels that it replaces, and of ours. NaN: not known, `why` says.

    convolution_us: the part of `before_us` that is a 1x1 convolution, which the engine may merge with others.
    """

    before_us: float
    after_us: float
    why: str = ""
    convolution_us: float = 0.0


UNSIZED = "its sizes are not known"


class Model:
    """Prices matches for one engine on one GPU. NaN stands for what is not known.

    record: what the engine's compiler made of the graph with nothing fused; without it rules say what it would make.
    """

    def __init__(self, graph: Graph, engine: Engine, device: Device, sizes: Any, record: Record | None = None) -> None:
        self.graph, self.engine, self.device, self._sizes, self.record = graph, engine, device, sizes, record
        # Enlargements whose pixels lie between others.
        self.between = [n for n in graph.nodes if n.op_type in ENLARGED and is_between(n)]
        self.convolution_us = functools.cache(partial(convolution_us, device=device))
        self._own: dict[int, tuple[Match, Own]] = {}  # by the id of a match, which is held so that it stays unique

    # ------------------------------------------------------------------------------------------------------- a site
    def own(self, site: Site, match: Match) -> Own:
        """The site's own kernels: the convolution with what follows it, or the norm."""
        if id(match) not in self._own:
            call = site.call_of(match)
            kind = kernels.facts(match.call.op_type)
            if call is None:
                found = Own(math.nan, math.nan, UNSIZED)
            elif kind["kind"] == "norm":
                found = self._norm(site, match, call)
            elif kind["quantised"] and self.engine.name == TORCH:
                found = Own(math.nan, math.nan, f"no time of {self.engine.title}'s quantised convolutions is recorded")
            else:
                found = self._convolution(site, match, call)
            self._own[id(match)] = match, found
        return self._own[id(match)][1]

    def _norm(self, site: Site, match: Match, call: Call) -> Own:
        facts = kernels.facts(call.op_type)
        size = site.op.cost(call).bytes_moved
        pass_us = self.device.pass_us(size)
        if self.engine.name == RTX:  # one kernel there too, and a tensor beside ours is copied
            return Own(self._kernels_us(match) if self.record else pass_us, pass_us + self.device.move_us(size))
        if self.engine.name != TORCH:
            # No time of TensorRT's norms is recorded. A norm there is taken for one pass over memory, and the Add
            # before it for another: only without that pass can our kernel be the faster one.
            y = math.prod(call.outputs[0].dims) * ELEMENT_BYTES[call.outputs[0].dtype]
            before_us = self.device.pass_us(2 * y) + self.device.pass_us(3 * y) if facts["residual"] else pass_us
            return Own(before_us, pass_us + _NORM_US)
        layer = bool(facts["layer"])
        return Own(pass_us + self.device.move_us(size) * (1 / _NORM_RATIOS[layer] - 1), pass_us + _NORM_US)

    def _convolution(self, site: Site, match: Match, call: Call) -> Own:
        attrs, facts = dict[str, Any](call.attrs), kernels.facts(call.op_type)
        r, s = attrs["kernel_shape"]
        first = call.inputs[0].dims
        factor = attrs.get("upsample", [1])[0]
        dtype = site.cast_from or call.inputs[0].dtype
        N, _, P, Q = call.outputs[0].dims
        outputs = [t.dims[1] for t in call.outputs]
        together = self.engine.merges_pointwise and r * s == 1
        filters = [sum(outputs)] if together else outputs
        convs = [
            Convolution(N, sum(attrs["channels"]), first[2] * factor, first[3] * factor, K, P, Q, r * s, dtype)
            for K in filters
        ]
        before_us = sum(map(self.convolution_us, convs))
        mergeable_us = before_us if together else 0.0
        before_us += self._normalised_us(match, call) if facts["pre_activated"] else 0.0
        activation, residual = str(facts["activation"]), facts["residual"]
        for conv in convs:
            y = conv.output_bytes
            inside = self._computed_inside(match, activation) and not (
                residual == AFTER and activation in ("Relu", "Clip")
            )
            if inside:
                before_us += self.device.move_us(y) if residual else 0.0
            elif self.engine.inside("") or activation or residual or self._has_bias(match):
                before_us += self.device.pass_us(3 * y if residual else 2 * y)
        anchor = match.nodes[0]
        behind = self.graph.producer(anchor.input[0])
        if not self.engine.reads_ranges and behind is not None and behind.op_type in RANGES:
            before_us += self.device.copy_us(2 * self.size_of(anchor.input[0]))
        after_us = fused_us(call, self.device, site.op.cost(call).bytes_moved)
        if after_us is None:
            return Own(before_us, math.nan, "the kernel library predicts no time for it", mergeable_us)
        if self.engine.name == RTX:  # nobody has timed Myelin's kernels: they count as fast as ours, copies decide
            normalised_us = self._normalised_us(match, call) if facts["pre_activated"] else 0.0
            around_us = self._kernels_us(match) if self.record else normalised_us
            return Own(after_us + around_us, after_us + self._joined_us(match, call))
        if residual:
            after_us += self.device.move_us(sum(c.output_bytes for c in convs))
        return Own(before_us, after_us + self._joined_us(match, call), "", mergeable_us)

    def _kernels_us(self, match: Match) -> float:
        """Time of the recorded kernels that compute nodes of a match beside its convolution. What they move there is
        counted by `node_us`."""
        assert self.record is not None
        shares = self.record.of(label(n) for n in match.nodes)
        return sum(share * self.device.pass_us(k.traffic_bytes) for k, share in shares.items() if not k.is_copy)

    def _recorded_us(self, node: NodeProto, wiring: Wiring) -> float | None:
        """Time of the recorded kernels that move for a node; None where nothing is recorded, or where a fused node
        makes one of its inputs, so that the compiler may decide otherwise."""
        changed = any(wiring.source(t) in wiring.made for t in node.input)
        if self.record is None or changed or label(node) not in self.record.known:
            return None
        shares = self.record.of([label(node)])
        return sum(share * self.device.pass_us(k.traffic_bytes) for k, share in shares.items() if k.is_copy)

    def _normalised_us(self, match: Match, call: Call) -> float:
        """What the normalisation and ReLU before a convolution cost: a kernel of their own, or only what it writes
        where the kernel that makes their tensor computes them. Triton's kernel for a Concat writes nothing else, but
        takes longer."""
        inside, tensor = {id(n) for n in match.nodes}, match.nodes[0].input[0]
        node = self.graph.producer(tensor)
        while node is not None and id(node) in inside and node.op_type != "Concat":
            tensor = next(t for t in node.input if not self.graph.is_constant(t))
            node = self.graph.producer(tensor)
        N, _, H, W = call.inputs[0].dims
        size = N * H * W * sum(dict[str, Any](call.attrs)["channels"]) * ELEMENT_BYTES[call.inputs[0].dtype]
        if node is not None and node.op_type == "Concat" and self.engine.name == TORCH:
            return _NORMALISED_US
        hosted = node is not None and (node.op_type == "Conv" or node.op_type in ELEMENTWISE)
        return self.device.move_us(size) if hosted else self.device.pass_us(2 * size)

    def _joined_us(self, match: Match, call: Call) -> float:
        """A site's share of the Concats that the rewriter adds for it and for all that join the same tensors."""
        total_us = 0.0
        for operand, tensor in zip(match.inputs, call.inputs, strict=True):
            if isinstance(operand, Joined):
                size = math.prod(tensor.dims) * ELEMENT_BYTES[tensor.dtype]
                joined = self.engine.name == TORCH
                join_us = self.device.join_us(size, len(operand.tensors)) if joined else self.device.pass_us(2 * size)
                total_us += join_us / max(1, sum(n.op_type == "Concat" for n in self.graph.users(operand.tensors[-1])))
        return total_us

    def _computed_inside(self, match: Match, activation: str) -> bool:
        if activation == "Silu" and self.engine.name == TENSORRT and self.engine.version >= TANH_SILU:
            return not any(shortcut_fault(self.graph, o) for n in match.nodes for o in n.output)
        return self.engine.inside(activation)

    def merged_us(self, conv: NodeProto, wiring: Wiring) -> float:
        """Time of the one kernel that TensorRT makes of all 1x1 convolutions of a tensor that stay."""
        group = wiring.siblings(conv)
        if not group:
            return 0.0
        x, y = (self._sizes(t) or self.graph.dims(t) or () for t in (conv.input[0], conv.output[0]))
        filters = [(self.graph.dims(n.input[1]) or (-1,))[0] for n in group]
        if len(x) != 4 or len(y) != 4 or min(*x, *y, *filters) < 0:
            return math.nan
        dtype = self.graph.dtype(conv.input[0]) or "float32"
        whole = Convolution(x[0], x[1], x[2], x[3], sum(filters), y[2], y[3], 1, dtype)
        return self.convolution_us(whole)

    def _has_bias(self, match: Match) -> bool:
        anchor = match.nodes[0]
        return len(anchor.input) > 2 or any(n.op_type == "BatchNormalization" for n in match.nodes)

    # ---------------------------------------------------------------------------------------------------- the graph
    def dims(self, tensor: str) -> tuple[int, ...]:
        """The sizes of a tensor; () where one is not known."""
        return self._known(tensor) or ()

    def size_of(self, tensor: str) -> float:
        """Bytes of a tensor; NaN where a size is not known."""
        dims = self._known(tensor)
        if dims is None:
            return math.nan
        return math.prod(dims) * ELEMENT_BYTES.get(self.graph.dtype(tensor) or "", 2)

    def _known(self, tensor: str) -> tuple[int, ...] | None:
        """The sizes of a tensor. Those of a Cast and of a node without effect are its input's: converters to float16
        leave its own out, and shape inference passes over a Pad by what is computed."""
        dims, node = self._sizes(tensor) or self.graph.dims(tensor), self.graph.producer(tensor)
        if dims is not None and all(d >= 0 for d in dims):
            return tuple(dims)
        same = node is not None and (node.op_type == "Cast" or has_no_effect(self.graph, node))
        return self._known(node.input[0]) if node is not None and same else None

    def node_us(self, node: NodeProto, wiring: Wiring) -> float:
        """What a node that stays costs beside the convolutions: a Concat's copies, an enlargement, an elementwise
        node that no other kernel takes in."""
        if not wiring.alive(node) or not node.input or not node.output:  # a damaged node costs nothing
            return 0.0
        recorded_us = self._recorded_us(node, wiring)
        if recorded_us is not None:
            return recorded_us
        if node.op_type == "Concat" and self.engine.name == TORCH:
            return self._concat_us(node, wiring)
        if node.op_type == "Concat":
            return sum(self.device.pass_us(2 * self.size_of(i.tensor)) for i in wiring.inputs_of(node) if i.copied)
        if node.op_type in MEANS:  # Myelin takes them of NCHW alone where a fused node stands before
            turned = self.engine.name == RTX and wiring.source(node.input[0]) in wiring.made
            return self.device.pass_us(2 * self.size_of(node.input[0])) if turned else 0.0
        if node.op_type in RANGES:
            wanted = sum(self.size_of(o) for o in node.output if o and self.graph.users(o))
            return self.device.pass_us(2 * wanted) if wiring.copies_range(node) else 0.0
        if node.op_type in ENLARGED:
            if wiring.absorbed(node.output[0]):
                return 0.0
            size = self.size_of(node.output[0])
            slower_us = self.device.between_us(size) if is_between(node) and wiring.in_pixels(node) else 0.0
            return self.device.pass_us(self.size_of(node.input[0]) + size) + slower_us
        if node.op_type in ELEMENTWISE:
            read = [t for t in node.input if t and not self.graph.is_constant(t)]
            if wiring.own_kernel(node):
                return self.device.pass_us(sum(map(self.size_of, read)) + self.size_of(node.output[0]))
            return self.device.move_us(sum(map(self.size_of, read[1:])))
        return 0.0

    def _concat_us(self, concat: NodeProto, wiring: Wiring) -> float:
        """A Concat in torch.compile. What it computes of its inputs needs no pass of its own."""
        size = self.size_of(concat.output[0])
        makers = {t: self.graph.producer(t) for t in dict.fromkeys(concat.input)}
        enlarged = {t: n for t, n in makers.items() if n is not None and n.op_type in ENLARGED}
        if wiring.in_planes(concat):
            scattered = sum(self.size_of(t) for t, n in enlarged.items() if not wiring.reads_planes(n))
            return self.device.turn_us(size, scattered)
        between = sum(self.size_of(t) for t, n in enlarged.items() if is_between(n))
        inside = [t for t, n in makers.items() if wiring.absorbed(t) and t not in enlarged and not _is_bare(n)]
        own_us = self.device.join_us(size, len(concat.input), between)
        own_us += self.device.pooled_us(size) if wiring.joins_for_pools(concat) else 0.0
        shares = {t: len(self.graph.users(wiring.source(t))) for t in inside}  # the pass is saved once
        return own_us - sum(self.device.pass_us(2 * self.size_of(t)) / n for t, n in shares.items())

    def readers(self, matches: Iterable[Match], wiring: Wiring) -> dict[int, NodeProto]:
        """The nodes whose cost depends on who makes the outputs of these matches."""
        own = {id(n) for m in matches for n in m.nodes}
        found: dict[int, NodeProto] = {}
        for match in matches:
            for tensor in filter(None, match.outputs):
                near = [*wiring.concats_of(tensor), *self.graph.users(tensor)]
                found |= {id(n): n for n in near if n.op_type in ("Concat", *ELEMENTWISE, *MEANS)}
        return {i: n for i, n in found.items() if i not in own}

    def inside(self, matches: Iterable[Match], wiring: Wiring) -> dict[int, NodeProto]:
        """The nodes of these matches that cost something beside the convolution, and the Concats that share a tensor
        with one of them or with a 1x1 convolution that TensorRT would merge."""
        own = [n for m in matches for n in m.nodes if n.op_type in ("Concat", *ENLARGED, *RANGES)]
        found = {id(n): n for n in own}
        for node in own:
            found |= {
                id(n): n for t in node.input for n in (wiring.concats_of(t) if node.op_type not in RANGES else ())
            }
            before = [self.graph.producer(t) for t in node.input]
            found |= {id(n): n for n in before if n is not None and n.op_type in ENLARGED}
        for match in matches:
            if match.nodes[0].op_type == "Conv":
                for conv in wiring.siblings(match.nodes[0]):
                    ends = [o for n in (conv, *self.graph.users(conv.output[0])) for o in n.output]
                    found |= {id(n): n for t in ends for n in wiring.concats_of(t)}
        return found

    def laid_out(self, plain: Wiring, wiring: Wiring) -> dict[int, NodeProto]:
        """The enlargements between pixels that torch.compile lays out in another way where more is fused."""
        return {id(n): n for n in self.between if plain.in_pixels(n) != wiring.in_pixels(n)}

    def layout_us(self, plain: Wiring, wiring: Wiring) -> float:
        """What that saves."""
        changed = self.laid_out(plain, wiring).values()
        return sum(self.node_us(n, plain) - self.node_us(n, wiring) for n in changed)

    def cast_us(self, tensor: str, wiring: Wiring) -> float:
        """Time of the Cast of a tensor beside fused nodes that compute in a type of half the size."""
        return self.device.pass_us(1.5 * self.size_of(tensor)) if wiring.is_cast(tensor) else 0.0

    def widened_us(self, tensor: str, wiring: Wiring) -> float:
        """Time in which a tensor is copied to the layout that fused nodes read."""
        return self.device.copy_us(2 * self.size_of(tensor)) if wiring.is_widened(tensor) else 0.0

    def late_us(self, tensor: str, wiring: Wiring) -> float:
        """What it costs fused nodes that another engine's kernel makes the tensor they wait for."""
        return self.device.late_us if wiring.starts_late(tensor) else 0.0

    # ------------------------------------------------------------------------------------------------------- in words
    def note(self, site: Site, match: Match, wiring: Wiring) -> str:
        """What the engine does around a site, and what fusing it would do to its neighbours. `wiring`: the graph with
        this site fused."""
        plain = wiring.unfused(match)
        parts = []
        for concat in (n for n in match.nodes if n.op_type == "Concat"):
            if wiring.alive(concat):
                parts.append(f"the tensor of Concat '{label(concat)}' has other readers and stays")
                continue
            copied = [i for i in plain.inputs_of(concat) if i.copied]
            count = len(concat.input)
            if self.engine.name == TORCH:
                parts.append(f"{self.engine.title} joins the Concat's {count} inputs in one kernel")
            elif copied:
                parts.append(f"{self.engine.title} copies {len(copied)} of the Concat's {count} inputs")
            else:
                number = _WORDS[count] if count < len(_WORDS) else str(count)
                which = "both" if count == 2 else f"all {number}"
                parts.append(f"{self.engine.title} writes {which} inputs into the Concat")
        costs = [n for n in self.readers([match], wiring).values() if wiring.alive(n)]
        costs = [n for n in costs if self.node_us(n, wiring) > self.node_us(n, plain)]
        parts += [
            f"{n.op_type} '{label(n)}' would copy its output" if n.op_type == "Concat"
            else f"{n.op_type} '{label(n)}' would become a kernel of its own" for n in costs
        ]  # fmt: skip
        group = plain.siblings(match.nodes[0])
        if self.own(site, match).convolution_us and len(group) > 1:
            parts.append(f"{self.engine.title} merges {len(group)} 1x1 convolutions of this tensor")
        return "; ".join(parts)

    def sum_in_words(self, parts: Mapping[str, float]) -> str:
        """Where a gain comes from, part by part, so that a reader can add it up."""
        said = []
        if "engine_kernels" in parts:
            said.append(f"the engine's kernels take {parts['engine_kernels']:.1f} us, "
                        f"ours {-parts['our_kernels']:.1f} us")  # fmt: skip
        for part, words in _PARTS.items():
            if abs(us := parts.get(part, 0.0)) >= LEAST_SAID_US:
                said.append(f"{words} {abs(us):.1f} us {'less' if us > 0 else 'more'}")
        return "; ".join(said)


def _is_bare(node: NodeProto | None) -> bool:
    """Whether a convolution has no bias, so that torch.compile needs no pass after it."""
    return node is not None and node.op_type == "Conv" and len(node.input) < 3


@dataclass(frozen=True)
class Pricer:
    """Gains of fused sites: by the model, or, where `given` has a figure for a site, by that and the model's figure
    for its readers alone."""

    model: Model
    given: dict[int, float]  # id of a site -> microseconds that it saves by itself

    def gain_us(self, sites: Sequence[Site], wiring: Wiring) -> float:
        """What these sites save together, while all others stay as they are; NaN where that is not known."""
        return sum(self.parts(sites, wiring).values())

    def parts(self, sites: Sequence[Site], wiring: Wiring) -> dict[str, float]:
        """The same, part by part, in microseconds; what a part costs is negative. `measured` is what was given of sites
        that were timed, the rest is the model's."""
        matches = [s.match for s in sites if s.match]
        plain = wiring.unfused(*matches)
        modelled = [s for s in sites if s.match and id(s) not in self.given]
        parts: dict[str, float] = {}
        if len(modelled) < len(matches):
            parts["measured"] = sum(self.given[id(s)] for s in sites if id(s) in self.given)
        shared = 0.0
        merged: dict[str, NodeProto] = {}  # tensor -> a 1x1 convolution of it
        for site in modelled:
            assert site.match is not None
            own, conv = self.model.own(site, site.match), site.match.nodes[0]
            parts["engine_kernels"] = parts.get("engine_kernels", 0.0) + own.before_us
            parts["our_kernels"] = parts.get("our_kernels", 0.0) - own.after_us
            if own.convolution_us and len(plain.siblings(conv)) > 1:
                shared -= own.convolution_us
                merged[conv.input[0]] = conv
        model = self.model
        parts["merged"] = shared + sum(model.merged_us(c, plain) - model.merged_us(c, wiring) for c in merged.values())
        near, chosen = model.readers(matches, wiring), [s.match for s in modelled if s.match]
        near |= model.inside(chosen, plain) | model.laid_out(plain, wiring)
        parts["neighbours"] = sum(model.node_us(n, plain) - model.node_us(n, wiring) for n in near.values())
        convs = [m for m in matches if m.nodes[0].op_type == "Conv"]  # norms read no images
        read = {t for m in convs for operand in m.inputs for t in tensors_of(operand)}
        read |= {o for m in convs for o in m.outputs if o and self.model.engine.name == RTX}
        parts["widened"] = sum(model.widened_us(t, plain) - model.widened_us(t, wiring) for t in sorted(read))
        ends = {t for m in chosen for operand in (*m.inputs, *m.outputs) if operand for t in tensors_of(operand)}
        parts["late_start"] = sum(model.late_us(t, plain) - model.late_us(t, wiring) for t in sorted(ends))
        low = [s.match for s in sites if s.cast_from and s.match]
        casts = {t for m in low for t in (*m.inputs, *m.outputs) if isinstance(t, str) and t}
        parts["casts"] = sum(model.cast_us(t, plain) - model.cast_us(t, wiring) for t in sorted(casts))
        return {part: us for part, us in parts.items() if us}
