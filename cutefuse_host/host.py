"""The plugin host from Python: any TensorRT V3 plugin library, driven as TensorRT's builder and runtime drive it.

    host = Host()                                   # our library; Host("other.so") for any other
    plugin = host.build(node, [Input((1, 64, 40, 40), "float16"), ...])
    plugin.check()                                  # raises HostError with every violation in words
    outputs = plugin.run([x0, x1, w, b])            # through the real plugin, on the GPU

Everything but `run`, `time` and `enqueue` works without a GPU. TensorRT itself is never involved.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cutefuse import plugin_path
from cutefuse_host import memory
from cutefuse_host.abi import (
    CDesc,
    CDims,
    CDynamicDesc,
    Field,
    HostError,
    Input,
    c_fields,
    call,
    dynamic_desc,
    field_of,
    library,
)

__all__ = ["Context", "Field", "Finding", "Host", "HostError", "Input", "Plugin", "Raw", "field_of", "reference_ops"]

BUILD, RUNTIME = 0, 1


@dataclass(frozen=True)
class Finding:
    """`violation`: the contract is broken; `failure`: the plugin said no, TensorRT would stop; `warning`: legal."""

    kind: str
    step: str
    text: str


def _json(text: bytes) -> dict[str, Any]:
    # A broken plugin's strings may be anything.
    return dict(json.loads(text.decode(errors="replace")))


def _findings(items: Iterable[Mapping[str, str]]) -> list[Finding]:
    return [Finding(**item) for item in items]


class Host:
    """A plugin library, loaded through getCreators as TensorRT's loadLibrary does."""

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = Path(path) if path else plugin_path()
        self._handle = call("open", str(self.path).encode())
        self._description = _json(call("library", self._handle))

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            library().cutefuse_host_close(self._handle)
            self._handle = None

    def creators(self) -> list[dict[str, Any]]:
        """Name, version, namespace and fields of every plugin in the library."""
        return list(self._description["creators"])

    @property
    def findings(self) -> list[Finding]:
        """What is wrong with the library itself; read again after the plugins were used."""
        return _findings(_json(call("library", self._handle))["findings"])

    def find(self, name: str, version: str = "1", namespace: str | None = None) -> int:
        """Index of a creator, matched as TensorRT's parser does. Raises HostError when there is none."""
        for i, c in enumerate(self.creators()):
            if c["name"] == name and c["version"] == version and namespace in (None, c["namespace"]):
                return i
        where = "any namespace" if namespace is None else f"namespace '{namespace}'"
        raise HostError(f"{self.path.name} has no plugin {name} version {version} in {where}; it has "
                        f"{len(self.creators())} plugins, see Host.creators()")  # fmt: skip

    def fields(self, creator: int, attrs: Mapping[str, Any]) -> list[Field]:
        """The fields that TensorRT's parser passes: only those that the creator lists, in the creator's order."""
        listed = [f["name"] for f in self.creators()[creator]["fields"]]
        return [field_of(name, attrs[name]) for name in listed if name in attrs]

    def build(
        self,
        node: Any,
        inputs: Sequence[Input],
        outputs: int | None = None,
        strongly_typed: bool = True,
    ) -> Plugin:
        """Take a node through the builder. `node` is an onnx.NodeProto or (op_type, attributes).

        The result holds what was found; nothing is raised for a plugin that refuses or misbehaves (see Plugin.check).
        """
        if isinstance(node, tuple):
            name, attrs, count = node[0], dict(node[1]), 1 if outputs is None else outputs
            creator = self.find(name, str(attrs.get("plugin_version", "1")), attrs.get("plugin_namespace"))
        else:
            import onnx

            name, count = node.op_type, sum(1 for o in node.output if o) if outputs is None else outputs
            attrs = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
            version, space = (attrs.get(k, d) for k, d in (("plugin_version", b"1"), ("plugin_namespace", b"")))
            creator = self.find(name, version.decode(), space.decode() or node.domain)
        return Plugin(self, creator, self.fields(creator, attrs), inputs, count, strongly_typed)

    def create(self, name: str, fields: Sequence[Field] | None, phase: int = BUILD) -> Raw | None:
        """createPlugin with exactly these fields (None: no collection); None when the plugin is refused."""
        array = c_fields(fields or [])
        count = -1 if fields is None else len(fields)
        handle = library().cutefuse_host_raw_create(self._handle, self.find(name), array, count, phase)
        return Raw(handle) if handle else None

    def soak(self, node: tuple[str, Mapping[str, Any]], cycles: int) -> int:
        """Create, clone, serialise, deserialise, attach and destroy `cycles` times; how many went well."""
        creator = self.find(node[0])
        fields = self.fields(creator, node[1])
        return int(library().cutefuse_host_soak(self._handle, creator, c_fields(fields), len(fields), cycles))


