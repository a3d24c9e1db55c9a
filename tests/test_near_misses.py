"""Near misses: convolutions and norms beside a neighbour that stays are listed with a reason, and counted by cause."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from graphs import bn_weights, fused_types, graph, run_patch, weights

from cutefuse.commands.patch import main
from cutefuse.match.explain import CAUSES, OTHER, by_cause, cause_of, sentence

CAT = "c = Concat<axis=1>(a, b) "
BN = "BatchNormalization(c, gamma, beta, mean, var) "
TAIL = "y = Conv(t, v)"
FILTERS = weights(v=(12, 24, 3, 3), z=(12, 16, 3, 3), g=(24, 1, 3, 3))
VALUES = FILTERS | bn_weights(24) | {
    "e": FILTERS["z"][:, :8], "w2": FILTERS["g"].repeat(4, axis=1), "mm": np.eye(7, dtype=np.float32),
    "k3": np.ones(5, np.float32),
    "root": np.array(2**0.5, np.float32), "unit": np.array(1, np.float32), "half": np.array(0.5, np.float32),
    "three": np.array(3, np.float32),
    "slope": np.linspace(0.1, 1, 12, dtype=np.float32).reshape(12, 1, 1),
    "s4": np.int64([0, 2, 12, -1]), "s5": np.int64([0, 24, 9, 7]),
    "scales": np.float32([1, 1, 2, 2]), "one": np.ones(12, np.float32), "zero": np.zeros(12, np.float32),
    "k2": np.ones((1, 24, 1, 1), np.float32),
}  # fmt: skip


def make(body: str, **options: object) -> onnx.ModelProto:
    used = set(body.replace("(", " ").replace(")", " ").replace(",", " ").split())
    return graph(body, {k: v for k, v in VALUES.items() if k in used}, **options)


BETWEEN = {
    "DenseNet": (CAT + f"n = {BN} t = LeakyRelu(n) " + TAIL, "BatchNormalization and LeakyRelu stand between"),
    "DenseNet in three steps": (
        CAT + f"n = {BN} m = Mul(n, k2) o = Add(m, k2) t = Elu(o) " + TAIL,
        "BatchNormalization, Mul, Add and Elu stand between",
    ),
    "an activation": (CAT + "t = Relu(c) " + TAIL, "Relu stands between this Conv and Concat 'Concat_0'"),
    "SiLU": (CAT + "s = Sigmoid(c) t = Mul(c, s) " + TAIL, "Mul stands between"),
    "a shuffle of channels": (
        CAT + "p = Reshape(c, s4) q = Transpose<perm=[0,2,1,3]>(p) t = Reshape(q, s5) " + TAIL,
        "a channel shuffle (Reshape, Transpose, Reshape) stands between",
    ),
    "bilinear": (CAT + 't = Resize<mode="linear">(c, , scales) ' + TAIL, "Resize 'Resize_1' stays: mode=linear"),
    "GhostNet's cheap operation": (CAT + "y = Conv<group=24>(c, g)", "the filter is float32; depth"),
    "MONAI's up path": (CAT + "y = ConvTranspose(c, w2)", "this is a ConvTranspose"),
    "a Concat before a ConvTranspose's activation": (
        CAT + "t = Relu(c) y = ConvTranspose(t, w2)", "this is a ConvTranspose",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BETWEEN)
def test_what_stands_between_a_concat_and_a_convolution_is_told(name: str, tmp_path: Path) -> None:
    body, words = BETWEEN[name]
    result, patched = run_patch(make(body), tmp_path, verify=False)
    (site,) = result.report["sites"]
    assert patched is None and site["status"] == "refused" and words in site["reason"]


def test_a_site_that_is_fused_without_its_concat_says_so(tmp_path: Path) -> None:
    result, patched = run_patch(make(CAT + f"n = {BN} t = LeakyRelu(n) x = Conv(t, v) y = Relu(x)"), tmp_path)
    assert fused_types(patched) == ["CuteConcatConv1Relu"]
    (note,) = result.report["sites"][0]["notes"]
    assert note.startswith("BatchNormalization and LeakyRelu stand between this Conv and Concat 'Concat_0'; only")


@pytest.mark.parametrize(
    "body",
    [
        CAT + "t = MaxPool<kernel_shape=[2,2]>(c) " + TAIL,
        CAT + "m = MatMul(c, mm) t = Relu(m) " + TAIL,
        "c = Concat<axis=2>(a, a) t = Relu(c) y = Conv(t, e)",
        CAT + "t0 = Relu(c) " + " ".join(f"t{i + 1} = Relu(t{i})" for i in range(9)) + " y = Conv(t9, v)",
        CAT + "f = Neg(c) t = Mul(c, f) " + TAIL,
        "n = Relu(a) y = Conv(n, e)",
    ],
    ids=["pooling", "product", "rows", "too far", "two tensors", "no Concat"],
)
def test_a_concat_that_the_convolution_cannot_read_anyway_is_no_near_miss(body: str, tmp_path: Path) -> None:
    result, patched = run_patch(make(body), tmp_path, verify=False)
    assert patched is None and result.report["sites"] == []


BESIDE = {
    "PRelu of many slopes": ("x = Conv(b, z) y = PRelu(x, slope)", "PRelu 'PRelu_1' stays: only Relu, LeakyRelu"),
    "Softplus": ("x = Conv(b, z) y = Softplus(x)", "Softplus 'Softplus_1' stays"),
    "Mish in steps": (
        "x = Conv(b, z) s = Softplus(x) t = Tanh(s) y = Mul(x, t)",
        "Mish 'Mul_3' stays: only Relu, LeakyRelu",
    ),
    "GELU in steps of another root": (
        "x = Conv(b, z) d = Div(x, three) r = Erf(d) p = Add(r, unit) h = Mul(x, half) y = Mul(h, p)",
        "GELU 'Mul_5' stays: it is not x * (1 + erf(x / sqrt(2))) / 2; only Relu, LeakyRelu",
    ),
    "GELU with tanh": (
        "x = Conv(b, z) q = Pow(x, three) c = Mul(q, half) s = Add(x, c) m = Mul(s, root) t = Tanh(m) p = Add(t, unit) "
        "h = Mul(x, p) y = Mul(h, half)",
        "GELU 'Mul_7' stays: only Relu, LeakyRelu",
    ),
    "a sum over images": (
        "x = Conv(b, z) m = GlobalAveragePool(x) n = Conv(b, z) y = Add(n, m)", "is nx12x1x1, the Conv's output nx12x7",
    ),
    "a batch with another name": ("n = Conv(b, z) y = Add(n, d)", "is mx12x7x5, the Conv's output nx12x7x5; only"),
    "a sum of three": ("x = Conv(b, z) n = Neg(x) p = Conv(b, z) y = Sum(p, n, x)", "it adds 3 tensors"),
}  # fmt: skip


@pytest.mark.parametrize("name", BESIDE)
def test_what_follows_and_stays_is_told(name: str, tmp_path: Path) -> None:
    body, words = BESIDE[name]
    inputs = {"b": "n,16,9,7"} | ({"d": "m,12,7,5"} if "batch" in name else {})
    result, patched = run_patch(make(body, inputs=inputs), tmp_path, verify=False)
    reasons = [s["reason"] for s in result.report["sites"]]
    assert patched is None and len(reasons) == 1 and words in reasons[0], reasons


def test_a_norm_over_pixels_is_told_behind_a_convolution_and_alone(tmp_path: Path) -> None:
    body = "x = Conv(b, z) n = InstanceNormalization(x, one, zero) y = PRelu(n, slope)"
    result, _ = run_patch(make(body, inputs={"b": "n,16,9,7"}), tmp_path, verify=False)
    conv, norm = (s["reason"] for s in result.report["sites"])
    assert "only a BatchNormalization can be fused" in conv
    assert norm == "InstanceNormalization goes over the pixels of each channel; only the last axis is normalised over"


def test_a_sum_of_two_is_a_residual(tmp_path: Path) -> None:
    body = "x = Conv(b, z) r = Abs(x) n = Conv(b, z) s = Sum(r, n) y = Relu(s)"
    result, patched = run_patch(make(body, inputs={"b": "n,16,9,7"}), tmp_path)
    assert fused_types(patched) == ["CuteConcatConv1AddRelu"] and result.report["verify"]["passed"]
    assert "Sum" not in {n.op_type for n in patched.graph.node if not n.domain}


BOTTLENECK = (
    "t = Conv<pads=[1,1,1,1], strides=[2,2]>(a, w) u = Relu(t) d = Conv<pads=[1,1,1,1]>(u, z) g = Sigmoid(d) "
    "e = Mul(d, g) f = Conv<{}>(e, z) r = Relu(f) y = Add(u, r)"
)


@pytest.mark.parametrize(
    ("second", "op_type"),
    [
        ("pads=[1,1,1,1]", "CuteConcatConv1ReluAdd"),
        ('auto_pad="SAME_UPPER"', "CuteConcatConv1ReluAdd"),
        ("pads=[2,2,2,2], dilations=[2,2]", "CuteConcatConv1ReluAdd"),
        ("pads=[1,1,1,1], dilations=[2,2]", "CuteConcatConv1Relu"),  # one row less, to which a single one could fit
        ("pads=[1,1,1,1], strides=[2,2]", "CuteConcatConv1Relu"),
    ],
)
def test_a_residual_of_unknown_rows_is_fused_where_convolutions_keep_them(
    second: str, op_type: str, tmp_path: Path
) -> None:
    values = weights(w=(16, 8, 3, 3), z=(16, 16, 3, 3))
    model = graph(BOTTLENECK.format(second), values, inputs={"a": "n,8,rows,columns"})
    same = op_type.endswith("Add")
    result, patched = run_patch(model, tmp_path, verify=same)
    assert fused_types(patched)[-1] == op_type and (not same or result.report["verify"]["passed"])


@pytest.mark.parametrize(
    "body", ["y = Sum(n, n)", "y = Sum(n)", "q = Sum(n, k3) y = Exp(q)", "m = Exp(n) y = Sum(n, m)"]
)
def test_another_sum_is_none(body: str, tmp_path: Path) -> None:
    _, patched = run_patch(make("n = Conv(b, z) " + body, inputs={"b": "n,16,9,7"}), tmp_path, verify=False)
    assert patched is None


def test_the_summary_counts_refusals_by_cause(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    body = (
        CAT
        + "t = Relu(c) x = Conv(t, v) z1 = Conv(a, e) z2 = PRelu(z1, slope) p = Conv(t, v) q = Add(x, z2) y = Add(q, p)"
    )
    onnx.save(make(body), str(tmp_path / "m.onnx"))
    assert main([str(tmp_path / "m.onnx"), "--dry-run", "--all", "--without", "residual"]) == 3
    out = capsys.readouterr().out
    assert "1 refused, activation of another kind" in out
    assert main([str(tmp_path / "m.onnx"), "--dry-run", "--json"]) in (0, 3)
    assert json.loads(capsys.readouterr().out)["summary"]["refused_by"] == {"activation of another kind": 1}


def test_without_a_refusal_there_is_no_such_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx.save(make("x = Conv(b, z) y = Relu(x)", inputs={"b": "n,16,9,7"}), str(tmp_path / "m.onnx"))
    main([str(tmp_path / "m.onnx"), "--dry-run", "--all"])
    assert "refused:" not in capsys.readouterr().out


def test_causes_are_counted_and_ordered() -> None:
    reasons = ["nobody knows", "the Conv has 4 groups; only group=1 and one", "this is a ConvTranspose, and"]
    causes = by_cause([*reasons, reasons[1]])
    assert causes == {"groups": 2, "ConvTranspose": 1, OTHER: 1}
    assert sentence(causes) == "4 refused: 2 groups, 1 ConvTranspose, 1 other reasons" and sentence({}) == ""


def test_no_row_of_the_table_is_hidden_by_an_earlier_one() -> None:
    rows = [w for words in CAUSES.values() for w in words]
    for i, words in enumerate(rows):
        assert not [w for w in rows[:i] if w in words], words


@pytest.mark.parametrize(
    ("reason", "cause"),
    [
        ("concat_conv: source 0 of a pre-activation has 10 channels; float32 takes multiples of 4; leave the ...",
         "channels in no whole vectors"),
        ("quant_concat_conv: nobody knows", "beyond the kernels"),
        ("row_norm: nobody knows", "beyond the kernels"),
    ],
)  # fmt: skip
def test_what_the_library_says_has_a_cause(reason: str, cause: str) -> None:
    assert cause_of(reason) == cause


@pytest.mark.parametrize("reason", ["", "why not", "fused"])
def test_an_unknown_reason_is_another_one(reason: str) -> None:
    assert cause_of(reason) == OTHER


def test_a_neighbour_that_no_body_can_hold_is_told(tmp_path: Path) -> None:
    body = (
        'u = Resize<mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode="floor">(a, r, s) '
        "c = Concat<axis=1>(u, b) d = Conv(c, w, k) y = Relu(d)"
    )
    values = weights(w=(12, 24, 3, 3), k=(12,)) | {"r": np.float32([]), "s": np.float32([1, 1, 2, 2])}
    result, _ = run_patch(graph(body, values, opset=11, inputs={"a": "1,8,9,7", "b": "1,16,18,14"}), tmp_path)
    site = result.sites[0].as_json()
    assert site["op_type"] == "CuteConcatConv2Relu"
    assert site["notes"] == ["upsample left outside: opset 11 is older than 12; convert the model, or use "
                             "--no-functions"]  # fmt: skip


def test_a_sum_that_another_convolution_takes_is_told(tmp_path: Path) -> None:
    body = "c = Concat<axis=1>(a, b) d = Conv(c, w, k) e = Conv<strides=[1,1]>(c, w) f = Add(d, e) y = Relu(f)"
    result, _ = run_patch(graph(body), tmp_path, without=["branches"])
    assert [s.as_json()["notes"] for s in result.sites] == [
        [],
        ["residual left outside: Add 'Add_3' is fused into the site 'Conv_1'"],
    ]
