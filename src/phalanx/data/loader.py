"""`Worker.loader`: a DataLoader made data-parallel.

Owns where the run is in its epochs, what that saves and loads, and how much the batch in hand counts in the mean of the
gradients. Which batches there are is the source's business.
"""

from __future__ import annotations

import contextlib
import enum
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from numbers import Integral
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from ..checks import check_flags
from ..comm.failure.folding import users_stacklevel
from ..ddp import DistributedDataParallel
from ..ddp.structure import map_tensors
from ..errors import ArgumentTypeError, ConfigError, MismatchError, StateError
from .sources import Batch, Settings, Source, Stream, kind_of, source_of
from .values import Exchange

_ENDINGS = ("weight", "join", "drop")
_VERSION = 1


class _Loop(enum.Enum):
    """Where the `for` loop over a loader stands.

        NONE ──► RUNNING ──► NONE       an epoch from its first batch, or from a loaded state, to its end
                 RUNNING ──► LEFT       by break, return or an exception; the next loop is the next epoch
                 RUNNING ──► MOVED      the loop's body has loaded a state; the loop goes on from there, or if it is left
                                        after that, the next one does
    """

    NONE = enum.auto()
    RUNNING = enum.auto()
    MOVED = enum.auto()
    LEFT = enum.auto()


