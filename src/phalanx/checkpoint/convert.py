"""From and to the checkpoints of others: torch.save, torch.distributed.checkpoint (`safetensors` has a file of its own).

In one process, tensor by tensor where the format allows it. Reading torch.distributed.checkpoint unpickles, since that is
how torch writes what is not a tensor: convert only what you trust. Everything else here, and all loading of ours, does not.
"""

from __future__ import annotations

import contextlib
import secrets
import time
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
    state = plain_state(source, numbered=True)
    try:
        torch.save(state, path)
    except RuntimeError as error:  # of its C++ writer: a folder of that name, no folder above it, a full disk
        raise CheckpointError(f"{path} could not be written: {error}") from error


def to_dcp(source: Source, path: str) -> None:
    """A folder for `torch.distributed.checkpoint.load`, with the keys of `get_state_dict`."""
    import torch.distributed.checkpoint as dcp

    with _without_a_group():
        try:
            dcp.save(plain_state(source, numbered=False), checkpoint_id=path, no_dist=True)
        except dcp.CheckpointException as error:  # no Exception, in torch
            raise CheckpointError(f"{path} could not be written: {_reasons(error)}") from error


@contextlib.contextmanager
def _without_a_group() -> Iterator[None]:
    """Torch warns that there is no process group, although it was told."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


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
        try:
            dcp.load(flat, checkpoint_id=path, no_dist=True)
        except dcp.CheckpointException as error:
            raise StateError(f"{path} is truncated or damaged: {_reasons(error)}") from error
    paths: Mapping[str, tuple[Any, ...]] = metadata.planner_data or {}
    nested: dict[Any, Any] = {}
    for key, value in flat.items():
        *above, last = paths.get(key, (key,))
        place = nested
        for part in above:
            place = place.setdefault(part, {})
        place[last] = value
    return source_of(path, _with_lists(nested))


def _reasons(error: Any) -> str:
    return "; ".join(repr(reason[0]) for reason in error.failures.values())


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
    disk.make_root(folder)
    number = int(source.about["step"]) if step is None else step
    name = SaveName(next_number(disk, folder), number, secrets.token_hex(4))
    layout = lay_out(source.pieces)
    memory = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    fill(memory, source.pieces, layout)
    about = {"step": number, "metrics": {}, "total_bytes": layout.num_bytes, "time": time.time(), "from": source.where}
    placed = (dict(layout.tensors), list(layout.extents))
    manifest = Manifest(str(name), 0, 1, layout.num_bytes, *placed, source.texts[0], about)
    try:
        Save(Job(folder, manifest), _bytes_of(memory), disk, lambda _: None).run()
    except OSError as error:
        raise CheckpointError(f"{folder}/{name} could not be written: {error}") from error
    return name
