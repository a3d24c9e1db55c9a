"""What the library says about op_types and tiles: every name follows from the facts, and facts from no name."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from cutefuse import kernels
from cutefuse.operators.conv_form import Form, form_of, forms

OPS = {op["name"]: op for op in kernels.describe()["ops"]}


def conv_name(v: dict) -> str:
    """The op_type that a convolution's facts spell."""
    kinds = {"Q": v["quantised"], "View": v["view"], "Pre": v["pre_activated"], "Image": v["image"],
             "Depthwise": v["depthwise"], f"Spread{v['spread']}": v["spread"] > 1}  # fmt: skip
    prefix = f"Cute{''.join(k for k, is_one in kinds.items() if is_one)}ConcatConv"
    several = f"x{v['outputs']}" if v["outputs"] > 1 else ""
    before, after = ("Add" if v["residual"] == place else "" for place in ("before", "after"))
    int8 = "Q" if "int8" in v["output_types"] else ""
    return f"{prefix}{v['sources']}{several}{before}{v['activation']}{after}{int8}"


@pytest.mark.parametrize("stem", ["concat_conv", "quant_concat_conv"])
def test_the_facts_of_a_convolution_spell_its_op_type_and_count_its_tensors(stem: str) -> None:
    for v in OPS[stem]["variants"]:
        assert conv_name(v) == v["op_type"] and v["kind"] == "convolution"
        vectors = 2 + v["quantised"] + 2 * v["pre_activated"]
        assert v["inputs"] == v["sources"] + vectors + (v["residual"] is not None), v
        half = v["image"] or v["depthwise"] or v["spread"] > 1
        floats = ["float16", "bfloat16"] if half else ["float32", "float16", "bfloat16"]
        assert v["types"] == (["int8", "float8_e4m3fn"] if v["quantised"] else floats)
    spelled = {v["op_type"] for v in OPS[stem]["variants"]}
    assert len(spelled) == len(OPS[stem]["variants"])


def test_the_facts_of_the_norms() -> None:
    found = {v["op_type"]: (v["kind"], v["layer"], v["residual"]) for v in OPS["row_norm"]["variants"]}
    assert found == {
        "CuteRMSNorm": ("norm", False, None), "CuteAddRMSNorm": ("norm", False, "before"),
        "CuteLayerNorm": ("norm", True, None), "CuteAddLayerNorm": ("norm", True, "before"),
    }  # fmt: skip
    kinds = {v["op_type"]: v["kind"] for v in OPS["row_norm_training"]["variants"]}
    assert kinds == {"CuteRowNormForward": "norm", "CuteRowNormBackward": "norm_backward"}


def test_the_facts_of_the_windows() -> None:
    found = [(v["op_type"], v["kind"], v["sources"], v["inputs"], v["outputs"]) for v in OPS["window"]["variants"]]
    assert found == [(f"CuteWindow{n}", "window", n, n, 1) for n in range(1, 9)]
    assert OPS["window"]["configs"] == []


def test_every_activation_of_the_list_is_used_and_no_other() -> None:
    listed = kernels.describe()["activations"]
    assert listed[0] == "" and len(set(listed)) == len(listed) == 9
    for stem in ("concat_conv", "quant_concat_conv"):
        assert {v["activation"] for v in OPS[stem]["variants"]} == set(listed)


def test_the_page_of_the_plugins_lists_every_activation() -> None:
    page = (Path(__file__).parents[1] / "docs/plugin.md").read_text()
    assert f"`CuteConcatConv{{1..8}}{{{','.join(kernels.describe()['activations'])}}}`" in page


def test_facts_finds_an_op_type_and_refuses_an_unknown_one() -> None:
    facts = kernels.facts("CuteConcatConv3x2Silu")
    assert (facts["sources"], facts["outputs"], facts["activation"]) == (3, 2, "Silu")
    with pytest.raises(kernels.KernelError, match="CuteConcatConv9 is not in the library"):
        kernels.facts("CuteConcatConv9")