class Loader:
    """Iterates over this rank's part of an epoch, and knows where it is. Made by `Worker.loader`.

    Each `for` loop over it is one epoch, with an order of its own. After `load_state_dict` the first loop goes on where the
    saved run stood. A loop that is left early ends its epoch.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        exchange: Exchange,
        device: torch.device,
        model: nn.Module | None = None,
        count: Callable[[Any], Any] | None = None,
        uneven: str | None = None,
        split_batches: bool = False,
        sharded: bool = False,
    ) -> None:
        given: object = loader
        if not isinstance(given, DataLoader):
            remedy = "Wrap the dataset: DataLoader(dataset, batch_size=…, shuffle=True)"
            if isinstance(given, nn.Module):
                remedy = "The model comes second: worker.loader(loader, model)"
            raise ArgumentTypeError(f"loader takes a torch.utils.data.DataLoader, got {type(given).__name__}. {remedy}.")
        if uneven is not None and uneven not in _ENDINGS:
            raise ConfigError(f"uneven should be one of {', '.join(_ENDINGS)}, got {uneven!r}")
        check_flags(split_batches=split_batches, sharded=sharded)
        if count is not None and not callable(count):
            raise ArgumentTypeError(f"count is a function of a batch, which says how much it counts, got {count!r:.80}.")
        self._model = _wrapper(model)
        if self._model is None and (count is not None or uneven == "weight"):
            raise ConfigError(
                "count and uneven='weight' say how much a batch counts in the mean of a model's gradients. Pass the model "
                "as well."
            )
        self._exchange, self._device, self._count_of = exchange, device, count
        self._warns = uneven is None and self._model is None
        ending = uneven or ("join" if self._model is None else "weight")
        least = 2 if _takes_no_single(self._model) else 1
        self._given, self._settings, self._sharded = loader, Settings(ending, split_batches, least), sharded
        # First: ranks that mean to read in different ways would not even meet in the same collectives.
        self._check_same(loader, sharded)
        self._source: Source = source_of(loader, exchange, self._settings, sharded)
        self._generation = exchange.generation  # of the ranks that it deals to
        self._warn_of_ending()
        self.epoch = 0
        """The epoch under way, or the next one."""
        self.count: float = 0.0
        """How much the batch in hand counts on this rank: its samples, or what `count` says. 0 for a stand-in."""
        self._position = 0
        self._expected_digest = ""
        self._loop, self._num_loops = _Loop.NONE, 0
        self._handled: int | None = None
        self._is_ended = False  # all batches of the epoch are used, and the program has still to do what follows its loop
        self.after_batch: Callable[[], None] | None = None
        """Called when the loop's body has run, before the next batch is fetched; for whoever counts steps."""

    def __len__(self) -> int:
        """This rank's batches in a whole epoch."""
        return len(self._source)

    def __iter__(self) -> Iterator[Any]:
        if self._loop in (_Loop.RUNNING, _Loop.LEFT):
            self._go_to(self.epoch + 1)  # the loop before was left early
        if self._generation != self._exchange.generation:
            self._renew()
        self._loop, self._num_loops, self._handled = _Loop.RUNNING, self._num_loops + 1, _being_handled()
        mine = self._num_loops
        try:
            yield from self._rest_of(self.epoch, mine)
        except GeneratorExit:
            # An iterator that is thrown away later than the next loop begins has no say any more.
            if mine == self._num_loops:
                self._loop = _Loop.LEFT if self._loop is _Loop.RUNNING else _Loop.NONE
            raise
        self._loop = _Loop.NONE

    def _rest_of(self, epoch: int, mine: int) -> Iterator[Any]:
        """Batches until another epoch is the next one: at the end of this one, or of a state that was loaded meanwhile."""
        while self.epoch == epoch:
            expected, self._expected_digest = self._expected_digest, ""
            for batch in self._source.epoch(self.epoch, self._position, expected):
                self._position, self._is_ended = batch.position, False
                with self._counting(batch):
                    yield self._on_device(batch.value)
                self._require_only(mine)
                if self.after_batch is not None:
                    self.after_batch()
                if self._loop is _Loop.MOVED:
                    break
            if self._loop is not _Loop.MOVED:
                self._go_to(self.epoch + 1)
            # Otherwise the loop goes on with what is left there, unless that is of another epoch.
            self._loop = _Loop.RUNNING

    def _require_only(self, mine: int) -> None:
        """Refuse to go on with loop number `mine` if another has begun since: there is one place in the epoch for both."""
        if mine != self._num_loops:
            raise StateError(
                f"rank {self._exchange.rank}: a loop over this loader goes on after another one over it has begun, expected "
                "one at a time: each would take up what the other has left. Make a loader for each with worker.loader."
            )

    def go_on(self, state: Mapping[str, Any], in_loop: bool) -> None:
        """There are other ranks now: deal to those what is left after `state`. Every rank calls it.

        With `in_loop`, from `after_batch`, the loop under way goes on with that; else the next one does.
        """
        self._deal_anew()
        self.load_state_dict(state)
        self._loop = _Loop.MOVED if in_loop else _Loop.NONE

    def _renew(self) -> None:
        """There are other ranks now, and nobody has said where to go on: a loader for evaluation, say, which those who were
        there have looped over more often than who came. All go to where the one is who has come farthest."""
        farthest = max(self._exchange.all_objects((self.epoch, self._position, self._expected_digest)))
        self._deal_anew()
        self._go_to(*farthest)

    def _deal_anew(self) -> None:
        """To the ranks that there are now. Every rank calls it."""
        self._check_same(self._given, self._sharded)
        self._source = source_of(self._given, self._exchange, self._settings, self._sharded)
        self._generation = self._exchange.generation

    @property
    def any_world(self) -> bool:
        """Whether it can go on, in the middle of an epoch, on another number of ranks."""
        return self._source.any_world

    @property
    def is_under_way(self) -> bool:
        """Whether some loop over it has begun and not come to its end."""
        return self._loop in (_Loop.RUNNING, _Loop.MOVED)

    @property
    def is_at_beginning(self) -> bool:
        """Whether no batch of the epoch has been used."""
        return not self._position

    @property
    def is_at_end(self) -> bool:
        """Whether the batch in hand is the last one of its epoch."""
        # Of an order that was not drawn yet nobody knows the end; there is a batch in hand only after that.
        return bool(self._position) and not self._expected_digest and self._source.is_over(self._position)

    def set_epoch(self, epoch: int) -> None:
        """Go on with the beginning of `epoch`; for programs that count epochs themselves. Not needed otherwise."""
        if not _is_count(epoch):
            raise ConfigError(f"epoch must be the number of an epoch, 0 or more, got {epoch!r:.80}.")
        self._go_to(epoch)
        in_loop = self._loop in (_Loop.RUNNING, _Loop.MOVED)
        self._loop = _Loop.MOVED if in_loop else _Loop.NONE

    def _go_to(self, epoch: int, position: int = 0, digest: str = "") -> None:
        self.epoch, self._position, self._expected_digest, self._is_ended = epoch, position, digest, False

    def end_epoch(self, epoch: int) -> None:
        """`epoch` is over, though its loop may have been left early."""
        if self.epoch == epoch:
            self._go_to(epoch + 1)
            self._loop = _Loop.NONE

    def stay(self) -> None:
        """The loop was left by an error that the run goes on from: where it stood is where the run is."""
        self._loop = _Loop.NONE

    def end_state(self) -> dict[str, Any]:
        """As `state_dict`, for a program that has still to do what follows the loop over the epoch's batches: who goes on
        from there loops over no batch, and does that."""
        before, self._is_ended = self._is_ended, True
        try:
            return self.state_dict()
        finally:
            self._is_ended = before

    def state_dict(self) -> dict[str, Any]:
        """Where the run is: the same on every rank, so one saves it for all. The batch in hand counts as used.

        After a loop that was left early it is the next epoch; but while the exception that left it is being handled it is
        the place in the epoch: such a save is for a run that is to go on there.
        """
        epoch, position = self.epoch, self._position
        # An order that was not drawn yet is that of a loaded state, which had something left.
        is_over = position and not self._expected_digest and self._source.is_over(position)
        is_left = self._loop is _Loop.LEFT and _being_handled() == self._handled
        if not self._is_ended and (is_over or is_left):
            epoch, position = epoch + 1, 0
        ended = {"ended": True} if self._is_ended else {}
        return {
            "version": _VERSION,
            "unit": self._source.unit,
            "epoch": epoch,
            "position": position,
            "seed": self._source.seed,
            "seeds": list(self._source.seeds),
            "order": (self._expected_digest or self._source.digest) if position else "",
            "world": self._exchange.world,
            **({"steps": self._source.steps} if any(self._source.steps) else {}),
            **ended,
        }

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raise StateError if the place of `state` cannot be found here. Changes nothing."""
        if not isinstance(state, Mapping):
            raise StateError(f"this is no state of a loader: expected what state_dict() returned, got {state!r:.80}.")
        missing = {"version", "unit", "epoch", "position", "seed", "order", "world"} - set(state)
        if missing or state["version"] != _VERSION:
            raise StateError(f"this is no state of a loader of version {_VERSION}: it lacks {sorted(missing) or 'nothing'}")
        numbers = {name: state[name] for name in ("epoch", "position", "world")}
        seeds = state.get("seeds", [state["seed"]])
        has_seeds = isinstance(seeds, (list, tuple)) and bool(seeds) and all(map(_is_int, seeds))
        if not has_seeds or not all(map(_is_count, numbers.values())):
            raise StateError(f"the state of a loader is damaged: it has {numbers} and the seeds {seeds!r:.80}.")
        if state["unit"] != self._source.unit:
            raise StateError(
                f"the state counts {state['unit']}, this loader counts {self._source.unit}. Use the same kind of dataset "
                "and sampler as when it was saved."
            )
        if state["position"] and not self._source.any_world and state["world"] != self._exchange.world:
            raise StateError(
                f"a stream that was read on {state['world']} ranks stands in the middle of epoch {state['epoch']} and "
                f"cannot be taken up on {self._exchange.world}. Use as many ranks, or begin the next epoch with set_epoch."
            )
        steps = state.get("steps", self._source.steps)
        if state["position"] and steps != self._source.steps:
            raise StateError(
                f"the state stands {state['position']} steps into epoch {state['epoch']}, and another number of samples "
                f"into it here: [batch size, processes] of each rank were {steps!r:.80}, they are {self._source.steps}. Use "
                "the same batch_size and num_workers, or begin the next epoch with set_epoch."
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was saved: the next loop does, or the one whose body calls this, if that is of its epoch.

        Raises StateError, and changes nothing, if that place cannot be found here.
        """
        self.check_state_dict(state)
        # Other ranks have seeds of their own; only rank 0's is that of what is dealt out.
        saved = [int(seed) for seed in state.get("seeds", [state["seed"]])]
        self._source.seeds = saved if len(saved) == self._exchange.world else [saved[0], *self._source.seeds[1:]]
        self.set_epoch(int(state["epoch"]))
        self._go_to(int(state["epoch"]), int(state["position"]), str(state["order"]))
        self._is_ended = bool(state.get("ended"))

    def _on_device(self, value: Any) -> Any:
        if self._device.type == "cpu":
            return value
        # From pinned memory (pin_memory=True) the copy goes on while the host does.
        return map_tensors(value, lambda tensor: tensor.to(self._device, non_blocking=True))

    def _counting(self, batch: Batch) -> contextlib.AbstractContextManager[None]:
        """The weight of the batch in hand, for as long as the loop's body runs."""
        if batch.num_samples == 0:
            self.count = 0.0
        else:
            # Before the batch is on its device: reading a number there would wait for it.
            self.count = float(batch.num_samples) if self._count_of is None else _number(self._count_of(batch.value))
        if self._model is None:
            self._warn_of(batch)
            return contextlib.nullcontext()
        if batch.is_even and self._count_of is None and not self._source.steps_differ:
            return contextlib.nullcontext()  # all count the same; the plain mean is the same to the bit
        return self._model.weight(self.count)

    def _warn_of(self, batch: Batch) -> None:
        if not batch.is_even and self._warns and self._exchange.world > 1 and torch.is_grad_enabled():
            self._warns = False
            warnings.warn(
                f"rank {self._exchange.rank}: ranks hold unequally many samples in this step, and the loader does not know "
                "whose gradients they make. For training pass the model, worker.loader(loader, model), or uneven='drop'; "
                "for evaluation use torch.no_grad(), or uneven='join'.",
                stacklevel=users_stacklevel(),
            )

    def _warn_of_ending(self) -> None:
        """Say at once what an epoch would end with, or would not have at all or not anew: an epoch may take hours."""
        for hazard in (self._source.hazard(), self._source.staleness, self._source.bypass):
            if hazard and self._exchange.rank == 0:
                warnings.warn(f"rank 0: {hazard}", stacklevel=users_stacklevel())

    def _check_same(self, given: DataLoader[Any], sharded: bool) -> None:
        """Loaders that differ between ranks would deal out different samples, or end at different steps."""
        try:
            size = None if sharded else len(given.dataset)  # type: ignore[arg-type]  # a stream may have no length
        except TypeError:
            size = None
        mine = {
            "samples": size,
            # Data of each rank's own comes in batches of its own, and ends where it ends.
            "batch size": None if sharded else given.batch_size,
            "drop_last": None if sharded else bool(given.drop_last),
            # Each process of one that reads a stream deals out a part of it.
            "num_workers": max(1, given.num_workers) if kind_of(given, sharded) is Stream else None,
            "kind": kind_of(given, sharded).unit,
            # Rank 0's order is everybody's: what another rank asks for would have no effect.
            "sampler": None if sharded else type(given.sampler).__name__,
            "model": "given" if self._model is not None else "not given",
            "uneven": self._settings.ending,
            "split_batches": self._settings.split_batches,
            "count": "given" if self._count_of is not None else "not given",
        }
        found = self._exchange.all_objects(mine)
        for rank, other in enumerate(found):
            for name, value in other.items():
                if value != found[0][name]:
                    raise MismatchError(
                        f"rank {self._exchange.rank}: the loader of rank {rank} has {name} {value}, that of rank 0 "
                        f"{found[0][name]}. Give every rank the same dataset and settings, or, if each has data of its own, "
                        "pass sharded=True."
                    )


