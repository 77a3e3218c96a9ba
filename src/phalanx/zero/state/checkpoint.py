"""The state in torch.distributed.checkpoint: each rank saves and loads its own part, nothing is gathered.

    key                  value
    layout               JSON as bytes: the parameters, the options of groups, and what each state looks like
    state.<n>.<path>     one leaf of parameter n's state, flat, in the order of the parameter's memory

Numbers of parameters are those of `state_dict()`. A checkpoint says by itself what is in it, so it is loaded by
another number of ranks, another partition or a new optimizer without state.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from ...errors import ArgumentTypeError, StateError
from ...plan import ParamSpec
from ..partition.kinds import state_keys
from .loading import check_keys
from .local_state import Extent, LocalState
from .sharded_optimizer import ShardedOptimizer
from .tree import Leaf, Tree, describe, leaves_of, rebuild

_LAYOUT = "layout"
# A new number whenever an older version would misread what is written.
_FORMAT = "phalanx.zero/1"


class ShardedLeaf(torch.Tensor):
    """A flat tensor of which this rank has some extents. Known to torch.distributed.checkpoint by its three methods.

    They are a protocol of torch without documentation; tests/zero/test_sharded_state.py notices if it changes.
    """

    extents: Sequence[Extent]

    @staticmethod
    def __new__(cls, numel: int, dtype: torch.dtype, extents: Sequence[Extent]) -> ShardedLeaf:
        # Without memory: it only tells torch.distributed.checkpoint of a tensor that exists in parts, on several ranks.
        made: ShardedLeaf = torch.Tensor._make_wrapper_subclass(cls, (numel,), dtype=dtype)
        # An extent without elements is nothing to write, and would share its offset, its name, with the next one.
        made.extents = [extent for extent in extents if extent.values.numel()]
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        held = ", ".join(f"[{extent.start}, {extent.stop})" for extent in self.extents)
        return f"ShardedLeaf(numel={self.numel()}, dtype={self.dtype}, held here: {held or 'nothing'})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # Any result would be that of a part, taken for the whole.
        raise StateError(
            f"{func} was called on a part of a sharded state, which only torch.distributed.checkpoint can read. Use "
            "consolidate_state_dict() and state_dict() for whole tensors."
        )

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                # SHARD: chunks of all ranks make up one tensor. TENSOR would be saved from one rank alone.
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, TensorProperties(dtype=self.dtype), self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(torch.Size([extent.start]), torch.Size([extent.values.numel()]))
            for extent in self.extents
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        for extent in self.extents:
            if index.offset is not None and index.offset[0] == extent.start:
                return extent.values
        raise StateError(f"no part of {index.fqn} begins at {index.offset} on this rank.")


# -- out -----------------------------------------------------------------------------------------


def save_form(sharded: ShardedOptimizer, groups: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """What to give to torch.distributed.checkpoint's `save`; views of the live state. Every rank calls it."""
    live, trees = sharded.described()
    layout = {
        "format": _FORMAT,
        "optimizer": type(sharded.optim).__name__,
        "params": [_said(spec) for spec in sharded.table.specs],
        "groups": [_described_options(group, number) for number, group in enumerate(groups)],
        "states": {str(index): tree for index, tree in trees.items()},
    }
    # The same on every rank; torch.distributed.checkpoint writes a plain tensor that all have once.
    text = json.dumps(layout).encode()
    return {_LAYOUT: torch.frombuffer(bytearray(text), dtype=torch.uint8), **_leaves(sharded, trees, live)}


def _said(spec: ParamSpec) -> dict[str, Any]:
    return {"name": spec.name, "shape": list(spec.shape), "stride": list(spec.stride)}


def _described_options(group: Mapping[str, Any], number: int) -> dict[str, Any]:
    # Parameters are known by number, not by what the options say of them.
    options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    tree, leaves = describe(options, torch.empty(0), f"group {number}")
    if leaves:
        name = next(iter(leaves))
        raise StateError(f"group {number}: its option '{name}' is a tensor with dimensions, which cannot be saved.")
    return {"options": tree, "num_params": len(group["params"])}


def _leaves(sharded: ShardedOptimizer, trees: Mapping[int, Tree], local: LocalState) -> dict[str, ShardedLeaf]:
    found = {}
    for index, tree in trees.items():
        for leaf in leaves_of(tree):
            numel = _numel(leaf, sharded.table.specs[index])
            # The same keys on every rank, also where it holds no element: loading is a collective over them.
            if numel:
                found[_key(index, leaf)] = ShardedLeaf(numel, leaf.dtype, local.extents.get((index, leaf.path), ()))
    return found


def _key(index: int, leaf: Leaf) -> str:
    return f"state.{index}.{leaf.path}"


def _numel(leaf: Leaf, spec: ParamSpec) -> int:
    return spec.numel if leaf.shape is None else prod(leaf.shape)


# -- in ------------------------------------------------------------------------------------------