class Plugin:
    """A node after the builder: shapes, combinations, tactics, serialised fields and findings in `report`."""

    def __init__(
        self,
        host: Host,
        creator: int,
        fields: Sequence[Field],
        inputs: Sequence[Input],
        outputs: int,
        strongly_typed: bool,
    ) -> None:
        self.host, self.inputs, self.outputs = host, list(inputs), outputs
        descs = (CDynamicDesc * max(1, len(inputs)))(*map(dynamic_desc, inputs))
        self._handle = call("build", host._handle, creator, c_fields(fields), len(fields), descs, len(inputs),
                            outputs, int(strongly_typed))  # fmt: skip
        self.report: dict[str, Any] = _json(call("report", self._handle))
        self.findings = _findings(self.report["findings"])
        self._contexts: dict[tuple[int, int], Context] = {}

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            library().cutefuse_host_free_build(self._handle)
            self._handle = None

    def check(self) -> Plugin:
        """Itself when nothing but warnings was found. Raises HostError with every violation and failure."""
        bad = [f for f in self.findings if f.kind != "warning"]
        if bad:
            raise HostError(f"{self.report['name']}: " + "; ".join(f"{f.kind} in {f.step}: {f.text}" for f in bad))
        return self

    def combination(self) -> int:
        """Index of the first combination of formats that could be configured. Raises HostError when there is none."""
        for i, c in enumerate(self.report["combinations"]):
            if c["usable"]:
                return i
        self.check()
        raise HostError(f"{self.report['name']}: no combination of types and formats is usable")

    def context(self, tactic: int = 0, combination: int | None = None) -> Context:
        """A new execution context: the serialised fields brought to life in the runtime phase and attached."""
        return Context(self, self.combination() if combination is None else combination, tactic)

    def enqueue(
        self,
        shapes: Sequence[Sequence[int]],
        inputs: Sequence[int],
        outputs: Sequence[int],
        tactic: int = 0,
        workspace: int = 0,
        stream: int = 0,
    ) -> None:
        """Enqueue on device pointers that are already in the combination's formats. Raises HostError on refusal."""
        key = (self.combination(), tactic)
        if key not in self._contexts:
            self._contexts[key] = self.context(tactic)
        self._contexts[key].set_shapes(shapes)
        self._contexts[key].enqueue(inputs, outputs, workspace, stream)

    def run(self, arrays: Sequence[np.ndarray], tactic: int = 0) -> list[np.ndarray]:
        """Outputs for linear host arrays, computed by the plugin on the GPU.

        Formats are converted here; pad lanes of inputs hold NaN, outputs start as NaN, and the bytes around them are
        checked. Raises HostError when the plugin refuses or writes out of bounds, CutefuseError without a GPU.
        """
        with memory.Session() as session:
            return self._bind(session, self.context(tactic), arrays).results()

    def time(self, arrays: Sequence[np.ndarray], repeats: int = 20) -> dict[int, float]:
        """Median time_us of every tactic, 0 being the default; replayed from a CUDA graph, caches warm."""
        times: dict[int, float] = {}
        for tactic in [0, *self.report["combinations"][self.combination()]["tactics"]]:
            with memory.Session() as session:
                context = self.context(tactic)
                bound = self._bind(session, context, arrays)
                median = ctypes.c_float()
                code = library().cutefuse_host_time(context._handle, *bound.pointers, repeats, ctypes.byref(median))
                memory.check(code)
                times[tactic] = median.value
        return times

    def _bind(self, session: memory.Session, context: Context, arrays: Sequence[np.ndarray]) -> memory.Bound:
        combination = self.report["combinations"][context.combination]
        context.set_shapes([a.shape for a in arrays])
        shapes = [context.output_size(i) for i in range(self.outputs)]
        layouts = list(zip(combination["formats"], combination["types"], strict=True))
        bound = session.bind(arrays, shapes, layouts, combination["workspace_bytes"])
        bound.run = lambda: context.enqueue(bound.inputs, bound.outputs, bound.workspace, session.stream)
        return bound


