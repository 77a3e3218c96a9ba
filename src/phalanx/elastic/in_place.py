"""When a run keeps its state in place, and how it goes on from there: between `training`, which knows the run's life, and
`place`, which knows the memory.

In place if one divided optimizer that can (`place.can_place`) is all that learns, and has made one step since the last
commit; and if whoever is left can complete a step that was cut short inside of `step()`, without the lines of the script
that come after it: the loader knows what was used, the scheduler is stepped, and a program without a loader has nothing
but the count of steps to find its place by. An `extra` may be brought up to date in those lines, so that programs with one
write copies; but for generators, of which it is seen whether they are drawn from there.

Everything here is asked on every rank alike, or agreed upon by all before anybody acts on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..checkpoint.capture import Subject
from ..errors import StateError
from ..launch.elastic.heads import HEAD_BYTES, VOID, Paths, Progress, copied, placed
from ..launch.elastic.member import Formed
from ..launch.worker import Worker
from ..zero.optimizer import ZeroRedundancyOptimizer
from .mapped import read_bytes
from .place import Place, can_place
from .replay import PlacedSource, Replay, assign
from .transaction import Transaction


@dataclass(frozen=True, slots=True)
class Found:
    """What a generation has left in place: the version to which all of it is to be brought, and how far each rank was."""

    version: int
    progress: tuple[Progress, ...]


@dataclass(frozen=True, slots=True)
class Standing:
    """What one rank says of itself: its rank in the generation before, and the step that it holds gradients of."""

    rank: int | None
    holds: int | None


class InPlace:
    """The state in place of one worker, from generation to generation."""

    def __init__(self, subject: Subject, worker: Worker, transaction: Transaction) -> None:
        self._subject, self._worker, self._transaction = subject, worker, transaction
        self._place: Place | None = None
        self._gave_up = False  # in this generation

    # -- going there ---------------------------------------------------------------------------

    @property
    def has_stepped(self) -> bool:
        """Whether what was learnt since the last commit is one step in place."""
        return self._place is not None and self._place.has_stepped

    def _is_possible(self) -> bool:
        model, found = self._subject.model, list(self._subject.optimizers.values())
        if self._transaction.has_moving_extra:
            return False
        if self._gave_up or self._worker.world == 1 or len(found) != 1 or not can_place(found[0]):
            return False
        ddp = self._subject.ddp
        # Who comes takes from a peer, by the wrapper, what is not in place: buffers, and parameters that nobody trains.
        if model is None or ddp is None or ddp.parameters_to_ignore:
            return False
        return all(isinstance(value, torch.Tensor) for value in model.state_dict(keep_vars=True).values())

    def settle(self, images: Sequence[Paths], version: int, is_one_step: bool, leave: Callable[[], None]) -> None:
        """All ranks have written a copy of `version`: from the next step on it goes on in place, where that can be."""
        if not is_one_step or not self._is_possible():
            self._give_up()
            return
        if self._place is None:
            ((label, optimizer),) = self._subject.optimizers.items()
            self._place = Place(label, optimizer, self._subject.param_names(), images[self._worker.rank], leave)
        # All or nobody: who steps in place waits for the others to vote.
        if self._worker.exchange.number_with(self._place.settle(version)) < self._worker.world:
            self._give_up()
        else:
            self._place.connect(images)
            self._place.local.stepper = self._place

    def committed(self, version: int) -> None:
        assert self._place is not None, "a step was made in place"
        self._place.committed(version)

    def _give_up(self) -> None:
        self._gave_up = True
        if self._place is not None:
            self._place.void()
            self.drop()
            self._gave_up = True

    def drop(self) -> None:
        """The generation is over, and what it left has been taken."""
        if self._place is not None:
            self._place.close()
        self._place, self._gave_up = None, False

    # -- going on from there -------------------------------------------------------------------

    def look(self, formed: Formed) -> Found | None:
        """What the generation before has in place; None if copies are newer, or there is nothing."""
        heads = [read_bytes(paths.head, 0, HEAD_BYTES) for paths in formed.before]
        version = placed(heads)
        if version == VOID or copied(heads) >= version:
            return None
        return Found(version, tuple(one for head in heads if (one := Progress.of(head)) is not None))

    def stand(self, formed: Formed, number: int) -> Standing:
        """What worker `number`, this one, says of itself."""
        rank = formed.members_before.index(number) if number in formed.members_before else None
        return Standing(rank, None if self._place is None else self._place.holds)

    def finish(self, formed: Formed, found: Found, said: Sequence[Standing]) -> None:
        """Bring this worker's part of the files to the version that was begun. The others do theirs meanwhile."""
        holders = [one.rank if one.holds == found.version else None for one in said]
        for rank, who in assign(found.progress, found.version, holders).items():
            if who == formed.rank:
                assert self._place is not None, "who holds gradients has a place"
                Replay(formed.before[rank], self._place).run(found.version)

    def take(self, formed: Formed, found: Found, mine: Any) -> tuple[PlacedSource, Any, int]:
        """When everybody has finished: where the state is, what the first who was there says (`mine`), and its rank."""
        ((label, optimizer),) = self._subject.optimizers.items()
        assert isinstance(optimizer, ZeroRedundancyOptimizer), "its state is in place"
        groups = None if mine is None else self._transaction.groups(label)
        told = self._worker.exchange.all_objects(None if mine is None else (mine, groups))
        first = next((rank for rank, one in enumerate(told) if one is not None), None)
        if first is None:
            raise StateError(
                "no rank of the generation before is left. Its state is in memory, but where it was in the data is lost. "
                "Start again from the newest checkpoint (Checkpointer.restore)."
            )
        passing, groups = told[first]
        source = PlacedSource(formed.before, found.version, label, groups)
        self._transaction.read_options(source)
        self._transaction.read_params(source, label)
        return source, passing, first
