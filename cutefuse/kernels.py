"""ctypes binding of the flat C interface (cutlass_kernels/c_api.h): one binding serves every operator.

Nothing here imports CUDA: pointers are plain integers, so torch, cuda-python, PyCUDA and the plugin host can share it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from cutefuse import load_library, plugin_path
from cutefuse.errors import CutefuseError

MAX_RANK = 8
TYPES = {"float32": 0, "float16": 1, "bfloat16": 2, "int8": 3, "int32": 4, "float8_e4m3fn": 5}
LINEAR, CHANNELS_LAST, BLOCKS32 = 0, 1, 2
_MEMORY = 1 << 14  # answers that are kept of one question
_T = TypeVar("_T")


class KernelError(CutefuseError):
    """An operator refused a call or could not be launched; the text is the operator's own sentence."""


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("dims", ctypes.c_int64 * MAX_RANK),
        ("ld", ctypes.c_int64),
        ("type", ctypes.c_int32),
        ("layout", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    ]


class _AttrValue(ctypes.Structure):
    _fields_ = [
        ("ints", ctypes.POINTER(ctypes.c_int64)),
        ("floats", ctypes.POINTER(ctypes.c_float)),
        ("count", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    ]


class _Call(ctypes.Structure):
    _fields_ = [
        ("inputs", ctypes.POINTER(_Tensor)),
        ("outputs", ctypes.POINTER(_Tensor)),
        ("attrs", ctypes.POINTER(_AttrValue)),
        ("workspace_promise", ctypes.c_int64),
        *[(n, ctypes.c_int32) for n in ("variant", "num_inputs", "num_outputs", "num_attrs")],
        *[(n, ctypes.c_int32) for n in ("config", "sm", "sm_count", "reserved")],
    ]


class _Operands(ctypes.Structure):
    _fields_ = [
        ("inputs", ctypes.POINTER(ctypes.c_void_p)),
        ("outputs", ctypes.POINTER(ctypes.c_void_p)),
        ("workspace", ctypes.c_void_p),
        ("workspace_bytes", ctypes.c_int64),
        ("stream", ctypes.c_void_p),
    ]


class _PlanHead(ctypes.Structure):
    """What a plan says of itself; the operator's own state follows."""

    _fields_ = [
        ("workspace_bytes", ctypes.c_int64),
        *[(n, ctypes.c_int32) for n in ("op", "variant", "config", "splits", "device", "sm", "sm_count")],
        *[(n, ctypes.c_int32) for n in ("num_inputs", "num_outputs", "launches")],
        ("operands", ctypes.c_uint32),
    ]


@dataclass(frozen=True)
class Tensor:
    """Logical shape, element type and memory layout of one operand; `data` is a device address or 0."""

    dims: tuple[int, ...]
    dtype: str
    layout: int = LINEAR
    data: int = 0
    ld: int = 0


@dataclass(frozen=True)
class Call:
    """One call of an operator. `config` 0 takes the best guess; `sm` is compute capability * 10, 0 for any device.

    workspace, workspace_bytes: address and size of device memory that a run may use; -1 bytes: not known yet, so that
    `plan` takes as many as it likes, and a run without an address none.
    """

    op_type: str
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    attrs: Mapping[str, int | float | Sequence[int] | Sequence[float]]
    workspace: int = 0
    workspace_bytes: int = -1
    stream: int = 0
    config: int = 0
    sm: int = 0
    sm_count: int = 0
    _keep: list[Any] = field(default_factory=list, repr=False, compare=False)

    @property
    def dtype(self) -> str:
        """The type of its activations: that of its first input, or of the filter of an image."""
        return self.inputs[1 if self.op_type in _of_images() else 0].dtype

    @functools.cached_property
    def key(self) -> Hashable:
        """Equal for calls that ask the library for the same, whatever memory they are given."""
        tensors = tuple([(tuple(t.dims), t.dtype, t.layout, t.ld) for t in (*self.inputs, *self.outputs)])
        # Nearly all are lists; to ask an abstract class takes longer than all else here.
        attrs = tuple(
            [(n, tuple(v) if type(v) is list or isinstance(v, Sequence) else v) for n, v in self.attrs.items()]
        )
        sizes = (len(self.inputs), self.workspace_bytes, self.config, self.sm, self.sm_count)
        return (self.op_type, tensors, attrs, sizes)


@functools.cache
def library() -> ctypes.CDLL:
    """The loaded libcutefuse.so. Raises CutefuseError when it was not built or does not load."""
    lib = load_library(plugin_path())
    call = ctypes.POINTER(_Call)
    lib.cutefuse_describe.restype = ctypes.c_char_p
    lib.cutefuse_find.argtypes = [ctypes.c_char_p, ctypes.POINTER(ctypes.c_int32)]
    lib.cutefuse_reject.argtypes = lib.cutefuse_workspace_bytes.argtypes = [ctypes.c_int32, call]
    lib.cutefuse_reject_device.argtypes = lib.cutefuse_side_by_side.argtypes = [ctypes.c_int32]
    lib.cutefuse_plan.argtypes = [ctypes.c_int32, call, ctypes.c_void_p]
    lib.cutefuse_run.argtypes = [ctypes.c_void_p, ctypes.POINTER(_Operands)]
    lib.cutefuse_predicted_us.argtypes = [ctypes.c_int32, call]
    lib.cutefuse_predicted_us.restype = ctypes.c_double
    lib.cutefuse_configs.argtypes = [ctypes.c_int32, call, ctypes.POINTER(ctypes.c_int32), ctypes.c_int32]
    for function in (lib.cutefuse_reject, lib.cutefuse_reject_device, lib.cutefuse_plan, lib.cutefuse_run):
        function.restype = ctypes.c_char_p
    lib.cutefuse_workspace_bytes.restype = lib.cutefuse_plan_bytes.restype = ctypes.c_int64
    return lib


@functools.cache
def describe() -> dict[str, Any]:
    """What the library holds: operators with attributes, variants (op_types) and configs (tiles); architectures."""
    description: dict[str, Any] = json.loads(library().cutefuse_describe().decode())
    return description


@functools.cache
def operator_of(op_type: str) -> dict[str, Any]:
    """The description of the operator that an op_type belongs to. Raises KernelError for an unknown one."""
    for op in describe()["ops"]:
        if any(v["op_type"] == op_type for v in op["variants"]):
            return dict(op)
    names = ", ".join(op["name"] for op in describe()["ops"])
    raise KernelError(f"op_type {op_type} is not in the library; its operators are {names}; build the matching version")


@functools.cache
def facts(op_type: str) -> dict[str, Any]:
    """What an op_type is, according to the library; nobody parses names.

    inputs, outputs (counts), kind ("convolution", "norm", "norm_backward",
    "window"), sources, activation ("" for none; the
    others are `describe()["activations"]`), residual (None, "before" or "after" the activation), view, quantised,
    layer, pre_activated, image, depthwise, spread, types, output_types. Raises KernelError for an unknown op_type.
    """
    return dict(next(v for v in operator_of(op_type)["variants"] if v["op_type"] == op_type))


@functools.cache
def _of_images() -> frozenset[str]:
    return frozenset(v["op_type"] for op in describe()["ops"] for v in op["variants"] if v["image"])


def facts_in(text: str) -> dict[str, Any] | None:
    """The facts of the op_type that a text of an engine names; None where it names none, or without the library."""
    try:
        known = [v["op_type"] for op in describe()["ops"] for v in op["variants"]]
    except CutefuseError:
        return None
    found = max((op_type for op_type in known if op_type in text), key=len, default=None)
    return facts(found) if found else None


def _values(op: str, spec: Mapping[str, Any], given: Any) -> list[Any]:
    if given is None:
        if spec["default_count"] == 0:
            raise KernelError(f"{op}: attribute '{spec['name']}' is required; write it on the node")
        return [spec["default_value"]] * spec["default_count"]
    return list(given) if isinstance(given, Sequence) else [given]


def _lower(call: Call) -> tuple[int, _Call]:
    variant = ctypes.c_int32()
    op_id = library().cutefuse_find(call.op_type.encode(), ctypes.byref(variant))
    op = operator_of(call.op_type)
    known = [spec["name"] for spec in op["attributes"]]
    if unknown := sorted(set(call.attrs) - set(known)):
        raise KernelError(f"{op['name']}: attribute '{unknown[0]}' does not exist; it has {', '.join(known)}")

    def tensors(items: Sequence[Tensor]) -> Any:
        array = (_Tensor * len(items))()
        for slot, t in zip(array, items, strict=True):
            slot.ld, slot.layout, slot.rank = t.ld, t.layout, len(t.dims)
            slot.type = TYPES.get(t.dtype, -1)
            if slot.type < 0 or len(t.dims) > MAX_RANK:
                allowed = f"{', '.join(TYPES)} and rank <= {MAX_RANK}"
                raise KernelError(f"tensor {t.dtype}{list(t.dims)} cannot be passed; use {allowed}")
            for i, d in enumerate(t.dims):
                slot.dims[i] = d
        return array

    values = (_AttrValue * len(known))()
    keep: list[Any] = [tensors(call.inputs), tensors(call.outputs), values]
    for slot, spec in zip(values, op["attributes"], strict=True):
        items = _values(op["name"], spec, call.attrs.get(spec["name"]))
        slot.count = len(items)
        if spec["kind"] == "ints":
            slot.ints = ints = (ctypes.c_int64 * max(1, len(items)))(*map(int, items))
            keep.append(ints)
        else:
            slot.floats = floats = (ctypes.c_float * max(1, len(items)))(*map(float, items))
            keep.append(floats)
    raw = _Call(keep[0], keep[1], values, call.workspace_bytes)
    raw.variant, raw.num_attrs = variant.value, len(known)
    raw.num_inputs, raw.num_outputs = len(call.inputs), len(call.outputs)
    raw.config, raw.sm, raw.sm_count = call.config, call.sm, call.sm_count
    call._keep[:] = keep
    return op_id, raw


def _asked_once(ask: Callable[[Call], _T]) -> Callable[[Call], _T]:
    """A question about calls that is answered from memory where it was asked of an equal call: a network has many
    layers alike, and writing a call down for the library takes longer than its answer."""
    known: dict[Hashable, _T] = {}

    @functools.wraps(ask)
    def answer(call: Call) -> _T:
        if (key := call.key) not in known:
            if len(known) >= _MEMORY:
                known.clear()
            known[key] = ask(call)
        return known[key]

    return answer


@_asked_once
def reject(call: Call) -> str | None:
    """None when the operator can run the call, else its reason. Needs no GPU; dims of -1 are unknown."""
    op_id, raw = _lower(call)
    reason = library().cutefuse_reject(op_id, ctypes.byref(raw))
    return reason.decode() if reason else None


def workspace_bytes(call: Call) -> int:
    """Bytes of device workspace with which every tile does its best, for this call and every larger image; for a call
    of known sizes without a device (`sm` 0), those of the tile that is ranked first, for this image.

    -1 when the call is rejected.
    """
    op_id, raw = _lower(call)
    return int(library().cutefuse_workspace_bytes(op_id, ctypes.byref(raw)))


def configs(call: Call) -> list[int]:
    """Ids of the legal tiles, best guess first; empty when the call is rejected."""
    return list(_configs(call))


@_asked_once
def _configs(call: Call) -> list[int]:
    op_id, raw = _lower(call)
    ids = (ctypes.c_int32 * 256)()
    count = library().cutefuse_configs(op_id, ctypes.byref(raw), ids, len(ids))
    return list(ids[:count])


@_asked_once
def predicted_us(call: Call) -> float | None:
    """Microseconds that the call should take inside a network with its tile, or the best guess; needs no GPU.

    None where a size is not known, the operator has no model, or the call is rejected. The constants of the models are
    an H200's, whatever `sm` says; `sm` and `sm_count` decide which tiles can run and in how many rounds.
    """
    op_id, raw = _lower(call)
    found = float(library().cutefuse_predicted_us(op_id, ctypes.byref(raw)))
    return found if found >= 0 else None


def features(sm: int) -> frozenset[str]:
    """What kernels may use on a compute capability (times 10) and not on every one: clusters, wgmma, float8.

    Empty for one that the library does not know.
    """
    return frozenset(next((a["features"] for a in describe()["architectures"] if a["sm"] == sm), ()))


def made_for(call: Call, sm: int) -> bool:
    """Whether a tile that uses what this compute capability has, and not every one, can run the call, built or not."""
    tiles = _own_tiles(call.op_type, sm)
    return bool(tiles) and not tiles.isdisjoint(_configs(replace(call, sm=0, _keep=[]) if call.sm else call))


@functools.cache
def _own_tiles(op_type: str, sm: int) -> frozenset[int]:
    own = features(sm)
    return frozenset(c["id"] for c in operator_of(op_type)["configs"] if c["needs"] and own.issuperset(c["needs"]))


def gpus_of(tile: Mapping[str, Any]) -> str:
    """The GPUs that a tile of `describe()` is written for, in words."""
    needs = set(tile["needs"])
    able = [a["sm"] for a in describe()["architectures"] if needs <= set(a["features"]) and a["sm"] >= tile["min_sm"]]
    return f"sm_{able[0]} alone" if len(able) == 1 else f"sm_{min(able)} and newer"


def code_inside() -> str:
    """What the library holds code for, in words: machine code by compute capability, and PTX; "" without kernels."""
    names = str(describe()["archs"]).split() if describe()["cuda"] else []
    ptx = [_dotted(name) for name in names if name.endswith("-virtual")]
    own = [_dotted(name) for name in names if not name.endswith("-virtual")]
    parts = [f"machine code for compute capability {', '.join(own)}"] if own else []
    return "; ".join(parts + ([f"PTX of {', '.join(ptx)} for newer GPUs"] if ptx else []))


def _dotted(arch: str) -> str:
    number = int(arch.removesuffix("-virtual").rstrip("a"))
    return f"{number // 10}.{number % 10}"


def reject_device(sm: int) -> str | None:
    """None when the library holds code for a compute capability (times 10), else the reason."""
    reason = library().cutefuse_reject_device(sm)
    return reason.decode() if reason else None


class Plan:
    """A call worked out once for the device that is current: its tile, its launches and the workspace they need.

    It needs at most `call.workspace_bytes` bytes, or as many as it likes where those are -1. Any number of threads may
    run one plan, each by a `Bound` of its own. Raises KernelError when the call is refused.
    """

    def __init__(self, call: Call) -> None:
        op_id, raw = _lower(call)
        self._state = ctypes.create_string_buffer(library().cutefuse_plan_bytes())
        reason = library().cutefuse_plan(op_id, ctypes.byref(raw), self._state)
        if reason:
            raise KernelError(reason.decode())
        head = _PlanHead.from_buffer(self._state)
        self.config, self.splits, self.workspace_bytes = head.config, head.splits, head.workspace_bytes
        self.num_inputs, self.num_outputs = head.num_inputs, head.num_outputs

    @property
    def data(self) -> bytes:
        """The plan as plain data, for callers of cutefuse_run that keep it themselves."""
        return self._state.raw


def run(call: Call) -> None:
    """Plan the call and enqueue it on its stream. Raises KernelError with the operator's reason."""
    Launcher(call)()


@contextlib.contextmanager
def side_by_side(allowed: bool = True) -> Iterator[None]:
    """Inside, a kernel that this thread captures into a CUDA graph waits only for those of ours before it whose memory
    it touches, and may run at the same time as the others. It waits for all before it that is not ours, and what is not
    ours waits for all of ours before it. Not `allowed`: each waits for the one before."""
    before = library().cutefuse_side_by_side(allowed)
    try:
        yield
    finally:
        library().cutefuse_side_by_side(before)


@functools.cache
def _run_at() -> Any:
    """cutefuse_run over the addresses of a plan and its operands as integers, of which ctypes converts nothing."""
    return ctypes.CFUNCTYPE(ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p)(("cutefuse_run", library()))


class Bound:
    """A plan beside memory for the addresses of one call: a call costs one ctypes call and makes no other object.

    For one thread at a time; any number of them may be bound to one plan.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        count = plan.num_inputs + plan.num_outputs
        self._data = (ctypes.c_void_p * count)()
        at = ctypes.addressof(self._data)
        into = ctypes.POINTER(ctypes.c_void_p)
        self._raw = _Operands(*(ctypes.cast(at + 8 * i, into) for i in (0, plan.num_inputs)))
        self._run, self._at = _run_at(), (ctypes.addressof(plan._state), ctypes.addressof(self._raw))

    def bind(self, data: Sequence[int], workspace: int = 0, workspace_bytes: int | None = None) -> Bound:
        """Replace the device addresses of all inputs and outputs, in this order (0: no elements), and of the workspace,
        whose size stays where None is given. Raises ValueError for another number of addresses."""
        self._data[:] = data
        self._raw.workspace = workspace
        if workspace_bytes is not None:
            self._raw.workspace_bytes = workspace_bytes
        return self

    def __call__(self, stream: int | None = None) -> None:
        """Enqueue on a stream; None: the one before. Raises KernelError with the operator's reason."""
        if stream is not None:
            self._raw.stream = stream
        reason = self._run(*self._at)
        if reason:
            raise KernelError(reason.decode())


class Launcher(Bound):
    """A call planned once and bound to its own addresses, for timing and for hot loops.

    Raises KernelError when the call is refused, or gives a workspace without saying how many bytes it has.
    """

    def __init__(self, call: Call) -> None:
        if call.workspace and call.workspace_bytes < 0:
            raise KernelError("a workspace was given without its size; set workspace_bytes")
        given = max(call.workspace_bytes, 0)
        super().__init__(Plan(replace(call, workspace_bytes=given, _keep=[])))
        self.bind([t.data for t in (*call.inputs, *call.outputs)], call.workspace, given)
        self._raw.stream = call.stream