class CheckpointLoad:
    """One checkpoint on its way into an optimizer. `prefix` are the keys under which the state was saved, with dots."""

    def __init__(self, sharded: ShardedOptimizer, checkpoint: Any, prefix: str) -> None:
        self._sharded = sharded
        if not isinstance(prefix, str):
            raise ArgumentTypeError(f"prefix is the key under which the state was saved, with dots, got {prefix!r:.80}.")
        self._prefix = prefix.split(".") if prefix else []
        self._reader = _reader(checkpoint)
        self._where = f"the checkpoint {checkpoint}" if not isinstance(checkpoint, dcp.StorageReader) else "the checkpoint"
        try:
            self._metadata: Metadata = self._reader.read_metadata()
        except Exception as error:  # whatever a storage raises for what is not there or not a checkpoint
            raise StateError(f"{self._where} cannot be read: {error!r}.") from error

    def run(self, groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Load the state into the optimizer; returns the options of groups. Raises before anything has changed."""
        # First and by itself: only the layout says how large everything else is.
        layout = self._layout()
        table = self._sharded.table
        self._check(layout, groups)
        trees = {int(index): tree for index, tree in layout["states"].items()}
        # New memory beside the state in use, which is replaced only after everything has been read: a checkpoint that turns
        # out to be damaged leaves the optimizer as it was.
        local = self._sharded.blank(trees)
        wanted = _leaves(self._sharded, trees, local)
        for index, tree in trees.items():
            for leaf in leaves_of(tree):
                self._check_leaf(_key(index, leaf), _numel(leaf, table.specs[index]), leaf.dtype, table.names[index])
        if wanted:
            self._load(wanted)
        options = [rebuild(group["options"], torch.device("cpu"), _no_leaf) for group in layout["groups"]]
        self._sharded.set_state(local)
        return options

    def _saved(self, key: str) -> Any:
        return self._metadata.state_dict_metadata.get(".".join([*self._prefix, key]))

    def _layout(self) -> dict[str, Any]:
        saved = self._saved(_LAYOUT)
        if saved is None or not hasattr(saved, "size"):
            raise StateError(
                f"{self._where} has no '{'.'.join([*self._prefix, _LAYOUT])}': it was not saved from "
                "sharded_state_dict(), or under another prefix."
            )
        text = torch.zeros(saved.size[0], dtype=torch.uint8, device="cpu")
        self._load({_LAYOUT: text})
        layout: dict[str, Any] = json.loads(text.numpy().tobytes())
        if layout.get("format") != _FORMAT:
            raise StateError(f"{self._where} has the form {layout.get('format')!r}, expected {_FORMAT!r}.")
        return layout

    def _load(self, wanted: Mapping[str, torch.Tensor]) -> None:
        # Torch joins the keys of nested dicts with dots, and reads them back only in the same nesting.
        nested: dict[str, Any] = dict(wanted)
        for key in reversed(self._prefix):
            nested = {key: nested}
        try:
            dcp.load(nested, storage_reader=self._reader, process_group=self._sharded.collectives.group)
        # Raised on every rank when one of them fails, so that all refuse together.
        except CheckpointException as error:
            numbers = self._sharded.collectives.ranks.numbers
            reasons = "; ".join(f"rank {numbers[rank]}: {reason[0]!r}" for rank, reason in error.failures.items())
            raise StateError(f"{self._where} is truncated or damaged: {reasons}.") from error

    def _check(self, layout: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> None:
        table, mine = self._sharded.table, type(self._sharded.optim)
        sizes = [group["num_params"] for group in layout["groups"]]
        if sizes != [len(group["params"]) for group in groups]:
            raise StateError(
                f"{self._where} has groups of {sizes} parameters, the optimizer of {[len(g['params']) for g in groups]}. "
                "Make the optimizer with the groups that were saved."
            )
        # Strides too: leaves are saved in the order of the parameter's memory.
        for spec, name, saved in zip(table.specs, table.names, layout["params"], strict=True):
            if [list(spec.shape), list(spec.stride)] != [saved["shape"], saved["stride"]]:
                raise StateError(
                    f"{name} has shape {spec.shape} and strides {spec.stride}; saved was {saved['name']} with shape "
                    f"{tuple(saved['shape'])} and strides {tuple(saved['stride'])}. It is another model's."
                )
        keys = state_keys(mine)
        for index, tree in layout["states"].items():
            if keys is not None:
                check_keys(set(tree.get("dict", ())), keys, table.names[int(index)], mine.__name__)

    def _check_leaf(self, key: str, numel: int, dtype: torch.dtype, name: str) -> None:
        saved = self._saved(key)
        if numel and (saved is None or tuple(saved.size) != (numel,) or saved.properties.dtype != dtype):
            got = "nothing" if saved is None else f"{tuple(saved.size)} of {saved.properties.dtype}"
            raise StateError(
                f"{name}: {self._where} should have {numel} elements of {dtype} under '{key}', but has {got}. "
                "It is truncated or mixed up."
            )


def _no_leaf(leaf: Leaf) -> torch.Tensor:
    raise StateError(f"an option of a group has a tensor at '{leaf.path}', which is never saved there.")


def _reader(checkpoint: Any) -> dcp.StorageReader:
    if isinstance(checkpoint, dcp.StorageReader):
        return checkpoint
    if isinstance(checkpoint, Mapping):
        raise ArgumentTypeError(
            "load_sharded_state_dict() reads the checkpoint itself, not a dict: give the folder that "
            "torch.distributed.checkpoint.save() wrote, or a StorageReader."
        )
    if not isinstance(checkpoint, (str, os.PathLike)):
        raise ArgumentTypeError(f"checkpoint is a folder or a StorageReader, got {checkpoint!r:.80}.")
    return dcp.FileSystemReader(checkpoint)
