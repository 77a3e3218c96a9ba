"""A model in the safetensors format, out and in: a header of JSON, then bytes. Nothing in it can be run.

    8 bytes   length of the header, little endian
    header    {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}, …, "__metadata__": {…}}
    data      offsets count from here; every byte belongs to one tensor

Written and read without the package of that name. A file from elsewhere is not believed: what its header says is compared
with its size before memory is asked for. Must not know of training runs or folders.
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
from math import prod
from typing import Any

import torch

from ..errors import StateError
from .source import MemorySource, Source
from .storage.disk import open_plain

_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "complex64": "C64",
}
_DTYPES: dict[Any, torch.dtype] = {short: getattr(torch, name) for name, short in _NAMES.items()}
_METADATA = "__metadata__"
_LENGTH_BYTES = 8
# Of the header; the format's own limit.
_LONGEST_BYTES = 100_000_000


# -- out -------------------------------------------------------------------------------------------


def to_safetensors(source: Source, path: str) -> int:
    """The model alone; returns how many tensors. A shared one is written once, by its first name."""
    keys = sorted(key for key in source.infos if key.startswith("model/"))
    header: dict[str, Any] = {_METADATA: {"format": "pt", "step": str(source.about.get("step", 0))}}
    at = 0
    for key in keys:
        info, name = source.infos[key], key.removeprefix("model/")
        if info.dtype not in _NAMES:
            raise StateError(f"safetensors has no {info.dtype}, which '{name}' is.")
        span = [at, at + info.num_bytes]
        header[name] = {"dtype": _NAMES[info.dtype], "shape": list(info.shape), "data_offsets": span}
        at = span[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    # The format wants the data to begin at a multiple of eight.
    text += b" " * (-len(text) % 8)
    # A device or a pipe is where it is wanted; root who puts a file in the place of /dev/null takes it from everybody.
    is_file = os.path.isfile(path) or not os.path.exists(path)
    draft = f"{path}.{secrets.token_hex(4)}" if is_file else path
    with open(draft, "wb") as file:
        file.write(len(text).to_bytes(_LENGTH_BYTES, "little") + text)
        for key in keys:
            values = source.whole(key).contiguous()
            if values.numel():
                file.write(memoryview(values.reshape(-1).view(torch.uint8).numpy()))  # type: ignore[arg-type]
        file.flush()
        if is_file:
            os.fsync(file.fileno())
    if is_file:
        os.replace(draft, path)
    return len(keys)


# -- in --------------------------------------------------------------------------------------------


def read_safetensors(path: str) -> MemorySource:
    """A model's tensors by name. Raises StateError for what is not such a file, or not all of one."""
    try:
        with open_plain(path) as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if size < _LENGTH_BYTES or length > min(_LONGEST_BYTES, size - _LENGTH_BYTES):
                raise StateError(f"{path} is truncated, or no safetensors file: its header would have {length} bytes.")
            header = _header(file.read(length), path)
            begin = _LENGTH_BYTES + length
            # A private copy, as torch wants memory that it might write to; it never does.
            pages = memoryview(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY))[begin:]
    except OSError as error:
        raise StateError(f"{path} cannot be read: {error}") from error
    metadata = header.pop(_METADATA, None) or {}
    if (used := sum(_length(entry) for entry in header.values())) > len(pages):
        # Each tensor is copied: entries of the same bytes would make a small file fill any memory.
        raise StateError(
            f"{path} has entries for {used} bytes, which does not fit {len(pages)} of data: truncated, or some overlap."
        )
    model = {name: _tensor(entry, pages, f"{path}: '{name}'") for name, entry in header.items()}
    step = str(metadata.get("step", "")) if isinstance(metadata, dict) else ""
    return MemorySource(path, model, {}, int(step) if step.isdecimal() and len(step) < 19 else 0)


def _header(text: bytes, path: str) -> dict[str, Any]:
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise StateError(f"{path} is damaged, or no safetensors file: {error}.") from error
    if not isinstance(header, dict):
        raise StateError(f"{path} is no safetensors file: its header is a {type(header).__name__}.")
    return header


def _length(entry: Any) -> int:
    """How many bytes of data an entry is for; 0 for one that is malformed, which is refused by itself."""
    offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(one) is int for one in offsets):
        return 0
    begin, end = map(int, offsets)
    return max(0, end - begin)


def _tensor(entry: Any, data: memoryview, what: str) -> torch.Tensor:
    try:
        dtype, shape, (begin, end) = _DTYPES[entry["dtype"]], list(entry["shape"]), entry["data_offsets"]
        numbers = [*shape, begin, end]
        fits = all(type(number) is int and number >= 0 for number in numbers) and end - begin == prod(shape) * dtype.itemsize
    except (KeyError, TypeError, ValueError) as error:
        raise StateError(f"{what} has the entry {entry!r:.120}, of which {error!r} cannot be read.") from error
    if not fits or end > len(data):
        raise StateError(f"{what} has the entry {entry!r:.120}, which does not fit {len(data)} bytes of data: truncated?")
    if begin == end:
        try:
            return torch.empty(shape, dtype=dtype)
        except (TypeError, RuntimeError) as error:  # of sizes that nothing can have
            raise StateError(f"{what} has the shape {shape!r:.120}, which no tensor can have.") from error
    # Not by frombuffer with the dtype: data may begin at any byte, and torch reads whole elements from aligned memory only.
    return torch.frombuffer(bytearray(data[begin:end]), dtype=dtype).view(shape)
