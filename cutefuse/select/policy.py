"""Which of the legal sites pay: decided over the graph, because a fused node changes what its neighbours cost.

All legal sites start fused. The one that is furthest below the threshold goes, the others around it are priced again,
and so on until none is left. Sites that share a Concat, which only goes when all of them are fused, are then judged
together, and so are all sites that touch each other. A site that went may have kept another from its nodes, so the rest
is matched and judged anew; what went stays away, so this ends.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, replace

from cutefuse.match.answer import Match
from cutefuse.match.conv.build import PARALLEL
from cutefuse.match.site import FUSED, LEFT_OUT, MERGED, Site
from cutefuse.select.gain import Model, Pricer
from cutefuse.select.network_time import network_us
from cutefuse.select.price import MODELLED, Price, Pricing
from cutefuse.select.wiring import MOST_TIED, Wiring

# A site is taken when it saves this much: the timing of one kernel repeats to about 0.3 us, and the model of a
# convolution is off by 10 % of its time in the mean, in both kernels alike.
LEAST_US = 0.3
LEAST_SHARE = 0.03


@dataclass(frozen=True)
class Policy:
    """all_sites: take every legal site, prices are told only. min_gain_us: the least gain; None for the default, which
    also grows with the cost of the site. A site of unknown gain is taken only for a least gain of 0."""

    all_sites: bool = False
    min_gain_us: float | None = None

    def least_us(self, before_us: float) -> float:
        """The least gain of a site whose kernels take `before_us` in the engine (NaN: not known)."""
        if self.min_gain_us is not None:
            return self.min_gain_us
        return LEAST_US if math.isnan(before_us) else max(LEAST_US, LEAST_SHARE * before_us)


@dataclass(frozen=True)
class Saving:
    """What the fused sites save together, and the time of the whole network without them; None: not known."""

    gain_us: float | None
    plain_us: float | None


class Choice:
    """Which sites stay FUSED, decided in rounds: `restore` the sites, make them legal beside each other, `judge` them.

    `apart` are the ids of sites that must not be merged with others: what is merged loses there.
    """

    def __init__(self, model: Model, sites: Sequence[Site], policy: Policy) -> None:
        self.apart: set[int] = set()
        self._model, self._policy = model, policy
        self._sites = sites
        self._starts = {id(s): copy(s) for s in sites}  # as they were before any choice; without those that went

    def restore(self) -> None:
        """Make every site that never went what it was before any choice."""
        for site in self._sites:
            if start := self._starts.get(id(site)):
                vars(site).update(vars(start))

    def judge(self, price: Pricing | None = None) -> Saving | None:
        """Fill in `gain_us` and `basis`, and return what all fused sites save together; None where sites went or took a
        smaller match, and the rest must be restored, made legal and judged anew. price: figures to trust before the
        model's."""
        sites = self._sites
        round_ = _Round(self._model, [s for s in sites if s.status == FUSED], self._policy, price)
        if self._policy.all_sites or not round_.decide():
            return round_.finish()
        for site in (s for s in sites if id(s) in round_.changed):
            if smaller := round_.changed[id(site)]:
                self._starts[id(site)].take(smaller)
            elif PARALLEL in site.chosen.takes and id(site) not in self.apart:
                inside = {id(n) for n in site.nodes}  # the convolution of a site that is merged here is one of them
                merged = (s for s in sites if s.status == MERGED and s.match and id(s.match.nodes[0]) in inside)
                self.apart |= {id(s) for s in (site, *merged)}
            else:
                self._starts.pop(id(site), None)
        return None