class Context:
    """One execution context with its own plugin object, shapes and tactic."""

    def __init__(self, plugin: Plugin, combination: int, tactic: int) -> None:
        self.name, self.combination, self.tactic = plugin.report["name"], combination, tactic
        self._handle = call("context", plugin._handle, combination, tactic)

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            library().cutefuse_host_free_context(self._handle)
            self._handle = None

    def set_shapes(self, shapes: Sequence[Sequence[int]]) -> None:
        """setTactic and onShapeChange. Raises HostError with the plugin's code."""
        dims = (CDims * max(1, len(shapes)))(*map(CDims.of, shapes))
        self._done(library().cutefuse_host_set_shapes(self._handle, dims, len(shapes)), "onShapeChange")

    def output_size(self, output: int) -> tuple[int, ...]:
        """Shape of an output for the shapes that were set."""
        dims = CDims()
        self._done(library().cutefuse_host_output_size(self._handle, output, ctypes.byref(dims)), "output_size")
        return tuple(dims.d[: dims.rank])

    def enqueue(self, inputs: Sequence[int], outputs: Sequence[int], workspace: int = 0, stream: int = 0) -> None:
        """Enqueue on device pointers. Raises HostError with the plugin's code."""
        into = [(ctypes.c_void_p * max(1, len(p)))(*p) for p in (inputs, outputs)]
        self._done(library().cutefuse_host_enqueue(self._handle, *into, workspace or None, stream or None), "enqueue")

    def _done(self, code: int, step: str) -> None:
        if code:
            why = library().cutefuse_host_error().decode() if code == -1 else "its reason is on stderr"
            raise HostError(f"{self.name}: {step} returned {code}; {why}")


class Raw:
    """A plugin object outside of any build, for tests that break the rules: every method returns the plugin's code."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            library().cutefuse_host_raw_free(self._handle)
            self._handle = 0

    def clone(self, attach: bool = False) -> Raw:
        """clone(), or attachToContext() on a fresh context."""
        return Raw(call("raw_clone", self._handle, int(attach)))

    def supports(self, pos: int, descs: Sequence[CDynamicDesc], inputs: int, outputs: int) -> bool:
        """supportsFormatCombination."""
        array = (CDynamicDesc * len(descs))(*descs)
        return bool(library().cutefuse_host_raw_supports(self._handle, pos, array, inputs, outputs))

    def configure(self, descs: Sequence[CDynamicDesc], inputs: int, outputs: int) -> int:
        """configurePlugin."""
        array = (CDynamicDesc * len(descs))(*descs)
        return int(library().cutefuse_host_raw_configure(self._handle, array, inputs, outputs))

    def tactics(self) -> list[int]:
        """getNbTactics and getValidTactics."""
        ids = (ctypes.c_int32 * 4096)()
        return list(ids[: library().cutefuse_host_raw_tactics(self._handle, ids, len(ids))])

    def set_tactic(self, tactic: int) -> int:
        """setTactic."""
        return int(library().cutefuse_host_raw_set_tactic(self._handle, tactic))

    def shape_change(self, descs: Sequence[CDesc], inputs: int, outputs: int) -> int:
        """onShapeChange."""
        return int(
            library().cutefuse_host_raw_shape_change(self._handle, (CDesc * len(descs))(*descs), inputs, outputs)
        )

    def enqueue(self, descs: Sequence[CDesc], inputs: Sequence[int], outputs: Sequence[int], workspace: int = 0) -> int:
        """enqueue on the default stream."""
        into = [(ctypes.c_void_p * max(1, len(p)))(*p) for p in (inputs, outputs)]
        array = (CDesc * len(descs))(*descs)
        return int(
            library().cutefuse_host_raw_enqueue(self._handle, array, len(inputs), *into, workspace or None, None)
        )


def reference_ops(host: Host | None = None) -> list[type]:
    """Operator classes for onnx.reference.ReferenceEvaluator(new_ops=...): plugin nodes run through the real plugin.

    Function bodies in the model are ignored. Running a node without a GPU raises CutefuseError.
    """
    from onnx.reference.op_run import OpRun

    loaded = host or Host()

    def run(self: Any, *arrays: np.ndarray, **_: Any) -> tuple[np.ndarray, ...]:
        memory.require_gpu()
        inputs = [Input(a.shape, memory.dtype_name(a)) for a in arrays]
        return tuple(loaded.build(self.onnx_node, inputs).check().run(arrays))

    return [type(c["name"], (OpRun,), {"op_domain": c["namespace"], "_run": run}) for c in loaded.creators()]