@pytest.mark.parametrize("stem", OPS)
def test_a_retired_tile_is_in_no_table_and_its_heir_is(stem: str) -> None:
    living = {c["id"]: c for c in OPS[stem]["configs"]}
    assert len(living) == len(OPS[stem]["configs"]) and min(living, default=1) > 0
    assert OPS[stem]["retired"] or stem == "window", "every other operator has lost tiles"
    for retired in OPS[stem]["retired"]:
        assert retired["id"] not in living and retired["heir"] in living, retired
    assert len({r["id"] for r in OPS[stem]["retired"]}) == len(OPS[stem]["retired"])


def test_every_tile_says_how_it_works_and_what_it_takes() -> None:
    kinds = {stem: {c["kind"] for c in op["configs"]} for stem, op in OPS.items()}
    assert kinds["concat_conv"] == {"plain", "taps", "enlarged", "im2col", "pingpong", "halo", "small"}
    assert kinds["quant_concat_conv"] == {"plain", "rows", "im2col", "pingpong", "halo", "small"}
    assert kinds["row_norm"] == {"warp", "block", "cluster", "shared", "stream"} == kinds["row_norm_training"]
    for c in OPS["concat_conv"]["configs"]:
        assert c["types"] == (["float32"] if "tf32" in c["name"] else ["float16", "bfloat16"]), c
        assert (c["min_sm"] == 90) == (c["kind"] in {"im2col", "pingpong", "halo", "small"}), c
    for c in OPS["quant_concat_conv"]["configs"]:
        float8 = c["name"].startswith("f8_")
        assert c["types"] in ([["float8_e4m3fn"]] if float8 else [["int8"], ["int8", "float8_e4m3fn"]]), c
        assert c["needs"] == (["float8"] if float8 else ["wgmma"] if "sm90" in c["name"] else []), c
        assert c["min_sm"] == (89 if float8 else 90 if "sm90" in c["name"] else 80), c


def test_forms_are_the_facts_of_all_convolutions_and_one_that_is_none_is_a_sentence() -> None:
    assert len(forms()) == sum(len(OPS[stem]["variants"]) for stem in ("concat_conv", "quant_concat_conv"))
    assert all(form_of(op_type) == form and form.op_type == op_type for form, op_type in forms().items())
    assert all(form.inputs == kernels.facts(op_type)["inputs"] for form, op_type in forms().items())
    for form in (Form(9), Form(2, "Mish"), Form(2, outputs=2, residual="before"), Form(2, to_quantised=True)):
        with pytest.raises(kernels.KernelError, match="no op_type for"):
            _ = form.op_type
    with pytest.raises(kernels.KernelError, match="CuteRMSNorm is no convolution"):
        form_of("CuteRMSNorm")


@pytest.mark.torch
def test_pytorch_computes_every_activation_of_the_list() -> None:
    pytest.importorskip("torch")
    from cutefuse.torch import ACTIVATIONS

    assert set(ACTIVATIONS) == set(kernels.describe()["activations"])


def read_names(text: str) -> list[int]:
    """Lines that take an op_type's name apart or put one together: text that holds a part of one, in an expression."""
    found = []
    for node in ast.walk(ast.parse(text)):
        pieces = []
        if isinstance(node, ast.JoinedStr):
            pieces = node.values
        elif isinstance(node, ast.BinOp):
            pieces = [node.left, node.right]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            called = ("compile", "match", "fullmatch", "search", "startswith", "endswith", "removeprefix", "replace")
            pieces = node.args if node.func.attr in called else []
        values = [p.value for p in pieces if isinstance(p, ast.Constant) and isinstance(p.value, str)]
        found += [node.lineno for v in values if v.startswith("Cute") or "ConcatConv" in v]
    return found


@pytest.mark.slow
def test_no_file_of_the_package_reads_or_writes_a_name_by_its_parts() -> None:
    package = Path(__file__).resolve().parent.parent / "cutefuse"
    assert {p.name: lines for p in package.rglob("*.py") if (lines := read_names(p.read_text()))} == {}


@pytest.mark.parametrize(
    "text",
    ["re.compile(r'Cute(Q?)ConcatConv([1-8])')", "name.startswith('Cute')", "f'CuteConcatConv{n}'", "'CuteQ' + rest"],
)
def test_reading_a_name_is_seen(text: str) -> None:
    assert read_names(text) == [1]
