"""The rules of `rules_tensorrt` held against the compiler where both speak: which Concats a plain network copies.

The rules for classic TensorRT come from public build logs, the oracle is Myelin. Where the two differ, DIFFER
says why; a difference that is not listed here makes a rule wrong, or a compiler new.
"""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from graphs import fused_types, graph, weights
from test_rules_tensorrt import CONV, ENLARGED, HALF, decoder

from cutefuse.engines import plugins
from cutefuse.engines.tensorrt import rtx
from cutefuse.graph.read import label
from cutefuse.graph.store import load_model
from cutefuse.match.find import find_sites
from cutefuse.operators.layouts import RTX, TENSORRT
from cutefuse.optimize.oracle import judged, record_of
from cutefuse.rewrite.patch import Options, patch
from cutefuse.select.engines import engine_of
from cutefuse.select.wiring import wiring
from models.__main__ import main as write_models

NETWORKS = ("yolov8n", "unet", "googlenet", "densenet121", "squeezenet1_1")
INCEPTIONS = {f"/inception{name}/Concat" for name in ("3a", "3b", "4a", "4b", "4c", "4d", "4e", "5a")}
BLOCKS = {f"/features/denseblock{i}/Concat" for i in (1, 2, 3, 4)}
# (engine of the rules, network) -> (copied by the rules alone, copied by the compiler alone)
DIFFER = {
    # Classic TensorRT merges the 1x1 convolutions of a module, whose outputs cannot be moved; Myelin does not merge.
    (TENSORRT, "googlenet"): (INCEPTIONS, set[str]()),
    # Its last module is joined on the way to the mean over the image.
    (RTX, "googlenet"): (set[str](), {"/inception5b/Concat"}),
    # The copies of what poolings make bear no name.
    (RTX, "yolov8n"): ({"/model.9/Concat"}, set[str]()),
    # The whole block is written in place for TensorRT; Myelin joins it on the way to the normalisation behind it.
    (TENSORRT, "densenet121"): (set[str](), BLOCKS),
}


@pytest.mark.slow
@pytest.mark.skipif(rtx.available() is not None, reason="TensorRT for RTX is not installed")
@pytest.mark.parametrize("network", NETWORKS)
def test_rules_and_compiler_copy_the_same_concats(network: str, tmp_path: Path) -> None:
    assert write_models(["--small", "--dtype", "float16", "--out", str(tmp_path), "--", network]) == 0
    (path,) = tmp_path.glob("*.onnx")
    record = record_of(rtx.compile_model(path))
    graph = find_sites(load_model(path), tmp_path)[0].whole
    concats = [n for n in graph.nodes if n.op_type == "Concat" and len(graph.dims(n.output[0]) or ()) == 4]
    assert concats
    compiled = {label(n) for n in concats if any(k.is_copy for k in record.of([label(n)]))}
    for engine in (TENSORRT, RTX):
        plain = wiring(graph, engine_of(engine, "", 89))
        ruled = {label(n) for n in concats if plain.engine.copied(plain, n)}
        assert (ruled - compiled, compiled - ruled) == DIFFER.get((engine, network), (set(), set())), engine


STEM, END = "i = Conv<pads=[1,1,1,1],strides=[2,2]>(x, stem) a = Relu(i) ", "z = Relu(v) y = Conv(z, w1)"
JOIN = f"v = {CONV}(c, w3) "
SHUFFLE = 'd = DepthToSpace<blocksize=2,mode="CRD">(u) '
POOLED = "MaxPool<kernel_shape=[5,5],pads=[2,2,2,2]>"
# Forms of the network's middle -> the op_types that rules and compiler fuse there, beside the stem.
FORMS = {
    "shuffled pixels beside a skip": (
        f"e = {HALF}(a, w32) u = Conv(e, w128) {SHUFFLE}t = Relu(d) c = Concat<axis=1>(a, t) {JOIN}",
        ["CuteSpread2ConcatConv1Relu", "CuteConcatConv2Relu"],
    ),
    "shuffled pixels and an activation that is a kernel": (
        f"e = {HALF}(a, w32) u = Conv(e, w128) {SHUFFLE}c = PRelu(d, slope) v = {CONV}(c, w32) ", []
    ),
    "deconvolved pixels": (f"e = {HALF}(a, w32) d = ConvTranspose<strides=[2,2]>(e, t2) v = {CONV}(d, w32) ", []),
    "poolings in a row": (
        f"p = {POOLED}(a) q = {POOLED}(p) r = {POOLED}(q) c = Concat<axis=1>(a, p, q, r) v = Conv(c, w4) ",
        ["CuteConcatConv4Relu"],
    ),
    "what a depthwise convolution reads too": (
        f"e = Conv<pads=[1,1,1,1],group=32>(a, g) c = Concat<axis=1>(a, e) {JOIN}", ["CuteConcatConv2Relu"]
    ),
    "branches of convolutions": (f"d = {CONV}(a, w32) e = Conv(a, w1) c = Concat<axis=1>(d, e) {JOIN}", []),
    "a residual": (f"d = {CONV}(a, w32) e = Relu(d) f = {CONV}(e, w32) v = Add(f, a) ", []),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(rtx.available() is not None, reason="TensorRT for RTX is not installed")
@pytest.mark.parametrize("form", FORMS)
def test_rules_and_compiler_fuse_the_same_and_no_engine_moves_more(form: str, tmp_path: Path) -> None:
    body, op_types = FORMS[form]
    shapes = {
        "stem": (32, 3, 3, 3), "w32": (32, 32, 3, 3), "w1": (32, 32, 1, 1), "w128": (128, 32, 1, 1),
        "t2": (32, 32, 2, 2), "w3": (32, 64, 3, 3), "w4": (32, 128, 1, 1), "g": (32, 1, 3, 3), "slope": (32, 1, 1),
    }  # fmt: skip
    used = {n: d for n, d in shapes.items() if f", {n})" in STEM + body + END}
    model = graph(STEM + body + END, weights(0, "float16", **used), inputs={"x": "1,3,128,128"}, dtype="float16")
    source = tmp_path / "m.onnx"
    onnx.save(model, source)
    options = Options(engine="rtx", sm=89)
    for result in (patch(source, tmp_path / "r.onnx", options), judged(source, tmp_path / "c.onnx", options)):
        assert result.output is not None
        assert fused_types(load_model(result.output)) == ["CuteImageConcatConv1Relu", *op_types]
    told = result.report["compiled"]
    assert told["note"] == "" and not told["left_out"]
    for figure in ("copies", "copy_bytes", "bytes"):
        assert told["patched"][figure] < told["plain"][figure]


@pytest.mark.slow
@pytest.mark.skipif(rtx.available() is not None, reason="TensorRT for RTX is not installed")
@pytest.mark.parametrize(("before", "in_nchw"), ENLARGED)
def test_the_compiler_turns_the_enlargements_that_the_rules_say(before: str, in_nchw: bool, tmp_path: Path) -> None:
    """A Transpose beside an enlargement is a kernel where that one lies in NCHW, else a view."""
    source, output = tmp_path / "m.onnx", tmp_path / "out.onnx"
    onnx.save(decoder(before), source)
    joined = next(n.name for n in onnx.load(source).graph.node if n.op_type == "Concat")
    result = patch(source, output, Options(engine="rtx", sm=89, all_sites=True, include=(joined,)))
    assert result.output == output
    compiled = rtx.compile_model(output, 89, {}, plugins.libraries(True))
    assert any("t/to_nhwc" in copy.onnx for copy in compiled.copies) == in_nchw
