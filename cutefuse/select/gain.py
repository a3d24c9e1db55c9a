"""What a fused site saves in an engine, over the graph: its own kernels against ours, and what its neighbours cost."""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from onnx import NodeProto

from cutefuse import kernels
from cutefuse.graph.numbers import ELEMENT_BYTES
from cutefuse.graph.read import Graph, label
from cutefuse.kernels import Call
from cutefuse.match.answer import Joined, Match
from cutefuse.match.conv.image import IMAGE
from cutefuse.match.conv.pools import POOLS
from cutefuse.match.site import Site
from cutefuse.operators.conv_form import AFTER
from cutefuse.operators.conv_math import Geometry
from cutefuse.select import times
from cutefuse.select import wiring as w
from cutefuse.select.compiled import Kernel, Record
from cutefuse.select.price import MODELLED, Price
from cutefuse.select.times import Convolution, Device, fused_us
from cutefuse.select.wiring import ELEMENTWISE, Engine, Wiring

_INSIDE = ("Concat", *w.ENLARGED, *w.RANGES, *w.IN_FILTERS)  # nodes of a match that cost something whatever it is
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

    def __init__(self, graph: Graph, engine: Engine, device: Device, record: Record | None = None) -> None:
        device = replace(device, spills=engine.timed)
        self.graph, self.engine, self.device, self.record = graph, engine, device, record
        self.plain = w.wiring(graph, engine, device)
        # Enlargements whose pixels lie between others.
        self.between = [n for n in graph.nodes if n.op_type in w.ENLARGED and w.is_between(n)]
        self._named = {label(n): n for n in graph.nodes}
        self.shares = functools.cache(self._shares)
        self.convolution_us = functools.cache(functools.partial(engine.convolution_us, device))
        self._fused_us: dict[Hashable, float | None] = {}  # by what a call asks of the library
        self._own: dict[int, tuple[Match, Own]] = {}  # by the id of a match, which is held so that it stays unique

    def _shares(self, name: str) -> dict[Kernel, float]:
        """The recorded kernels of a node, each with its share: 0 of an elementwise node that the kernel of another one
        would compute as well."""
        found = self.record.of([name]) if self.record else {}
        for kernel in found:
            nodes = {n: self._named.get(n) for n in kernel.nodes}
            own = [n for n, v in nodes.items() if not v or v.op_type not in ELEMENTWISE or self.plain.own_kernel(v)]
            if own:
                found[kernel] = (name in own) / len(own)
        return found

    def transposed_us(self, conv: Convolution) -> float:
        """Time of the engine's own kernel for a ConvTranspose of the same products."""
        return self.convolution_us(conv) * times.TRANSPOSED

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
            elif kind["quantised"] and not self.engine.quantised:
                found = Own(math.nan, math.nan, f"no time of {self.engine.title}'s quantised convolutions is recorded")
            else:
                found = self._convolution(site, match, call)
            self._own[id(match)] = match, found
        return self._own[id(match)][1]

    def price(self, site: Site) -> Price:
        """What the site's own kernels save: `Prices` of the model."""
        own = self.own(site, site.chosen)
        saved_us = own.before_us - own.after_us
        return Price(None if math.isnan(saved_us) else saved_us, MODELLED, self.fitted_to, own.why)

    @property
    def fitted_to(self) -> str:
        """What the times were fitted to, how they were carried to another GPU, and where nobody has checked them."""
        whose = "another GPU's" if self.device.near else "its"
        scaled = "" if self.device.name == times.FITTED_GPU else f", scaled to {self.device.name} by {whose} peak rates"
        unchecked = "" if self.engine.fitted else f", never checked in {self.engine.family}"
        return f"kernel times fitted to {times.FITTED_TO}{scaled}{unchecked}"

    def _norm(self, site: Site, match: Match, call: Call) -> Own:
        size, y = site.op.cost(call).bytes_moved, call.outputs[0]
        output_bytes = math.prod(y.dims) * ELEMENT_BYTES[y.dtype]
        facts = kernels.facts(call.op_type)
        before_us = self.engine.norm_us(self.device, size, output_bytes, facts)
        if self.record and not self.engine.timed:  # what they move is counted by `node_us`
            shares = self.record.of(label(n) for n in match.nodes)
            before_us = self._kernels_us({k: share for k, share in shares.items() if not k.is_copy})
        return Own(before_us, self.engine.our_norm_us(self.device, size))

    def _convolution(self, site: Site, match: Match, call: Call) -> Own:
        facts, anchor = kernels.facts(call.op_type), match.nodes[0]
        transposed = anchor.op_type == "ConvTranspose"
        ours = self._convolutions(site, call, transposed)
        together = self.engine.merges_pointwise and ours[0].taps == 1 and not facts["depthwise"] and not transposed
        convs, wider_us = ours, 0.0
        if POOLS in match.takes:  # the engine pools or sorts pixels in a kernel of its own, before a smaller filter
            x, own = (self.plain.dims(t) for t in anchor.input[:2])
            if not x or not own:
                return Own(math.nan, math.nan, UNSIZED)
            convs = [replace(ours[0], C=own[1], H=x[2], W=x[3], taps=own[2] * own[3])]
            if ours[0].C * ours[0].taps > math.prod(own[1:]):  # slices only sort the products
                wider_us = self.convolution_us(ours[0]) - self.convolution_us(convs[0])
        if call.key not in self._fused_us:
            self._fused_us[call.key] = fused_us(call, self.device, site.op.cost(call).bytes_moved)
        after_us = self._fused_us[call.key]
        before_us = sum(map(self.transposed_us if transposed else self.convolution_us, convs))
        if facts["depthwise"] and after_us is not None and not self.engine.fitted:  # no kernel of its own was timed
            before_us = min(before_us, after_us)
        mergeable_us = before_us if together else 0.0
        before_us += self._normalised_us(match, call) if facts["pre_activated"] else 0.0
        before_us += sum(self._behind_us(match, conv) for conv in convs)
        behind = self.graph.producer(anchor.input[0])
        if not self.engine.reads_ranges and behind is not None and behind.op_type in w.RANGES:
            before_us += self.device.copy_us(2 * self.plain.size_of(anchor.input[0]))
        if after_us is None:
            return Own(before_us, math.nan, "the kernel library predicts no time for it", mergeable_us)
        if not self.engine.timed:
            unknown = facts["pre_activated"] and not self.record  # else `inner_us` tells
            normalised_us = self._normalised_us(match, call) if unknown else 0.0
            return Own(after_us + normalised_us - wider_us, after_us + self._joined_us(match, call))
        if facts["residual"]:
            after_us += self.device.move_us(sum(c.output_bytes for c in convs))
        return Own(before_us, after_us + self._joined_us(match, call), "", mergeable_us)

    def _convolutions(self, site: Site, call: Call, transposed: bool) -> list[Convolution]:
        """What an engine computes in place of ours: a convolution for each output, or one where it merges them."""
        attrs, facts = dict[str, Any](call.attrs), kernels.facts(call.op_type)
        depthwise, spread, taps = bool(facts["depthwise"]), int(facts["spread"]), math.prod(attrs["kernel_shape"])
        H, W = (d * attrs.get("upsample", [1])[0] for d in call.inputs[0].dims[2:])
        N, (P, Q) = call.outputs[0].dims[0], (d // spread for d in call.outputs[0].dims[2:])
        filters = [t.dims[1] * spread**2 for t in call.outputs]
        if self.engine.merges_pointwise and taps == 1 and not depthwise and not transposed:
            filters = [sum(filters)]
        C, dtype = sum(attrs["channels"]), site.cast_from or call.dtype
        dilated_taps = Geometry.of(attrs).dilated_taps((H, W)) if depthwise else 0.0
        return [Convolution(N, C, H, W, K, P, Q, taps, dtype, depthwise, dilated_taps) for K in filters]

    def _behind_us(self, match: Match, conv: Convolution) -> float:
        """What the engine's kernels behind a convolution of the match take, which ours computes as well."""
        facts, anchor, output_bytes = kernels.facts(match.call.op_type), match.nodes[0], conv.output_bytes
        activation, residual = str(facts["activation"]), facts["residual"]
        moved = any(n.op_type == w.MOVES for n in match.nodes)
        summed = residual == AFTER and activation in ("Relu", "Clip")
        if self.engine.computes(self.graph, match, activation) and not summed:
            added_us = self.device.move_us(output_bytes) if residual else 0.0
            return self.device.pass_us(2 * output_bytes) if moved else added_us
        biased = len(anchor.input) > 2 or any(n.op_type == "BatchNormalization" for n in match.nodes)
        gated = not residual and all(self.plain.in_gate(o) for o in match.outputs)
        if gated or not (self.engine.inside("") or activation or residual or biased or moved):
            return 0.0
        return self.device.pass_us((3 if residual else 2) * output_bytes)

    def _unchanged(self, node: NodeProto, wiring: Wiring) -> Mapping[Kernel, float] | None:
        """The recorded kernels of a node, each with its share; None where nothing is recorded, or where fused nodes
        compute a part of such a kernel or make what the node reads, so that the compiler may decide otherwise."""
        if self.record is None or label(node) not in self.record.known:
            return None
        shares = self.shares(label(node))
        absorbed = [wiring.maker(t) for t in node.input if self.engine.absorbed(wiring, t)]
        read = [t for n in (node, *absorbed) if n for t in n.input]
        beside = [self._named[name] for k in shares for name in k.nodes if name in self._named]
        changed = any(wiring.source(t) in wiring.made for t in read) or not all(map(wiring.alive, beside))
        return None if changed else shares

    def _kernels_us(self, shares: Mapping[Kernel, float]) -> float:
        return sum(share * self.device.pass_us(kernel.traffic_bytes) for kernel, share in shares.items())

    def inner_us(self, matches: Iterable[Match], plain: Wiring, wiring: Wiring, near: Mapping[int, NodeProto]) -> float:
        """Time of the recorded kernels that go with nodes of these matches, those apart that `inside` tells of, and
        those of which a copy stays that is not counted anew `near` them."""
        if self.engine.timed:
            return 0.0
        convs = [m for m in matches if m.nodes[0].op_type in w.CONVOLUTIONS]
        nodes = {
            id(n): (n, IMAGE in m.takes or (n is m.nodes[0] and self._reads_image(m)))
            for m in convs for n in m.nodes if n.op_type not in (*_INSIDE, w.MOVES)
        }.values()  # fmt: skip
        gone = [(n, of_image) for n, of_image in nodes if plain.alive(n) and not wiring.alive(n)]
        shares = [(of_image, *share) for n, of_image in gone for share in (self._unchanged(n, plain) or {}).items()]

        def stays(kernel: Kernel) -> bool:
            rest = [self._named[name] for name in kernel.nodes if name in self._named]
            return any(n.op_type in _INSIDE and wiring.alive(n) and id(n) not in near for n in rest)

        # What the image's copy takes is a rule's: how the site reads the image and who else reads it decide.
        told = [(k, share) for of_image, k, share in shares if not (of_image and k.is_copy)]
        return sum(self._kernels_us({k: share}) for k, share in told if not stays(k))

    def _reads_image(self, match: Match) -> bool:
        """Whether a convolution reads an input of the network, as it is given or behind a Cast."""
        makers = {t: self.graph.producer(t) for t in match.read}
        given = [n.input[0] if n is not None and n.op_type == "Cast" else t for t, n in makers.items()]
        return any(t in self.graph.inputs for t in given)

    def _normalised_us(self, match: Match, call: Call) -> float:
        """What the normalisation and ReLU before a convolution cost."""
        inside, tensor = {id(n) for n in match.nodes}, match.nodes[0].input[0]
        node = self.graph.producer(tensor)
        while node is not None and id(node) in inside and node.op_type != "Concat":
            tensor = next(t for t in node.input if not self.graph.is_constant(t))
            node = self.graph.producer(tensor)
        N, _, H, W = call.inputs[0].dims
        size = N * H * W * sum(dict[str, Any](call.attrs)["channels"]) * ELEMENT_BYTES[call.dtype]
        return self.engine.normalised_us(self.device, size, node)

    def _joined_us(self, match: Match, call: Call) -> float:
        """A site's share of the Concats that the rewriter adds for it and for all that join the same tensors."""
        total_us = 0.0
        for operand, tensor in zip(match.inputs, call.inputs, strict=True):
            if isinstance(operand, Joined):
                size = math.prod(tensor.dims) * ELEMENT_BYTES[tensor.dtype]
                join_us = self.engine.join_us(self.device, size, len(operand.tensors))
                total_us += join_us / max(1, sum(n.op_type == "Concat" for n in self.graph.users(operand.tensors[-1])))
        return total_us

    def merged_us(self, conv: NodeProto, wiring: Wiring) -> float:
        """Time of the one kernel that TensorRT makes of all 1x1 convolutions of a tensor that stay."""
        group = wiring.siblings(conv)
        if not group:
            return 0.0
        x, y = (self.plain.dims(t) for t in (conv.input[0], conv.output[0]))
        filters = [(self.graph.dims(n.input[1]) or (-1,))[0] for n in group]
        if len(x) != 4 or len(y) != 4 or min(*x, *y, *filters) < 0:
            return math.nan
        dtype = self.graph.dtype(conv.input[0]) or "float32"
        whole = Convolution(x[0], x[1], x[2], x[3], sum(filters), y[2], y[3], 1, dtype)
        return self.convolution_us(whole)

    # ---------------------------------------------------------------------------------------------------- the graph
    def node_us(self, node: NodeProto, wiring: Wiring) -> float:
        """What a node that stays costs beside the convolutions, by what the compiler made of it, else by rules."""
        shares = self._unchanged(node, wiring) if wiring.alive(node) else None
        if shares is None:
            return wiring.node_us(node)
        every = node.op_type in (*_INSIDE, *ELEMENTWISE)  # of others what only moves: `network_us` adds the rest
        return self._kernels_us({k: s for k, s in shares.items() if every or k.is_copy})

    def readers(self, matches: Iterable[Match], wiring: Wiring) -> dict[int, NodeProto]:
        """The nodes whose cost depends on who makes the outputs of these matches."""
        own = {id(n) for m in matches for n in m.nodes}
        found: dict[int, NodeProto] = {}
        for match in matches:
            for tensor in filter(None, match.outputs):
                near = [*wiring.concats_of(tensor), *self.graph.users(tensor)]
                near = [n for n in near if len(n.input) <= w.MOST_TIED]
                found |= {id(n): n for n in near if n.op_type in ("Concat", w.MOVES, *ELEMENTWISE, *w.MEANS)}
        return {i: n for i, n in found.items() if i not in own}

    def inside(self, matches: Iterable[Match], wiring: Wiring) -> dict[int, NodeProto]:
        """The nodes of these matches that cost something beside the convolution, and the Concats that share a tensor
        with one of them or with a 1x1 convolution that TensorRT would merge."""
        timed = self.engine.timed
        counted = _INSIDE if timed else (*_INSIDE, w.MOVES)  # a timed convolution's price holds the shuffle
        own = [
            n for m in matches for n in m.nodes
            if n.op_type in counted or (timed and n.op_type == "Cast" and IMAGE in m.takes)
        ]  # fmt: skip
        found = {id(n): n for n in own}
        for node in own:
            tied = [n for t in node.input for n in wiring.tied_concats(t)] if node.op_type not in w.RANGES else []
            before = [n for n in map(self.graph.producer, node.input) if n and n.op_type in (*w.ENLARGED, *w.RANGES)]
            found |= {id(n): n for n in (*tied, *before)}
        for match in matches:
            if match.nodes[0].op_type in w.CONVOLUTIONS:
                for conv in wiring.siblings(match.nodes[0]):
                    ends = [o for n in (conv, *self.graph.users(conv.output[0])) for o in n.output]
                    found |= {id(n): n for t in ends for n in wiring.tied_concats(t)}
        return found

    def laid_out(self, plain: Wiring, wiring: Wiring) -> dict[int, NodeProto]:
        """The enlargements between pixels that the engine lays out in another way where more is fused."""
        in_pixels = self.engine.in_pixels
        return {id(n): n for n in self.between if in_pixels(plain, n) != in_pixels(wiring, n)}

    def saved_us(self, nodes: Iterable[NodeProto], plain: Wiring, wiring: Wiring) -> float:
        """What these nodes take in one wiring less what they take in another one."""
        return sum(self.node_us(n, plain) - self.node_us(n, wiring) for n in nodes)

    # ------------------------------------------------------------------------------------------------------- in words
    def note(self, site: Site, match: Match, wiring: Wiring) -> str:
        """What the engine does around a site, and what fusing it does to its neighbours. `wiring`: with it fused."""
        plain = wiring.unfused(match)
        parts = []
        for concat in (n for n in match.nodes if n.op_type == "Concat"):
            if wiring.alive(concat):
                parts.append(f"the tensor of Concat '{label(concat)}' has other readers and stays")
                continue
            count = f"{len(self.engine.copied(plain, concat)) or 'none'} of the Concat's {len(concat.input)} inputs"
            parts.append(f"{self.engine.title} {self.engine.joins} {count}")
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

    @staticmethod
    def sum_in_words(parts: Mapping[str, float]) -> str:
        """Where a gain comes from, part by part, so that a reader can add it up."""
        said = []
        if ours := -parts.get("our_kernels", 0.0):
            # Nothing for the engine's: its kernel of another layer computes this one as well.
            said.append(f"the engine's kernels take {parts.get('engine_kernels', 0.0):.1f} us, ours {ours:.1f} us")
        for part, words in _PARTS.items():
            if abs(us := parts.get(part, 0.0)) >= LEAST_SAID_US:
                said.append(f"{words} {abs(us):.1f} us {'less' if us > 0 else 'more'}")
        return "; ".join(said)


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
        matches = [s.chosen for s in sites]
        plain = wiring.unfused(*matches)
        modelled = [s for s in sites if id(s) not in self.given]
        parts: dict[str, float] = {}
        if len(modelled) < len(matches):
            parts["measured"] = sum(self.given[id(s)] for s in sites if id(s) in self.given)
        shared = 0.0
        merged: dict[str, NodeProto] = {}  # tensor -> a 1x1 convolution of it
        for site in modelled:
            own, conv = self.model.own(site, site.chosen), site.chosen.nodes[0]
            parts["engine_kernels"] = parts.get("engine_kernels", 0.0) + own.before_us
            parts["our_kernels"] = parts.get("our_kernels", 0.0) - own.after_us
            if own.convolution_us and len(plain.siblings(conv)) > 1:
                shared -= own.convolution_us
                merged[conv.input[0]] = conv
        model = self.model
        parts["merged"] = shared + sum(model.merged_us(c, plain) - model.merged_us(c, wiring) for c in merged.values())
        near, chosen = model.readers(matches, wiring), [s.chosen for s in modelled]
        after = [n for n in near.values() if n.op_type in ELEMENTWISE]
        near |= model.inside(chosen, plain) | model.laid_out(plain, wiring)
        parts["neighbours"] = model.saved_us(near.values(), plain, wiring) + model.inner_us(chosen, plain, wiring, near)
        widened_us = model.engine.widened_us
        convs = [m for m in matches if m.nodes[0].op_type in w.CONVOLUTIONS]  # norms read no images
        read = {t for m in convs for t in m.read}
        read |= {o for m in convs for o in m.outputs if o} | {o for n in after for o in n.output}
        parts["widened"] = sum(widened_us(plain, t) - widened_us(wiring, t) for t in sorted(read))
        ends = {t for m in chosen for t in (*m.read, *m.outputs) if t}
        parts["late_start"] = sum(plain.late_us(t) - wiring.late_us(t) for t in sorted(ends))
        low = [s.chosen for s in sites if s.cast_from]
        casts = {t for m in low for t in (*m.inputs, *m.outputs) if isinstance(t, str) and t}
        parts["casts"] = sum(plain.cast_us(t) - wiring.cast_us(t) for t in sorted(casts))
        return {part: us for part, us in parts.items() if us}
