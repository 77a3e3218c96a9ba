"""A rank's share of a divided optimizer's state, in place in memory that outlives the rank: nothing is copied per step.

Once the state is there, it and the parameters move into a file of the launcher's, and the optimizer goes on in that
memory. A step is then

    vote              all ranks have their gradients, and can step in place: from here on it is finished, by whoever is left
    piece by piece    log it, mark it, step it, mark it (`journal`); copy its parameters into the other ranks' files
    all have stepped  a barrier, behind which each rank has the parameters of all

That no parameter travels through a transport saves what the log costs, or more. Nobody reads parameters between the vote
and the barrier, so that others may write them; those of a piece that is not marked as done are with the others as they were.

Without a vote in favour the step is made as any other, after a copy of what was there (`leave`). What others do when this
rank dies: `replay`. Only for the element partition on the CPU, with parameters in memory of their own, stepped by `step()`:
where backward steps, an update begins before all gradients are known.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from ..checkpoint.layout import Captured, Piece, dtype_name, info_of_spec
from ..checkpoint.optimizers import Names, capture_optimizer, named_params
from ..checkpoint.storage.manifest import Extent
from ..errors import StateError
from ..launch.elastic.heads import Paths
from ..observe import trace
from ..zero.optimizer import ZeroRedundancyOptimizer
from ..zero.partition.element import ElementPartition, Placement
from ..zero.partition.shard import LiveSlice, Shard
from ..zero.partition.storage import ParameterStorage, flatten, unflatten
from ..zero.state.tree import numbers_of
from .journal import Journal, Votes
from .layout import MOST_NUMEL, Layout, Leaf, SliceSpec, Text, lay_out
from .mapped import grow, map_grown, read_text, view_of

# A program that gives its parameters other memory again and again is better served by copies.
_MOST_MOVES = 4


def can_place(optimizer: Any) -> bool:
    """Whether an optimizer is of a kind that can step in place. The same on every rank."""
    if not isinstance(optimizer, ZeroRedundancyOptimizer) or optimizer._overlap is not None:
        return False
    partition, table = optimizer.sharded.partition, optimizer.sharded.table
    is_own = optimizer.sharded.placement is Placement.OWN and isinstance(partition, ElementPartition)
    return is_own and all(param.device.type == "cpu" for param in table.params)


@dataclass(slots=True)
class _SliceState:
    """One slice's state where it was put: the dict that the optimizer has for it, and the tensors in the file by name."""

    live: LiveSlice
    state: dict[str, Any] | None
    tensors: dict[str, torch.Tensor | None]

    def is_held(self, states: Mapping[torch.Tensor, Any]) -> bool:
        """Whether the optimizer still has exactly these."""
        if self.state is None:
            return not states.get(self.live.tensor)
        return states.get(self.live.tensor) is self.state and self._names_are_same() and self._first_stray() is None

    def bring_back(self, states: Mapping[torch.Tensor, Any]) -> bool:
        """After a step: what the optimizer has replaced goes to where it belongs. Whether all of it could."""
        if self.state is None:
            return not states.get(self.live.tensor)
        while (name := self._first_stray()) is not None:
            mine, theirs = self.tensors[name], self.state.get(name)
            if mine is None or not isinstance(theirs, torch.Tensor):
                return False
            if (mine.dtype, mine.shape) != (theirs.dtype, theirs.shape):
                return False
            self.state[name] = mine.copy_(theirs)
        return self._names_are_same()

    def _names_are_same(self) -> bool:
        assert self.state is not None, "asked of a slice that has a state"
        return len(self.state) == len(self.tensors)

    def _first_stray(self) -> str | None:
        assert self.state is not None, "asked of a slice that has a state"
        get = self.state.get
        # A plain loop: this is asked twice per slice and step.
        for name, tensor in self.tensors.items():
            if get(name, self) is not tensor:
                return name
        return None


