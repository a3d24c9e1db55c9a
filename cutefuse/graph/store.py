"""Loads and saves ONNX files of any size: weights outside the file are streamed, and nothing is left half written."""

from __future__ import annotations

import errno
import hashlib
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np
import onnx
from onnx import ModelProto, TensorProto, helper
from onnx.inliner import inline_selected_functions

from cutefuse.errors import CutefuseError
from cutefuse.graph.read import ELEM_TYPES, external_fields, subgraphs
from cutefuse.graph.staging import hidden, place
from cutefuse.output import as_private, check_replaceable, real

EXTERNAL_LIMIT = 1_800_000_000  # bytes; a protobuf message must stay below 2^31
CONVERTER_LIMIT = EXTERNAL_LIMIT  # of ONNX Runtime's converter of types, which holds a model as one message
INLINE_BYTES = 1024  # smaller tensors stay in the file, so that shape inference sees shape constants
ALIGNMENT = 4096  # of tensors in a data file, so that runtimes can map them
CHUNK = 16 << 20
AXIS_LIMIT = 1 << 31


def load_model(path: Path) -> ModelProto:
    """Read an ONNX file without its external weights. Raises CutefuseError when it is missing or not an ONNX model."""
    if path.is_dir():
        raise CutefuseError(f"{path} is a folder; give an ONNX file")
    try:
        model = onnx.load(str(path), load_external_data=False)
    except FileNotFoundError:
        raise CutefuseError(f"{path} does not exist; give an ONNX file") from None
    except OSError as error:
        raise CutefuseError(f"{path} cannot be read ({error.strerror}); check its permissions and links") from None
    except Exception as error:  # protobuf's and onnx's parse errors share no public base class
        text = " ".join(str(error).split())
        raise CutefuseError(f"{path} is not an ONNX model or is truncated ({text}); export it again") from None
    if not model.graph.node:
        raise CutefuseError(f"{path} holds no ONNX graph with nodes; give an ONNX model")
    if broken := next((t for t in _texts(model.graph) if isinstance(t, bytes)), None):
        raise CutefuseError(f"{path} holds the name {broken!r}, which is no UTF-8 text; the file is damaged")
    _check_sizes(model.graph, path)
    return model


def _check_sizes(graph: onnx.GraphProto, path: Path) -> None:
    """Raise CutefuseError for a size that nothing can hold: shape inference would fill the memory with it."""
    sizes = [(t.name, list(t.dims)) for t in tensors(graph)]
    sizes += [(i.name, [d.dim_value for d in i.type.tensor_type.shape.dim]) for i in graph.input]
    for name, dims in sizes:
        if too_large := next((d for d in dims if d >= AXIS_LIMIT), None):
            raise CutefuseError(
                f"{path} gives '{name}' an axis of {too_large}, and no runtime takes {AXIS_LIMIT} or more; the file is "
                "damaged"
            )


def _texts(graph: onnx.GraphProto) -> Iterator[str | bytes]:
    """Every name that the rewriter may read; protobuf hands out bytes where a text is not valid UTF-8."""
    for node in graph.node:
        yield from (node.name, node.op_type, node.domain, *node.input, *node.output)
        for a in node.attribute:
            yield from (a.name, a.ref_attr_name)
        for body in subgraphs(node):
            yield from _texts(body)
    for info in (*graph.input, *graph.output, *graph.value_info):
        yield info.name
        yield from (d.dim_param for d in info.type.tensor_type.shape.dim)
    for t in graph.initializer:
        yield t.name
        yield from (text for entry in t.external_data for text in (entry.key, entry.value))


def sha256_of(path: Path) -> str:
    """The hash of a file, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def tensors(graph: onnx.GraphProto) -> Iterator[TensorProto]:
    """Every tensor stored in a graph: initializers and node attributes, subgraphs included."""
    yield from graph.initializer
    for node in graph.node:
        for a in node.attribute:
            if a.HasField("t"):
                yield a.t
            yield from a.tensors
        for body in subgraphs(node):
            yield from tensors(body)


def size_of(model: ModelProto) -> int:
    """What a model takes as it is in memory; protobuf itself cannot tell beyond 2 GiB."""
    try:
        return model.ByteSize()
    except Exception:  # protobuf's EncodeError
        return sum(len(t.raw_data) for t in tensors(model.graph))


def check_convertible(model: ModelProto) -> None:
    """Raise CutefuseError for a model that no whole-model conversion can take; reads no weights."""
    whole, types = size_of(model), set(TensorProto.DataType.values()) - {TensorProto.UNDEFINED}
    for t in (t for t in tensors(model.graph) if external_fields(t) and t.data_type in types):
        whole += math.prod(t.dims) * helper.tensor_dtype_to_np_dtype(t.data_type).itemsize
    if whole > CONVERTER_LIMIT:
        raise CutefuseError(
            f"the model holds {whole / 1e9:.1f} GB, and ONNX Runtime's float16 converter takes less than 2; use "
            "--scope sites, which converts what is fused alone"
        )


def check_written(path: Path, source: Path) -> None:
    """Raise CutefuseError for a written model that breaks the standard, where its source does not."""
    if (wrong := _invalid(path)) and not _invalid(source):
        raise CutefuseError(
            f"the model in its new type would be invalid ({wrong}); name nodes with --keep-float32, use --scope sites, "
            "or convert it first"
        )


def _invalid(path: Path) -> str:
    """What onnx's checker says against a file; "" where nothing."""
    try:
        onnx.checker.check_model(str(path), full_check=True)
    except Exception as error:  # its kinds of errors share no public base class
        return " ".join(str(error).split())
    return ""


