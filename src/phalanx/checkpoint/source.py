"""Where a state is read from: a checkpoint of ours, or anything that can be made to look like one.

Tensors are read when they are asked for, and only the elements that are: from a local folder they are views of the file.
Must not know who asks.
"""

from __future__ import annotations

import abc
import os
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, BinaryIO

import torch

from ..errors import PhalanxError, StateError
from ..zero.partition.storage import flatten, unflatten
from ..zero.state.tree import describe, leaves_of
from .layout import Piece, spec_of, whole_piece
from .reshard import Held, cover
from .storage.disk import Disk, open_plain
from .storage.library import Entry, manifests
from .storage.manifest import TensorInfo, data_file, manifest_file, said
from .tree import decode, encode


class Source(abc.ABC):
    """A saved state. `infos` are its tensors, `texts` what each rank said by component."""

    where: str
    infos: dict[str, TensorInfo]
    texts: list[dict[str, Any]]
    about: dict[str, Any]

    @property
    def world(self) -> int:
        return len(self.texts)

    @abc.abstractmethod
    def flat(self, key: str, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of a tensor, in the order of its memory when it was saved. To be read only."""

    def whole(self, key: str) -> torch.Tensor:
        """A tensor with the shape and strides with which it was saved. To be read only."""
        info = self.infos[key]
        return unflatten(self.flat(key, 0, info.numel), spec_of(info))

    def ordered(self, key: str, like: TensorInfo, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop), counted in the order of `like`'s memory."""
        info = self.infos[key]
        if info.stride == like.stride or info.numel <= 1:
            return self.flat(key, start, stop)
        return flatten(self.whole(key), spec_of(like))[start:stop]

    def own(self, component: str, rank: int) -> Any:
        """What a rank saved for itself, with its tensors; None if it did not."""
        tree = self.texts[rank].get(component)
        return None if tree is None else self._decoded(tree, f"rank-{rank}/{component}")

    def labels(self) -> list[str]:
        """The optimizers that were saved: "optimizer", or "optimizer:name" for several."""
        return sorted({name for text in self.texts for name in text if name.partition(":")[0] == "optimizer"})

    def optimizer(self, label: str) -> dict[str, Any]:
        """Class, groups and states of an optimizer, put together from what each rank knew of it."""
        told = [text[label] for text in self.texts if label in text]
        if not told:
            raise StateError(f"{self.where} has no {label}; it has {', '.join(self.labels()) or 'none'}.")
        states: dict[str, Any] = {}
        for one in told:
            for name, tree in one["states"].items():
                states.setdefault(name, tree)
        with self.reading(label):
            for name, tree in states.items():
                paths = [leaf.path for leaf in leaves_of(tree)]
                if len(set(paths)) < len(paths):
                    raise ValueError(f"the state of '{name:.60}' has one tensor at several places")
        return {**told[0], "states": states}

    def model_names(self) -> dict[str, str]:
        """The keys of the model's tensors by their names, shared ones under each of them."""
        found = {key.removeprefix("model/"): key for key in self.infos if key.startswith("model/")}
        aliases = self.texts[0].get("model", {}).get("aliases", {})
        found |= {name: f"model/{original}" for name, original in aliases.items()}
        # Whoever writes them elsewhere makes a copy for each.
        sizes = {key: self.infos[key].num_bytes for key in found.values() if key in self.infos}
        if sum(sizes.get(key, 0) for key in found.values()) > max(_MOST_TIMES * sum(sizes.values()), _ALWAYS_FITS_BYTES):
            raise StateError(f"{self.where} has {len(aliases)} further names for its tensors, which no model has.")
        return found

    def model_extra(self) -> dict[str, Any]:
        """What the model's state has beside tensors."""
        found: dict[str, Any] = self._decoded(self.texts[0].get("model", {}).get("extra", {}), "model_extra")
        return found

    def _decoded(self, tree: Any, place: str) -> Any:
        """A tree with its tensors."""
        seen: set[str] = set()

        def leaf(path: str) -> torch.Tensor:
            if path in seen:  # a short text could ask for one large tensor a million times
                raise ValueError(f"it has the tensor '{path:.60}' at several places")
            seen.add(path)
            return self.whole(f"{place}/{path}").clone()

        with self.reading(place):
            return decode(tree, leaf)

    @contextmanager
    def reading(self, place: str) -> Iterator[None]:
        """Around what takes a text for what a save writes. Hashes are made as easily as texts: a file may say anything."""
        try:
            yield
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
            if isinstance(error, PhalanxError):
                raise
            raise StateError(f"{self.where}: {place} is malformed: {type(error).__name__}: {error!s:.200}") from error


class CheckpointSource(Source):
    """A committed save. Raises StateError, naming the file, unless all manifests are those that were committed."""

    def __init__(self, disk: Disk, entry: Entry) -> None:
        found = manifests(disk, entry)
        self.where, self.about = entry.path, entry.about
        self.texts = [manifest.texts for manifest in found]
        self.infos = {}
        self._views: list[Any] = [None] * len(found)
        self._disk = disk
        self._sizes = [manifest.num_bytes for manifest in found]
        self._held: dict[str, list[Held]] = {}
        for manifest in found:
            for key, info in manifest.tensors.items():
                if self.infos.setdefault(key, info) != info:
                    raise StateError(
                        f"{entry.path}/{manifest_file(manifest.rank)}: rank {manifest.rank}: {said(key)} is {info}, but "
                        f"{self.infos[key]} on another rank. The ranks did not save the same model."
                    )
            for extent in manifest.extents:
                held = Held(extent.start, extent.stop, manifest.rank, extent.offset)
                self._held.setdefault(extent.key, []).append(held)
        for places in self._held.values():
            places.sort(key=lambda held: held.start)
        for key, info in self.infos.items():
            self._places(key, info, 0, info.numel)

    def _places(self, key: str, info: TensorInfo, start: int, stop: int) -> list[Held]:
        try:
            return list(cover(self._held.get(key, []), start, stop, info.itemsize))
        except LookupError as gap:
            raise StateError(f"{self.where}: {said(key)}: no rank has saved {gap.args[0]} of {info.numel}.") from None

    def flat(self, key: str, start: int, stop: int) -> torch.Tensor:
        info = self.infos[key]
        dtype = getattr(torch, info.dtype, None)
        if not isinstance(dtype, torch.dtype) or dtype.itemsize != info.itemsize:
            raise StateError(
                f"{self.where}: {said(key)} has elements of {info.itemsize} bytes of dtype {info.dtype!r:.60}, which this "
                "torch does not have."
            )
        parts = []
        for held in self._places(key, info, start, stop):
            end = held.offset + (held.stop - held.start) * info.itemsize
            parts.append(torch.frombuffer(self._view(held.rank)[held.offset : end], dtype=dtype))
        if not parts:
            return torch.empty(0, dtype=dtype)
        # Almost always one: a tensor is in several files only where the ranks' shares meet.
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _view(self, rank: int) -> Any:
        if self._views[rank] is None:
            self._views[rank] = self._disk.view(f"{self.where}/{data_file(rank)}", self._sizes[rank])
        return self._views[rank]


class MemorySource(Source):
    """A state in memory, as whole tensors: from a file of torch's, or of another format."""

    def __init__(
        self, where: str, model: Mapping[str, Any], optimizers: Mapping[str, Mapping[str, Any]], step: int = 0
    ) -> None:
        self.where, self.about, self.infos = where, {"step": step}, {}
        self.pieces: list[Piece] = []
        extra = {name: value for name, value in model.items() if not isinstance(value, torch.Tensor)}
        for name, value in model.items():
            if isinstance(value, torch.Tensor):
                self._add(whole_piece(f"model/{name}", value))
        tree, leaves = encode(extra, "the model's extra state")
        for path, leaf in leaves.items():
            self._add(whole_piece(f"model_extra/{path}", leaf))
        self.texts = [{"model": {"aliases": {}, "extra": tree}}]
        for label, saved in optimizers.items():
            self.texts[0][label] = self._optimizer(label, saved, model)
        self._values = {piece.key: piece.values for piece in self.pieces}

    def _add(self, piece: Piece) -> None:
        self.infos[piece.key] = piece.info
        self.pieces.append(piece)

    def _optimizer(self, label: str, saved: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
        if not {"state", "param_groups"} <= set(saved):
            raise StateError(f"{self.where}: {label} is not an optimizer's state: it has {sorted(map(str, saved))}.")
        names: dict[Any, str] = {}
        groups = []
        for group in saved["param_groups"]:
            known = group.get("param_names") or [None] * len(group["params"])
            for param, name in zip(group["params"], known, strict=True):
                # Torch's numbers go on from group to group, as ours do; names are what newer files have, and dcp's.
                names[param] = name or (param if isinstance(param, str) else f"#{param}")
            options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            tree, _ = encode(options, f"{self.where}: the options of a group")
            groups.append({"options": tree, "params": [names[param] for param in group["params"]]})
        states = {}
        for param, state in saved["state"].items():
            name = names.get(param, f"#{param}")
            known = model.get(name)
            like = known if isinstance(known, torch.Tensor) else _largest(state)
            states[name], leaves = describe(dict(state), like, f"{self.where}: '{name}'")
            for path, leaf in leaves.items():
                self._add(whole_piece(f"{label}/{name}/{path}", leaf))
        return {"class": "", "groups": groups, "states": states}

    def flat(self, key: str, start: int, stop: int) -> torch.Tensor:
        return self._values[key][start:stop]


def _largest(state: Mapping[str, Any]) -> torch.Tensor:
    """The tensor of a state that most likely has its parameter's shape, where the parameter is not known."""
    tensors = [value for value in state.values() if isinstance(value, torch.Tensor)]
    return max(tensors, key=torch.Tensor.numel, default=torch.empty(0))


_MODEL_KEYS = ("model", "state_dict", "model_state_dict", "module")
_OPTIMIZER_KEYS = ("optimizer", "optimizer_state_dict", "optim")
# What a file may take in memory: so many times its own size, or this much.
_MOST_TIMES = 64
_ALWAYS_FITS_BYTES = 1 << 28


def read_torch_file(path: str) -> MemorySource:
    """What `torch.save` wrote: a model's state_dict, or a dict with it under "model" and the optimizer's under "optimizer".

    By torch's reader that makes tensors and plain containers only, and calls nothing that a file names.
    """
    try:
        with open_plain(path) as file:
            size = os.fstat(file.fileno()).st_size
            _check_room(size, _unpacked_bytes(file), "files in it")
            file.seek(0)
            loaded = torch.load(file, map_location="cpu", weights_only=True)
        _check_room(size, sum(one.numel() * one.itemsize for one in _tensors(loaded)), "tensors")
    except Exception as error:  # whatever torch raises for what is not a file of its own
        raise StateError(f"{path} cannot be read as a file of torch.save: {error}") from error
    return source_of(path, loaded)


def _unpacked_bytes(file: BinaryIO) -> int:
    if not zipfile.is_zipfile(file):
        return 0  # the older form, in which everything lies as it is
    with zipfile.ZipFile(file) as archive:
        return sum(one.file_size for one in archive.infolist())


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(item)


def _check_room(size: int, num_bytes: int, what: str) -> None:
    """Torch packs nothing, and reads what is packed; nor does a tensor that repeats its elements take room in a file. Both
    make a few bytes fill any memory. Tied and repeated weights are honest, in proportion."""
    if num_bytes > max(_MOST_TIMES * size, _ALWAYS_FITS_BYTES):
        raise StateError(
            f"the {what} would take {num_bytes} bytes, of a file of {size}: nothing that torch.save writes does."
        )


def source_of(where: str, loaded: Any) -> MemorySource:
    """A state that was loaded by other means, in one of the forms that people use."""
    if not isinstance(loaded, Mapping):
        raise StateError(f"{where} holds a {type(loaded).__name__}, expected a state_dict or a dict of them.")
    try:
        return _taken_apart(where, loaded)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, PhalanxError):
            raise
        raise StateError(f"{where} is no state of a model, or of a model and its optimizer: {error!r}.") from error


def _taken_apart(where: str, loaded: Mapping[Any, Any]) -> MemorySource:
    states = {key: value for key, value in loaded.items() if isinstance(value, Mapping)}
    # Several have labels, in what we export.
    optimizers = {key: value for key, value in states.items() if str(key).startswith("optimizer:")}
    if found := [states[key] for key in _OPTIMIZER_KEYS if key in states]:
        optimizers["optimizer"] = found[0]
    model = next((loaded[key] for key in _MODEL_KEYS if isinstance(loaded.get(key), Mapping)), None)
    if model is None:
        model = {} if optimizers else loaded
    step = loaded["step"] if type(loaded.get("step")) is int else 0
    plain = {key.replace("_orig_mod.", ""): value for key, value in model.items()}
    # Saved from a wrapper.
    if plain and all(key.startswith("module.") for key in plain):
        plain = {key.removeprefix("module."): value for key, value in plain.items()}
    return MemorySource(where, plain, optimizers, step)