class Place:
    """This rank's state in place: the `Stepper` of its optimizer. `leave` writes a copy of the state, on all ranks."""

    def __init__(
        self, label: str, optimizer: ZeroRedundancyOptimizer, names: Names, paths: Paths, leave: Callable[[], None]
    ) -> None:
        self._label, self._optimizer, self._names, self._leave = label, optimizer, names, leave
        self.local = optimizer.sharded.local
        self._file = os.open(paths.place, os.O_RDWR | os.O_CLOEXEC)
        self._journal = Journal(paths)
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._layout = Layout((), (), 0)
        self._shards: list[Shard] = []
        self._storages: list[ParameterStorage] = []
        # By shard: the number of each piece, and its slices.
        self._pieces: dict[int, list[tuple[int, list[_SliceState]]]] = {}
        # By piece: the parameters in the other ranks' files, and where they come from here.
        self._outgoing: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
        self._votes = Votes(())
        self._num_moves = self._num_left = 0
        self.is_stepping = False
        # Since the last commit: whether a step has begun, in whatever way, and whether it has ended in place.
        self._has_begun = False
        self.has_stepped = False
        """Whether what was learnt since the last commit is one step in place. The same on every rank."""
        self._text_bounds: tuple[int, int] | None = None
        self.version = -1
        """Of the last commit."""
        self.arguments: dict[str, Any] = {}
        self._gradients: list[tuple[torch.Tensor, int] | None] = []

    # -- moving there --------------------------------------------------------------------------

    def settle(self, version: int) -> bool:
        """Have the state of `version`, of which there is a copy, in place. Whether it is."""
        if self._num_left >= _MOST_MOVES or not isinstance(self._optimizer.sharded.partition, ElementPartition):
            return False
        if self._text_bounds is not None and self._is_in_place():
            self._journal.open_at(version, len(self._layout.pieces), self._text_bounds, self._layout.most_bytes)
        elif self._num_moves >= _MOST_MOVES or not self._move(version):
            return False
        self.committed(version)
        return True

    @torch.no_grad()
    def _move(self, version: int) -> bool:
        sharded = self._optimizer.sharded
        partition = sharded.partition
        assert isinstance(partition, ElementPartition), "looked at by settle"
        storages = {one.param: one for shard in partition.shards for one in shard.storages.values()}
        self._storages, self._text_bounds = [storages[param] for param in sharded.table.params], None
        specs = [[self._spec_of(live) for live in shard.slices] for shard in partition.shards]
        if None in (one for shard in specs for one in shard) or not _are_apart(self._storages):
            return False
        params = [(dtype_name(one.flat.dtype), one.flat.element_size(), one.flat.numel()) for one in self._storages]
        end = os.fstat(self._file).st_size
        self._layout = lay_out([[one for one in shard if one is not None] for shard in specs], params, end, MOST_NUMEL)
        try:
            self._memory = grow(self._file, self._layout.num_bytes)
        except OSError:
            return False  # no memory is left; nothing has been moved
        self._num_moves += 1
        self._move_params()
        self._move_states(partition.shards)
        data = pickle.dumps(self._text(), protocol=pickle.HIGHEST_PROTOCOL)
        if os.pwrite(self._file, data, self._layout.num_bytes) != len(data):
            return False  # no memory is left: what was moved is as good as any other
        self._text_bounds = (self._layout.num_bytes, len(data))
        self._journal.open_at(version, len(self._layout.pieces), self._text_bounds, self._layout.most_bytes)
        return True

    def connect(self, images: Sequence[Paths]) -> None:
        """Find this rank's parameters in the files of the others. All have settled."""
        mine = self._optimizer.sharded.collectives.rank
        others = [paths for rank, paths in enumerate(images) if rank != mine]
        self._votes.close()
        self._votes, self._outgoing = Votes(others), [([], []) for _ in self._layout.pieces]
        for text, paths in [(read_text(paths), paths) for paths in others]:
            memory = map_grown(paths.place, text.layout.num_bytes)
            params = [view_of(memory, leaf) for leaf in text.layout.params]
            for piece, (targets, sources) in zip(self._layout.pieces, self._outgoing, strict=True):
                for one in piece.slices:
                    if one.start < one.stop:
                        targets.append(params[one.number][one.start : one.stop])
                        sources.append(self._storages[one.number].flat[one.start : one.stop])

    def _spec_of(self, live: LiveSlice) -> SliceSpec | None:
        """What a slice needs; None for one that cannot be in place."""
        bounds = live.bounds
        state: Any = self.local.optim.state.get(live.tensor)
        specs: dict[str, tuple[str, int, tuple[int, ...]] | None] | None = None
        if state:
            specs = {}
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and value.is_contiguous() and value.device.type == "cpu":
                    specs[name] = (dtype_name(value.dtype), value.element_size(), tuple(value.shape))
                elif value is not None:
                    return None  # a number that the optimizer counts for itself, say
                else:
                    specs[name] = None
        group = self._optimizer.sharded.table.group_of[live.index]
        is_scalar = not live.storage.spec.shape
        return SliceSpec(live.index, group, (bounds.start, bounds.stop, bounds.begin, bounds.end), is_scalar, specs)

    def _move_params(self) -> None:
        for storage, leaf in zip(self._storages, self._layout.params, strict=True):
            view = unflatten(view_of(self._memory, leaf), storage.spec)
            view.copy_(storage.param.detach())
            storage.param.data = view

    def _move_states(self, shards: Sequence[Shard]) -> None:
        self._shards, self._pieces = list(shards), {}
        pieces = iter(enumerate(self._layout.pieces))
        for shard in shards:
            shard.refresh()  # slices see the parameters where they are now
            lives, mine, count = iter(shard.slices), self._pieces.setdefault(id(shard), []), 0
            while count < len(shard.slices):
                number, piece = next(pieces)
                # A piece has as many slices as the layout says, in the shard's order.
                mine.append((number, [self._move_state(next(lives), one.state) for one in piece.slices]))
                count += len(piece.slices)

    def _move_state(self, live: LiveSlice, places: Mapping[str, Leaf | None] | None) -> _SliceState:
        if places is None:
            return _SliceState(live, None, {})
        state: dict[str, Any] = self.local.optim.state[live.tensor]
        tensors = {name: None if leaf is None else view_of(self._memory, leaf) for name, leaf in places.items()}
        for name, tensor in tensors.items():
            if tensor is not None:
                state[name] = tensor.copy_(state[name])
        return _SliceState(live, state, tensors)

    def _text(self) -> Text:
        """What others need in order to read it: as a checkpoint's, the places found by address."""
        sharded, text, found = self._optimizer.sharded, Text(self._layout), Captured()
        capture_optimizer(self._label, self._optimizer, self._names, found, True)
        called = named_params(sharded.table.params, self._names)
        for owned in sharded.partition.owned:
            storage = self._storages[owned.index]
            key, info = f"model/{called[owned.index]}", info_of_spec(storage.spec, storage.flat.dtype)
            found.own.append(Piece(key, info, owned.start, storage.flat[owned.start : owned.stop]))
        first = self._memory.data_ptr()
        for piece in found.own:
            text.infos[piece.key] = piece.info
            at, stop = piece.values.data_ptr() - first, piece.start + piece.values.numel()
            if piece.values.numel():
                assert 0 <= at < self._memory.numel(), f"{piece.key} was moved, and is elsewhere"
                text.extents.append(Extent(piece.key, piece.start, stop, at))
        # Counts of steps have no piece of their own: their values are in the text, and out of date there after a step.
        trees = found.texts[self._label]["states"]
        for owned in sharded.partition.owned:
            if called[owned.index] in trees and owned.key in sharded.optim.state:
                for node, tensor in numbers_of(trees[called[owned.index]], sharded.optim.state[owned.key]):
                    node["place"] = tensor.data_ptr() - first
        text.texts = found.texts
        return text

    # -- a step --------------------------------------------------------------------------------

    def begin(self, shards: Sequence[Shard], arguments: Mapping[str, Any]) -> None:
        """Vote. Afterwards all ranks step in place, or none does."""
        self.is_stepping = False
        if self._has_begun:
            # A second step since the commit: no version has a name for what is between. The same on every rank.
            self._journal.void()
            self.has_stepped = False
            return
        self._has_begun, self.arguments = True, dict(arguments)
        # Held, as the script may drop its own in an error's wake, and from here on: if the vote fails on this rank, another
        # may have seen it succeed, and whoever is left finishes that step.
        params = self._optimizer.sharded.table.params
        self._gradients = [None if param.grad is None else (param.grad, param.grad._version) for param in params]
        can_step = self._can_step(shards)
        if not can_step:
            self._journal.refuse(self.version + 1)
        self._barrier("agreeing that all gradients are there, before a step in place")
        if not can_step or self._votes.has_refused(self.version + 1):
            self._num_left += 1
            self._gradients = []
            self._leave()
            self._journal.void()
            return
        # From here on the step is finished, never undone.
        self._journal.begin(self.version + 1)
        self.is_stepping = True

    def _can_step(self, shards: Sequence[Shard]) -> bool:
        if self._journal.is_void or self._optimizer._join_config.enable:
            return False
        states = self.local.optim.state
        # A parameter's first gradient: its state is about to be made, in other memory. An optimizer without any makes none.
        stepped = [live.tensor for shard in shards for live in shard.slices if live.storage.param.grad is not None]
        are_known = not any(states.values()) or all(tensor in states for tensor in stepped)
        return are_known and self._is_in_place()

    def _is_in_place(self) -> bool:
        partition, states = self._optimizer.sharded.partition, self.local.optim.state
        if not isinstance(partition, ElementPartition) or partition.shards != self._shards:
            return False
        is_held = all(one.is_held(states) for pieces in self._pieces.values() for _, slices in pieces for one in slices)
        return is_held and not any(storage.has_moved for storage in self._storages)

    def step(self, shard: Shard, arguments: Mapping[str, Any]) -> None:
        """A shard, piece by piece."""
        group_of = self._optimizer.sharded.table.group_of
        for number, slices in self._pieces[id(shard)]:
            active: dict[int, list[torch.Tensor]] = {}
            for one in slices:
                if one.live.tensor.grad is not None:
                    active.setdefault(group_of[one.live.index], []).append(one.live.tensor)
            if active:
                self._step_piece(number, slices, active, arguments)
            # Not before the mark: until then whoever finishes the piece has its old parameters from one of the others.
            targets, sources = self._outgoing[number]
            torch._foreach_copy_(targets, sources)

    def _step_piece(
        self, number: int, slices: Sequence[_SliceState], active: Mapping[int, Any], arguments: Mapping[str, Any]
    ) -> None:
        journal, local = self._journal, self.local
        if not journal.is_void:
            journal.protect(number, self._memory, self._layout.pieces[number].bounds)
        local.step_some(active, **arguments)
        # Before the mark: from there on nobody computes these again.
        for one in slices:
            one.live.store()
        is_kept = all([one.bring_back(local.optim.state) for one in slices])
        if journal.is_void:
            return
        if is_kept:
            journal.done(number)
        else:
            # A state of another form than before. It is written at the next step; a loss before that costs the state.
            journal.void()

    def end(self) -> None:
        """All own pieces are done: wait for those of the others, whose parameters are here then."""
        if not self.is_stepping:
            return
        if not self._journal.is_void:
            self._journal.finish()
        self.is_stepping = False
        started_ns = trace.now_ns()
        self._barrier("waiting until all ranks have stepped, and given out their parameters")
        self.has_stepped = True
        if trace.recorder is not None:
            num_bytes = sum(target.nbytes for targets, _ in self._outgoing for target in targets)
            trace.recorder.span(trace.GATHER, started_ns, trace.now_ns(), bucket=0, bytes=num_bytes)

    def _barrier(self, where: str) -> None:
        self._optimizer.sharded.collectives.barrier(where)

    def committed(self, version: int) -> None:
        """The step is done on every rank: its gradients are of no more use."""
        self.version, self._gradients = version, []
        self._has_begun = self.has_stepped = False

    def void(self) -> None:
        """What is in place is not the state any more."""
        self._journal.void()

    # -- for finishing a step ------------------------------------------------------------------

    @property
    def holds(self) -> int | None:
        """The version to which this rank has what it takes to finish a step, of any rank; None if of no step."""
        return self.version + 1 if self._gradients else None

    def gradient(self, number: int) -> torch.Tensor | None:
        """A parameter's, flat, in the order of its memory; None if it has none in this step."""
        found = self._gradients[number]
        if found is None:
            return None
        grad, version = found
        if grad._version != version:
            name = self._optimizer.sharded.table.names[number]
            raise StateError(
                f"the gradient of {name} was changed after step() had failed, so that the step cannot be finished. Leave "
                "gradients alone when errors end the training function."
            )
        return flatten(grad.detach(), self._storages[number].spec)

    def param(self, number: int) -> torch.Tensor:
        """A parameter as this rank has it, flat: other ranks' shards as they were until all have stepped."""
        return self._storages[number].flat

    def close(self) -> None:
        """Let go of the files. Tensors in them stay where they are, for as long as anybody holds them."""
        if self.local.stepper is self:
            self.local.stepper = None
        os.close(self._file)
        self._journal.close()
        self._votes.close()


def _are_apart(storages: Sequence[ParameterStorage]) -> bool:
    """Whether each parameter is dense and shares no memory with another: apart from it, it would have to stay together."""
    if any(one.is_copy for one in storages):
        return False
    spans = sorted((one.flat.data_ptr(), one.flat.data_ptr() + one.flat.nbytes) for one in storages if one.flat.numel())
    return all(before[1] <= after[0] for before, after in pairwise(spans))