def inlined(model: ModelProto, functions: Sequence[tuple[str, str]]) -> ModelProto:
    """The model with calls of these local functions (domain, name) replaced by their bodies.

    Raises CutefuseError where they call each other in a circle, or too deep.
    """
    try:
        return inline_selected_functions(model, list(functions), exclude=False)
    except Exception as error:  # onnx's ValidationError
        raise CutefuseError(
            f"the model's local functions cannot be inlined ({' '.join(str(error).split())}); inline them first, or "
            "use --scope sites, which leaves them alone"
        ) from None


def uses_external_data(model: ModelProto) -> bool:
    """Whether weights of the model lie in files beside it."""
    return any(external_fields(t) for t in tensors(model.graph))


def load_weights(model: ModelProto, folder: Path) -> None:
    """Read the weights that lie in files of `folder` into the model. Raises CutefuseError where that is impossible."""
    try:
        onnx.external_data_helper.load_external_data_for_model(model, str(folder))
    except Exception as error:  # onnx's ValidationError, ValueError of an offset, OSError
        text = " ".join(str(error).split())
        raise CutefuseError(f"the weights beside the model cannot be read ({text}); repair the model") from None


def outside(model: ModelProto, folder: Path) -> ModelProto:
    """The model itself, its weights moved into a file in `folder` when protobuf could not hold them."""
    if size_of(model) > EXTERNAL_LIMIT:
        onnx.external_data_helper.convert_model_to_external_data(model, location="weights", size_threshold=INLINE_BYTES)
        onnx.external_data_helper.write_external_data_tensors(model, str(folder))
    return model


def check_apart(model: ModelProto, source: Path, *written: Path) -> None:
    """Raise CutefuseError where a file to be written holds weights of the model in `source`: they would be lost."""
    places = [fields["location"] for t in tensors(model.graph) if (fields := external_fields(t))]
    held = {real(source.parent / place) for place in places}
    for path in written:
        if real(path) in held:
            raise CutefuseError(f"{path} would be written, and it holds weights of {source}; choose another -o")


def data_path(target: Path) -> Path:
    """The file of a model's weights, where they do not lie in the model."""
    return target.with_name(f"{target.name}.data")