def _is_int(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_count(value: object) -> bool:
    return _is_int(value) and value >= 0  # type: ignore[operator]  # a number


def _number(counted: Any) -> float:
    """What `count` has returned. A text of digits would do for `float`, and is a mistake all the same."""
    try:
        if not isinstance(counted, str):
            return float(counted)
    except (TypeError, ValueError, RuntimeError):
        pass  # said below
    raise ArgumentTypeError(f"count(batch) must return one number, got {counted!r:.80}.")


def _being_handled() -> int | None:
    """Which exception the caller is handling, by its identity: kept itself, it would keep all its frames alive."""
    error = sys.exc_info()[1]
    return None if error is None else id(error)


def _takes_no_single(model: nn.Module | None) -> bool:
    """Whether some layer may refuse a batch of one sample in training. Whether it trains now is not looked at: that may
    differ between ranks when some of them come to others who are in an evaluation."""
    # Over images a batch of one has many values per channel; and SyncBatchNorm looks at the batches of all ranks.
    return model is not None and any(isinstance(layer, nn.BatchNorm1d) for layer in model.modules())


def _wrapper(model: nn.Module | None) -> DistributedDataParallel | None:
    """The wrapper that weighs gradients, also inside what torch.compile returned."""
    inner = getattr(model, "_orig_mod", model)
    if inner is None or isinstance(inner, DistributedDataParallel):
        return inner
    raise ArgumentTypeError(
        f"loader weighs the gradients of a phalanx.DistributedDataParallel, got {type(inner).__name__}. Wrap the model "
        "first."
    )
