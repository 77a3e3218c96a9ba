"""Finishing a step for ranks that were cut short in it, and reading states in place.

After a loss every rank's file is brought to the version that any of them has begun: a piece that may be torn is put back
from the log, and it and those behind it are stepped, by a rank that still holds the gradients, exactly as their owner would
have. The same marks are made as the owner makes, so that whoever is killed at this leaves it to the next.

The parameters of a torn piece are not in the log: a rank that finishes it has them from the step before, since nobody takes
the parameters of others before all have stepped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from ..errors import StateError
from ..launch.elastic.heads import Paths, Progress
from ..zero.partition.local import LocalOptimizer
from .image import MappedSource
from .journal import Journal
from .layout import PiecePlace, SlicePlace
from .mapped import map_path, read_progress, read_text, view_file, view_of


class Holder(Protocol):
    """A rank that has all it takes to finish a step (`Place`)."""

    local: LocalOptimizer
    arguments: dict[str, Any]

    def gradient(self, number: int) -> torch.Tensor | None:
        """A parameter's, flat."""

    def param(self, number: int) -> torch.Tensor:
        """A parameter, flat: other ranks' shards of it as they were before the step."""


def assign(progress: Sequence[Progress], version: int, holders: Sequence[int | None]) -> dict[int, int]:
    """Who finishes the step to `version` of whom. `holders` are the former ranks, by new rank, of those who can. Pure.

    Everybody its own, in parallel; the others' in turn. Not one's own torn piece: its old parameters are with the others.
    """
    unfinished = [rank for rank, one in enumerate(progress) if one.version < version or not one.is_whole]
    able = [new for new, old in enumerate(holders) if old is not None]
    found: dict[int, int] = {}
    for turn, rank in enumerate(unfinished):
        own = [new for new in able if holders[new] == rank and not progress[rank].is_logged]
        others = [new for new in able if holders[new] != rank]
        if not own and not others:
            raise StateError(
                f"step {version} was begun and no rank is left that can finish it for former rank {rank}: the gradients are "
                "lost. Start again from the newest checkpoint (Checkpointer.restore)."
            )
        found[rank] = own[0] if own else others[turn % len(others)]
    return found


class Replay:
    """One rank's file on its way to the version of a step, at the hands of a rank that holds what it takes."""

    def __init__(self, paths: Paths, holder: Holder) -> None:
        self._holder = holder
        self._text, self._memory = read_text(paths), map_path(paths.place)
        self._journal = Journal(paths)

    @torch.no_grad()
    def run(self, version: int) -> None:
        """Finish the step to `version`, whatever is done of it."""
        journal, pieces = self._journal, self._text.layout.pieces
        try:
            if journal.progress.version < version:
                journal.begin(version)
            if journal.progress.is_logged:
                torn = pieces[journal.progress.done]
                self._put_back_params(torn)
                journal.undo(self._memory, torn.bounds)
            for number in range(journal.progress.done, len(pieces)):
                self._step(number, pieces[number])
            journal.finish()
        finally:
            journal.close()

    def _put_back_params(self, piece: PiecePlace) -> None:
        for one in piece.slices:
            self._params(one)[one.start : one.stop].copy_(self._holder.param(one.number)[one.start : one.stop])

    def _params(self, one: SlicePlace) -> torch.Tensor:
        return view_of(self._memory, self._text.layout.params[one.number])

    def _step(self, number: int, piece: PiecePlace) -> None:
        stepped = [(one, tensor) for one in piece.slices if (tensor := self._tensor(one)) is not None]
        if not stepped:
            return
        self._journal.protect(number, self._memory, piece.bounds)
        state, active = self._holder.local.optim.state, dict[int, list[torch.Tensor]]()
        for one, tensor in stepped:
            if one.state is not None:
                places = one.state.items()
                state[tensor] = {name: None if leaf is None else view_of(self._memory, leaf) for name, leaf in places}
            active.setdefault(one.group, []).append(tensor)
        self._holder.local.step_some(active, **self._holder.arguments)
        for one, tensor in stepped:
            self._bring_back(one, state.pop(tensor, {}))
            if one.is_edge:
                owned = tensor.detach()[one.start - one.begin : one.stop - one.begin]
                self._params(one)[one.start : one.stop].copy_(owned)
        self._journal.done(number)

    def _tensor(self, one: SlicePlace) -> torch.nn.Parameter | None:
        """What stands for a slice in the optimizer, as `LiveSlice` has it; None for one without a gradient."""
        grad = self._holder.gradient(one.number)
        if grad is None:
            return None
        values = self._params(one)[one.begin : one.end]
        if one.is_edge:
            # In memory of its own: elements beside the owned ones are another rank's.
            values = torch.zeros_like(values)
            inside = slice(one.start - one.begin, one.stop - one.begin)
            values[inside] = self._params(one)[one.start : one.stop]
        shape = () if one.is_scalar else values.shape
        tensor = torch.nn.Parameter(values.view(shape), requires_grad=False)
        tensor.grad = grad[one.begin : one.end].view(shape)
        return tensor

    def _bring_back(self, one: SlicePlace, state: Mapping[str, Any]) -> None:
        """Where the optimizer has replaced tensors of its state."""
        for name, leaf in (one.state or {}).items():
            if leaf is not None:
                view = view_of(self._memory, leaf)
                if state[name].data_ptr() != view.data_ptr():
                    view.copy_(state[name])


class PlacedSource(MappedSource):
    """The states in place of all ranks of a generation, whole, for loading: looks like a checkpoint without a model.

    `groups` are the options of the optimizer's groups, which are nowhere in the files: they change from step to step.
    """

    def __init__(self, images: Sequence[Paths], version: int, label: str, groups: Sequence[Any]) -> None:
        super().__init__(version)
        for rank, paths in enumerate(images):
            progress = read_progress(paths)
            if progress.version != version or not progress.is_whole:
                raise StateError(f"{self.where}: rank {rank} is at piece {progress.done} of version {progress.version}.")
            text = read_text(paths)
            view = view_file(paths.place, text.layout.num_bytes)
            _read_numbers(text.texts[label]["states"], view)
            self.texts.append({label: {**text.texts[label], "groups": list(groups)}})
            self.infos.update(text.infos)
            self.add(rank, view, text.extents)
        self.sort()


def _read_numbers(tree: Any, memory: memoryview) -> None:
    """Bring counts of steps and the like up to date, wherever a text has them."""
    if isinstance(tree, dict):
        if "place" in tree:
            dtype = getattr(torch, tree["dtype"])
            at = tree["place"]
            number = torch.frombuffer(memory[at : at + dtype.itemsize], dtype=dtype).item()
            tree["value"] = [number.real, number.imag] if isinstance(number, complex) else number
        for value in tree.values():
            _read_numbers(value, memory)
    elif isinstance(tree, list):
        for value in tree:
            _read_numbers(value, memory)