class _Round:
    """One pass over the sites that are legal beside each other."""

    def __init__(self, model: Model, sites: Sequence[Site], policy: Policy, measured: Pricing | None) -> None:
        self.model, self.policy = model, policy
        self.sites = {id(s): s for s in sites}
        self.prices: dict[int, Price] = {}  # of the first source that knows one, else of the model
        self.changed: dict[int, Match | None] = {}  # id of a site -> a smaller match, or None where it goes
        known = measured(model.graph, sites) if measured and sites else None
        for site in sites:
            price = known(site) if known else model.price(site)
            if known and price.saved_us is None:
                price = replace(model.price(site), note=price.note)
            self.prices[id(site)] = price
        given = {i: p.saved_us for i, p in self.prices.items() if p.basis != MODELLED and p.saved_us is not None}
        self.pricer = Pricer(model, given)
        self.wiring = model.plain.fused(*(s.chosen for s in sites))
        self.near = _neighbours(sites, model)
        self.gains: dict[int, float] = {}
        self.parts: dict[int, tuple[Wiring, dict[str, float]]] = {}  # of the gains, in which wiring
        self.place = {id(s): i for i, s in enumerate(sites)}
        self.losers: list[tuple[float, int, int]] = []  # heap of (excess, place, id of a site), old ones too
        self._reprice(self.sites)

    # ---------------------------------------------------------------------------------------------------- decisions
    def decide(self) -> bool:
        """Take smaller matches where they pay more, and drop sites; whether anything changed."""
        for site in self.sites.values():
            self._smaller(site)
        while self.sites:
            if loser := self._loser():
                self._drop([loser])
            elif group := self._losing_group():
                self._drop(group)
            else:
                break
        return bool(self.changed)

    def _loser(self) -> Site | None:
        """The site that is furthest below the threshold, the first of several; None where none is below."""
        while self.losers:
            excess, _, key = heapq.heappop(self.losers)
            if (site := self.sites.get(key)) and excess == self._excess(site):
                return site
        return None

    def _least_us(self, site: Site) -> float:
        own = self.model.own(site, site.chosen)
        # Where both kernels count as equally fast, what is not known of their times is not in the gain.
        return self.policy.least_us(own.before_us if self.model.engine.timed else 0.0)

    def _excess(self, site: Site) -> float:
        """How far its gain is above the threshold; an unknown one is far below, unless --min-gain asks for nothing."""
        gain, least = self.gains[id(site)], self.policy.min_gain_us
        if math.isnan(gain):
            return -math.inf if least is None or least > 0 else math.inf
        return gain - self._least_us(site)

    def _smaller(self, site: Site) -> None:
        """Try the smaller matches of a site, where the model alone prices it."""
        best = site.chosen
        if id(site) in self.pricer.given or math.isnan(self.gains[id(site)]):
            return
        if best.otherwise is None:
            site.take(best)
            return
        plain, largest = self.wiring.unfused(best), best
        for match in largest.chain[1:]:
            site.match = match
            gain = self.pricer.gain_us([site], plain.fused(match))
            if gain > self.gains[id(site)] + LEAST_US:
                self.gains[id(site)], best = gain, match
        site.take(best)
        if best is not largest:
            self.changed[id(site)] = best
            self.wiring = plain.fused(best)
            self._rank(site)
            self._reprice(self.near[id(site)])

    def _losing_group(self) -> list[Site]:
        """Sites that pay only beside each other and not together: those with a Concat in common, and those that pay for
        the layout of others alone, which save less than each of them should; and all that touch each other, which save
        nothing."""
        concats: dict[int, list[Site]] = {}
        for site in self.sites.values():
            for node in site.nodes:
                if node.op_type == "Concat":
                    concats.setdefault(id(node), []).append(site)
        groups = [(group, math.inf) for group in (*concats.values(), self._held())]
        groups += [(group, LEAST_US) for group in self._touching()]
        for group, enough_us in groups:
            if len(group) > 1:
                gain = self.pricer.gain_us(group, self.wiring)
                if gain < min(enough_us, sum(self._least_us(s) for s in group)):  # false for NaN
                    for site in group:
                        self.gains[id(site)] = gain / len(group)
                    return group
        return []

    def _held(self) -> list[Site]:
        """The sites that would not pay if the engine laid out the rest of the network the same without them."""
        found: list[Site] = []
        for site in self.sites.values() if self.model.between else []:
            plain = self.wiring.unfused(site.chosen)
            layout_us = self.model.saved_us(self.model.laid_out(plain, self.wiring).values(), plain, self.wiring)
            if layout_us and self._excess(site) < layout_us:
                found.append(site)
        return found

    def _touching(self) -> list[list[Site]]:
        """The sites in groups, none of which has a neighbour in another one."""
        left, groups = dict(self.sites), []
        while left:
            waiting, group = [next(iter(left))], []
            while waiting:
                if site := left.pop(waiting.pop(), None):
                    group.append(site)
                    waiting += sorted(self.near[id(site)], key=self.place.__getitem__)  # ids differ between runs
            groups.append(group)
        return groups

    def _drop(self, group: Sequence[Site]) -> None:
        before, parts = self.wiring, self.pricer.parts(group, self.wiring)
        for site in group:
            gain, price = self.gains[id(site)], self.prices[id(site)]
            measured = id(site) in self.pricer.given
            if math.isnan(gain):
                why = price.note or "the sizes around it are not known"
                site.refuse(LEFT_OUT, f"what it would save is not known: {why}; --all fuses it")
            else:
                site.basis, site.priced_by = price.basis, price.engine
                site.gain_us, site.gain_parts = round(gain, 3), parts if len(group) == 1 else {}
                least = self.policy.min_gain_us
                asked = "" if least is None else f", less than --min-gain {least:g} us"
                # The sum first: a line that is cut keeps what adds up.
                words = [price.note, "" if measured and len(group) == 1 else self.model.sum_in_words(parts)]
                words += [] if measured else [self.model.note(site, site.chosen, self.wiring)]
                shared = f" as its share of {len(group)} sites that need each other" if len(group) > 1 else ""
                why = "; ".join(filter(None, words))
                saves = f"costs {-gain:.1f} us" if gain < -0.05 else f"saves {max(gain, 0.0):.1f} us"
                site.refuse(LEFT_OUT, f"{saves}{asked}{shared}" + (f" ({why})" if why else ""))
            self.changed[id(site)] = None
            self.wiring = self.wiring.unfused(site.chosen)
        for site in group:
            del self.sites[id(site)]
        # How the graph is laid out concerns all convolutions behind.
        apart = not self.model.laid_out(self.wiring, before)
        self._reprice({i for s in group for i in self.near[id(s)]} if apart else self.sites)

    def _reprice(self, keys: Iterable[int]) -> None:
        """Price the sites of these ids that are there anew."""
        for site in [self.sites[i] for i in keys if i in self.sites]:
            self.parts[id(site)] = self.wiring, (parts := self.pricer.parts([site], self.wiring))
            self.gains[id(site)] = sum(parts.values())
            self._rank(site)

    def _rank(self, site: Site) -> None:
        if (excess := self._excess(site)) < 0:
            heapq.heappush(self.losers, (excess, self.place[id(site)], id(site)))

    # ------------------------------------------------------------------------------------------------------- results
    def finish(self) -> Saving:
        """Write the gains into the sites that are fused; what they save together."""
        sites = list(self.sites.values())
        for site in sites:
            gain = self.gains[id(site)]
            if not math.isnan(gain):
                price = self.prices[id(site)]
                site.gain_us, site.basis, site.priced_by = round(gain, 3), price.basis, price.engine
                beside, parts = self.parts[id(site)]
                site.gain_parts = parts if beside is self.wiring else self.pricer.parts([site], self.wiring)
        known = [s for s in sites if s.gain_us is not None]
        total = self.pricer.gain_us(known, self.wiring) if known else 0.0
        plain_us = network_us(self.model)
        return Saving(*(None if math.isnan(us) else round(us, 3) for us in (total, plain_us)))


def _neighbours(sites: Sequence[Site], model: Model) -> dict[int, set[int]]:
    """id of a site -> ids of those whose gain depends on it: they, or their readers, touch a tensor in common. One that
    very many touch ties none: what each has of its cost is small, and all pairs would fill the memory."""
    by_tensor: dict[str, set[int]] = {}
    touched: dict[int, set[str]] = {}
    for site in sites:
        near = [*site.nodes, *(u for o in site.chosen.outputs for u in model.graph.users(o))]
        names = {t for n in near if len(n.input) + len(n.output) <= MOST_TIED for t in (*n.input, *n.output)}
        touched[id(site)] = names = {t for t in names if t and not model.graph.is_constant(t)}
        for name in names:
            by_tensor.setdefault(name, set()).add(id(site))
    tied = {name: ids for name, ids in by_tensor.items() if len(ids) <= MOST_TIED}
    return {i: {other for name in names for other in tied.get(name, ())} - {i} for i, names in touched.items()}