class Writer:
    """Collects a model and its weights in a hidden folder beside the target; `commit` moves them into place as one.

    With `external` all weights go into one data file `<name>.data`, else into the protobuf. What is written is as
    private as `source`, and the data file as those that its weights come from.
    """

    def __init__(self, target: Path, external: bool, source: Path, folder: Path) -> None:
        self.target, self.external, self.source, self.folder = target, external, source, folder
        self._data_name = data_path(target).name
        self._data: BinaryIO | None = None
        self._texts: list[str] = []
        self._weights = set[Path]()

    def tensor(self, name: str, value: np.ndarray, dtype: str) -> TensorProto:
        """A new initializer; its bytes are on disk at once when the model keeps its weights outside."""
        raw = np.ascontiguousarray(value, dtype=np.dtype(dtype))
        proto = TensorProto(name=name, data_type=ELEM_TYPES[dtype], dims=value.shape)
        if self.external and raw.nbytes > INLINE_BYTES:
            self._append(proto, [raw.view(np.uint8).data])
        else:
            proto.raw_data = raw.tobytes()
        return proto

    def _append(self, proto: TensorProto, chunks: Iterable[bytes | memoryview]) -> None:
        with _in_words(self.target.with_name(self._data_name)):
            if self._data is None:
                # Unbuffered: bytes that a full disk did not take must not be written once more when the file is closed.
                self._data = (self.folder / self._data_name).open("wb", buffering=0)
            offset = -(-self._data.tell() // ALIGNMENT) * ALIGNMENT
            self._data.seek(offset)
            for chunk in chunks:
                _write_whole(self._data, chunk)
        proto.ClearField("raw_data")
        del proto.external_data[:]
        proto.data_location = TensorProto.EXTERNAL
        length = self._data.tell() - offset
        for key, value in (("location", _NEW), ("offset", str(offset)), ("length", str(length))):
            proto.external_data.add(key=key, value=value)

    def save(self, model: ModelProto) -> Path:
        """Write the model, copying outside weights piece by piece; returns its path in the hidden folder."""
        folder = self.source.parent
        for t in tensors(model.graph) if self.external else ():
            fields = external_fields(t)
            if fields and fields["location"] != _NEW:
                self._append(t, _pieces(t.name, fields, folder))
                self._weights.add(folder / fields["location"])
            elif not fields and len(t.raw_data) > INLINE_BYTES:
                self._append(t, [t.raw_data])
            for entry in t.external_data:
                if entry.key == "location":
                    entry.value = self._data_name
        if self._data is not None:
            self._data.close()
        path = self.folder / self.target.name
        try:
            whole = model.SerializeToString()
        except Exception as error:  # protobuf's EncodeError
            raise CutefuseError(f"{self.target} cannot be written ({error}); free space or save elsewhere") from None
        with _in_words(self.target):
            path.write_bytes(whole)
        return path

    def text(self, path: Path, text: str) -> None:
        """A text file beside the model, which comes into place before it."""
        if os.path.isdir(path):
            raise CutefuseError(f"{path} is a folder, and would be written; choose another output path")
        check_replaceable(path)
        with _in_words(path):
            (self.folder / path.name).write_text(text, encoding="utf-8")
        self._texts.append(path.name)

    def commit(self) -> None:
        """Move everything into place. Whoever finds the model finds its own weights and its own texts."""
        with _in_words(self.target):
            for path in self.folder.iterdir():
                as_private(path, self.source, *(self._weights if path.name == self._data_name else ()))
            place(self.folder, self.target, self._texts, [] if self._data else self._earlier_data())

    def _earlier_data(self) -> list[Path]:
        """The data file of an earlier model under this name, which the new one does not need."""
        path = data_path(self.target)
        if not path.is_file() or not self.target.is_file():
            return []
        try:
            held = tensors(load_model(self.target).graph)
        except CutefuseError:  # nobody knows whose it is
            return []
        return [path] if any(external_fields(t).get("location") == path.name for t in held) else []


@contextmanager
def _in_words(target: Path) -> Iterator[None]:
    """Raises a CutefuseError that names `target` for what the system refuses inside, such as bytes on a full disk."""
    try:
        yield
    except BrokenPipeError:  # who reads our words has left
        raise
    except OSError as error:
        path = error.filename if error.errno == errno.EISDIR else target
        raise CutefuseError(
            f"{path} cannot be written ({error.strerror}); free space or choose another output path"
        ) from None


def _write_whole(file: BinaryIO, chunk: bytes | memoryview) -> None:
    """Write a chunk to an unbuffered file, which may take a part of it at a time."""
    rest = memoryview(chunk).cast("B")
    while rest:
        rest = rest[file.write(rest) :]


_NEW = "\0new"  # location of tensors that this writer has already placed; no file can be named so


def _pieces(name: str, fields: dict[str, str], folder: Path) -> Iterator[bytes]:
    path = real(folder / fields["location"])
    if not path.is_relative_to(real(folder)):
        raise CutefuseError(f"tensor '{name}' lies outside the model's folder ({path}); move it beside the model")
    try:
        with path.open("rb") as file:
            file.seek(int(fields.get("offset", 0)))
            left = int(fields["length"]) if "length" in fields else path.stat().st_size
            while left > 0 and (chunk := file.read(min(left, CHUNK))):
                left -= len(chunk)
                yield chunk
    except (OSError, ValueError) as error:
        raise CutefuseError(f"the data of tensor '{name}' cannot be read ({error}); repair the model") from None
    if left > 0 and "length" in fields:
        raise CutefuseError(f"{path.name} is {left} bytes too short for tensor '{name}'; repair the model")


@contextmanager
def writer(target: Path, external: bool, source: Path) -> Iterator[Writer]:
    """A Writer whose hidden folder disappears in any case; nothing reaches the target without `commit`."""
    if os.path.isdir(target):
        raise CutefuseError(f"{target} is a folder; name the ONNX file to write, as {target / 'model.onnx'}")
    check_replaceable(target)
    with _in_words(target), hidden(target.parent, f".{target.name}.") as folder:
        yield Writer(target, external, source, folder)
