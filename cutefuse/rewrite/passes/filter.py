"""What the user leaves out: operators, names, forms."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from onnx import NodeProto

from cutefuse.errors import CutefuseError
from cutefuse.graph.scopes import names_of
from cutefuse.match.site import EXCLUDED, FUSED, LEFT_OUT, Site
from cutefuse.operators import operators
from cutefuse.rewrite.options import Options
from cutefuse.rewrite.state import State


def run(state: State) -> None:
    """Reads `sites`; gives those that the filters name a smaller match or leaves them out.

    Raises CutefuseError for an operator that there is not.
    """
    options = state.options
    stems = [op.stem for op in operators()]
    for stem in (*options.include_op, *options.exclude_op):
        if stem not in stems:
            raise CutefuseError(f"there is no operator '{stem}'; choose one of {', '.join(stems)}")
    for site in state.fused:
        while site.match and site.match.takes & set(options.without):
            if not site.fall_back():
                site.refuse(EXCLUDED, f"--without {' '.join(sorted(site.match.takes & set(options.without)))}")
                break
        if site.status != FUSED:
            continue
        if reason := _excluded(site, options):
            site.refuse(EXCLUDED, reason)
        elif reason := options.outweighed.get(site.name, ""):
            site.refuse(LEFT_OUT, reason)


def names_at(site: Site, nodes: Sequence[NodeProto]) -> set[str]:
    """What --include and --exclude may call a site with these nodes."""
    return {site.name}.union(*map(names_of, nodes))


def _excluded(site: Site, options: Options) -> str:
    """Which filter leaves a site out; "" where none does."""
    names = names_at(site, site.nodes) if options.include or options.exclude else set[str]()
    if options.only is not None and site.name not in options.only:
        return "it is not among the sites that were asked for"
    if options.include and not any(fnmatchcase(n, p) for n in names for p in options.include):
        return "no --include pattern names it"
    if pattern := next((p for p in options.exclude if any(fnmatchcase(n, p) for n in names)), None):
        return f"--exclude '{pattern}' names it"
    if options.include_op and site.op.stem not in options.include_op:
        return "no --include-op names its operator"
    return f"--exclude-op {site.op.stem}" if site.op.stem in options.exclude_op else ""
