"""The three halves of every operator agree: kernel library, plugin, Python; and none is missing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cutefuse import kernels
from cutefuse.match.find import finders
from cutefuse.operators import operators
from cutefuse.operators.op import Case, FusedOp

ROOT = Path(__file__).parent.parent
OPS = {op.stem: op for op in operators()}
CASES = [(op, case) for op in OPS.values() for case in op.cases()]
IDS = [f"{op.stem}-{case.name}" for op, case in CASES]


def described(stem: str) -> dict:
    return next(o for o in kernels.describe()["ops"] if o["name"] == stem)


def test_every_stem_has_a_description_in_each_layer() -> None:
    library = {o["name"] for o in kernels.describe()["ops"]}
    graph_ops = library - {"row_norm_training", "window"}  # PyTorch's alone: no ONNX graph holds them
    python = {finder.op.stem for finder in finders()}
    folders = {p.name for p in (ROOT / "cutlass_kernels").iterdir() if p.is_dir()}
    plugins = {stem for stem in library if (ROOT / f"plugins/{stem}.cpp").is_file()}
    assert python == plugins == graph_ops == set(OPS)
    assert folders - library == {"conv"} and library <= folders  # the core that the convolutions share


@pytest.mark.slow
@pytest.mark.parametrize("stem", OPS)
def test_function_bodies_declare_exactly_the_attributes_of_the_library(stem: str) -> None:
    *names, tile = [a["name"] for a in described(stem)["attributes"]]
    used = {c.op_type for c in OPS[stem].cases()}
    for variant in described(stem)["variants"]:
        if variant["op_type"] in used:
            body = OPS[stem].function(variant["op_type"], 17, "float32")
            group = ["group"] if variant["depthwise"] else []  # of the body's Conv, from the node
            assert list(body.attribute) == [*names, *group, "plugin_version", "plugin_namespace"]
            # References to other defaults would be unknown to the reference evaluator; this one nothing refers to.
            assert [(a.name, a.i) for a in body.attribute_proto] == [(tile, 0)] == [("tile", 0)]
            assert (len(body.input), len(body.output)) == (variant["inputs"], variant["outputs"])
            assert (body.domain, body.name) == ("cutefuse", variant["op_type"])
            assert all(n.startswith("__cutefuse_") for n in (*body.input, *body.output))


@pytest.mark.long
@pytest.mark.parametrize("stem", OPS)
def test_a_body_uses_only_attributes_that_exist(stem: str) -> None:
    known = {a["name"] for a in described(stem)["attributes"]} | {"group"}
    for op_type in {c.op_type for c in OPS[stem].cases()}:
        for opset in (o for o in (11, 12, 13, 17, 21) if o >= OPS[stem].oldest_opset(op_type)):
            nodes = OPS[stem].function(op_type, opset, "float32").node
            assert {a.ref_attr_name for n in nodes for a in n.attribute if a.ref_attr_name} <= known - {"tile"}


@pytest.mark.parametrize(("op", "case"), CASES, ids=IDS)
def test_every_case_is_legal_and_writes_every_attribute_in_kind_and_count(op: FusedOp, case: Case) -> None:
    specs = {a["name"]: a for a in described(op.stem)["attributes"]}
    for dtype in case.dtypes:
        call = op.call(case, dtype)
        assert kernels.operator_of(call.op_type)["name"] == op.stem
        assert kernels.reject(call) is None, dtype
        assert [*call.attrs, "tile"] == list(specs), "the library's order; a tile is asked for by a node, not a call"
        for name, given in call.attrs.items():
            values = list(given)  # type: ignore[arg-type]
            kind = int if specs[name]["kind"] == "ints" else float
            assert all(isinstance(v, kind) for v in values), name
            assert specs[name]["min_count"] <= len(values) <= specs[name]["max_count"], name


@pytest.mark.parametrize("stem", OPS)
def test_cases_cover_every_op_type_that_the_rewriter_or_a_plugin_uses(stem: str) -> None:
    op_types = {v["op_type"] for v in described(stem)["variants"]}
    covered = {c.op_type for c in OPS[stem].cases()}
    assert covered <= op_types
    assert op_types - covered == set()


@pytest.mark.parametrize("stem", OPS)
def test_attributes_left_to_their_defaults_mean_what_the_python_half_writes(stem: str) -> None:
    defaults = {a["name"]: a for a in described(stem)["attributes"] if a["default_count"] and a["name"] != "tile"}
    case = OPS[stem].cases()[0]
    bare = OPS[stem].call(Case(case.name, case.op_type, case.sizes, {}, case.dtypes), case.dtypes[0])
    for name, spec in defaults.items():
        written = [float(np.float32(v)) for v in bare.attrs[name]]  # type: ignore[union-attr]
        assert written == [float(np.float32(spec["default_value"]))] * spec["default_count"], name


@pytest.mark.slow
@pytest.mark.parametrize(("op", "case"), CASES, ids=IDS)
def test_reference_and_operands_have_the_shapes_of_the_call(op: FusedOp, case: Case) -> None:
    call = op.call(case, case.dtypes[0])
    operands = op.operands(call, np.random.default_rng(0))
    assert [o.shape for o in operands] == [tuple(t.dims) for t in call.inputs]
    outputs, sizes = op.reference(call, operands), op.magnitude(call, operands)
    assert [o.shape for o in outputs] == [s.shape for s in sizes] == [tuple(t.dims) for t in call.outputs]
    assert all(o.dtype == np.float64 and np.isfinite(o).all() for o in outputs)
    cost = op.cost(call)
    assert cost.flops > 0 and cost.bytes_moved > 0 and op.title(call)
