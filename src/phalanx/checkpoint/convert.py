"""From and to the checkpoints of others: torch.save, torch.distributed.checkpoint, safetensors.

In one process, tensor by tensor where the format allows it. Reading torch.distributed.checkpoint unpickles, since that is
how torch writes what is not a tensor: convert only what you trust. Everything else here, and all loading of ours, does not.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ..errors import CheckpointError, StateError
from ..zero.state.tree import Leaf, rebuild
from .layout import fill, lay_out
from .source import MemorySource, Source, source_of
from .storage.disk import Disk
from .storage.library import next_number
from .storage.manifest import Manifest, SaveName
from .storage.writer import Job, Save
from .tree import decode

_SAFETENSORS = {
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


# -- out -------------------------------------------------------------------------------------------


def plain_state(source: Source, numbered: bool) -> dict[str, Any]:
    """A checkpoint as whole tensors: {"model": …, "optimizer": …}, the form that torch's own functions take.

    Parameters of the optimizer are known by name, or by number with `numbered`, as `Optimizer.state_dict` has them.
    """
    model: dict[str, Any] = {name: _contiguous(source, key) for name, key in source.model_names().items()}
    found: dict[str, Any] = {"model": {**model, **source.model_extra()}, "step": int(source.about.get("step", 0))}
    for label in source.labels():
        found[label] = _plain_optimizer(source, label, numbered)
    return found


def _contiguous(source: Source, key: str) -> torch.Tensor:
    return source.whole(key).clone(memory_format=torch.contiguous_format)


def _plain_optimizer(source: Source, label: str, numbered: bool) -> dict[str, Any]:
    told = source.optimizer(label)
    names = [name for group in told["groups"] for name in group["params"]]
    as_key: dict[str, Any] = {name: number if numbered else name for number, name in enumerate(names)}
    states = {}
    for name, tree in told["states"].items():

        def leaf(leaf: Leaf, name: str = name) -> torch.Tensor:
            return _contiguous(source, f"{label}/{name}/{leaf.path}")

        states[as_key[name]] = rebuild(tree, torch.device("cpu"), leaf)
    groups = []
    for group in told["groups"]:
        groups.append({**decode(group["options"], _no_leaf), "params": [as_key[name] for name in group["params"]]})
    return {"state": states, "param_groups": groups}


def _no_leaf(path: str) -> torch.Tensor:
    raise StateError(f"an option of a group has a tensor at '{path}', which is never saved there.")


def to_torch(source: Source, path: str) -> None:
    """A file for `torch.load`."""
    torch.save(plain_state(source, numbered=True), path)


def to_dcp(source: Source, path: str) -> None:
    """A folder for `torch.distributed.checkpoint.load`, with the keys of `get_state_dict`."""
    import torch.distributed.checkpoint as dcp

    with _without_a_group():
        dcp.save(plain_state(source, numbered=False), checkpoint_id=path, no_dist=True)


@contextlib.contextmanager
def _without_a_group() -> Iterator[None]:
    """Torch warns that there is no process group, although it was told."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


def to_safetensors(source: Source, path: str) -> int:
    """The model alone, as a safetensors file; returns how many tensors. A shared one is written once, by its first name."""
    keys = sorted(key for key in source.infos if key.startswith("model/"))
    header: dict[str, Any] = {"__metadata__": {"format": "pt", "step": str(source.about.get("step", 0))}}
    at = 0
    for key in keys:
        info = source.infos[key]
        if info.dtype not in _SAFETENSORS:
            raise StateError(f"safetensors has no {info.dtype}, which '{key.removeprefix('model/')}' is.")
        span = [at, at + info.num_bytes]
        header[key.removeprefix("model/")] = {
            "dtype": _SAFETENSORS[info.dtype],
            "shape": list(info.shape),
            "data_offsets": span,
        }
        at = span[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    # The format wants the data to begin at a multiple of eight.
    text += b" " * (-len(text) % 8)
    draft = f"{path}.{secrets.token_hex(4)}"
    with open(draft, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for key in keys:
            values = source.whole(key).contiguous()
            if values.numel():
                file.write(_bytes_of(values.reshape(-1).view(torch.uint8)))
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)
    return len(keys)


def _bytes_of(values: torch.Tensor) -> memoryview:
    array: Any = values.numpy()
    return memoryview(array)


# -- in --------------------------------------------------------------------------------------------


def read_dcp(path: str) -> MemorySource:
    """A checkpoint of torch.distributed.checkpoint, whole, in memory. Unpickles what is not a tensor."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    try:
        metadata = dcp.FileSystemReader(path).read_metadata()
    except Exception as error:  # whatever torch raises for what is not there or not a checkpoint
        raise StateError(f"{path} cannot be read as a folder of torch.distributed.checkpoint: {error!r}") from error
    flat: dict[str, Any] = {}
    for key, saved in metadata.state_dict_metadata.items():
        is_tensor = isinstance(saved, TensorStorageMetadata)
        flat[key] = torch.empty(saved.size, dtype=saved.properties.dtype) if is_tensor else None  # type: ignore[union-attr]
    with _without_a_group():
        dcp.load(flat, checkpoint_id=path, no_dist=True)
    paths: Mapping[str, tuple[Any, ...]] = metadata.planner_data or {}
    nested: dict[Any, Any] = {}
    for key, value in flat.items():
        *above, last = paths.get(key, (key,))
        place = nested
        for part in above:
            place = place.setdefault(part, {})
        place[last] = value
    return source_of(path, _with_lists(nested))


def _with_lists(value: Any) -> Any:
    """Dicts whose keys are 0, 1, 2 … as the lists that they were before torch flattened them."""
    if not isinstance(value, dict):
        return value
    items = {key: _with_lists(item) for key, item in value.items()}
    # By the keys' type too: the states of an optimizer are a dict by numbers only where torch has not flattened it.
    if items and all(type(key) is int for key in items) and sorted(items) == list(range(len(items))):
        return [items[key] for key in range(len(items))]
    return items


def write_source(source: MemorySource, disk: Disk, folder: str, step: int | None = None) -> SaveName:
    """A state from elsewhere as a checkpoint of one rank in `folder`; returns its name."""
    disk.make_folder(folder)
    number = int(source.about["step"]) if step is None else step
    name = SaveName(next_number(disk, folder), number, secrets.token_hex(4))
    layout = lay_out(source.pieces)
    memory = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    fill(memory, source.pieces, layout)
    about = {"step": number, "metrics": {}, "world": 1, "total_bytes": layout.num_bytes, "from": source.where}
    placed = (dict(layout.tensors), list(layout.extents))
    manifest = Manifest(str(name), 0, 1, layout.num_bytes, *placed, source.texts[0], about)
    try:
        Save(Job(folder, manifest), _bytes_of(memory), disk, lambda _: None).run()
    except OSError as error:
        raise CheckpointError(f"{folder}/{name} could not be written: {error}") from error
    return name
