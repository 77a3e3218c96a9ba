"""The options of an optimizer that all ranks must have in common, and when they are compared.

    made, or given a group      all of it, with class, groups and parameters: by an agreement, before anything is divided
    in each backward            what may change, as a few bits in the tail of the wrapper that reduces the parameters
    in `step`                   a number made of it, as a vote: nothing is updated before all ranks have cast the same. With
                                a closure, and on a device: by an agreement, only if something has changed since it was last
                                known to be equal, or the wrapper has reduced nothing since the last step
    under join                  before both, ranks that have joined take over what the others have (`join.FollowedOptions`)

A rank that changed something alone, or that does something else while the others step, is found out before any rank has
applied the step; where nobody votes, by the agreement to which the others do not come.
Must not know of partitions.
"""

from __future__ import annotations

import inspect
import math
import weakref
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..comm.collectives import Collectives
from ..comm.crossed import refuse_crossed
from ..comm.failure.agreement import agreeing_on
from ..comm.memory.copies import as_memory
from ..ddp.features.drift import gather_digests
from ..ddp.features.settings import carry
from ..ddp.features.steps import compares_itself
from ..ddp.module import DistributedDataParallel
from ..ddp.wrappers import known_wrappers, listen
from ..errors import MismatchError
from ..optim.options import comparable, own_options
from .gradient_vote import GradientVote
from .join import Attendance, FollowedOptions

_OCCASION = "the settings of ZeroRedundancyOptimizer"
_UNREDUCED = "step() without a backward that was reduced since the last step()"
_VOTE_BITS = 24  # the square of such a number, summed over ranks, is exact in double precision

Values = tuple[Any, ...]

# How many steps the optimizers of a group have made. Gathers of two optimizers of the same shapes look alike, so that one
# that is stepped in place of the other mixes up their parameters without a word; its place among all steps tells.
_num_steps: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class _Vote:
    """What this rank says of the step that it is about to make."""

    occasion: str
    where: str  # in words, for who waits there for others
    gradients: int  # a number made of some (`gradient_vote`)


class CommonSettings:
    """What one optimizer's ranks must have in common. Held by wrappers too, so it knows the optimizer weakly only."""

    def __init__(self, optimizer: torch.optim.Optimizer, collectives: Collectives) -> None:
        # Weak, but for the options: until another optimizer takes its parameters, a wrapper tells those of one that was
        # dropped, as they were then. When the memory is freed differs between ranks.
        self._optimizer = weakref.ref(optimizer)
        self._groups = optimizer.param_groups
        self._keys: tuple[str, ...] = ()
        self._collectives = collectives
        self._name_of: dict[int, str] = {}  # by id of the parameter, once a wrapper knows
        self._names: tuple[str, ...] = ()  # in the order of the parameters
        self._reduced: list[torch.Tensor] = []  # those of which a wrapper knows
        # By the numbers that wrappers have on every rank: two of one shape have parameters of the same names.
        self._wrapper_of: dict[int, int] = {}
        self._wrappers: tuple[int, ...] = ()
        self._clip: tuple[float, float, bool] | None = None
        self._num_clips = 0
        self._steps = (0, 0)  # how many were made, and the place of the last one among those of all optimizers of the group
        self._num_loads = 0
        self._loaded = "none"
        self._values: Values = ()
        self._told: Values = ()
        self._numbered: tuple[Values, int] = ((), 0)  # the values told last, and the number made of them
        self._equal: Values | None = None  # what was last known to be equal on all ranks
        self._rides_in_tail = False  # whether a wrapper tells it
        self._is_reduced = False  # whether one has reduced gradients since the last step
        self._used: Values = ()  # what the last update was made by, where backward steps
        self._vote: _Vote | None = None  # of the step under way, until its update begins
        self._votes = _params(optimizer)[0].device.type == "cpu"  # on a device the host would have to wait for the result
        self.params = frozenset(map(id, _params(optimizer)))
        self._followed = FollowedOptions(collectives, _params(optimizer)[0].device)
        self._attendance = Attendance.ALL
        self._gradients = GradientVote(collectives)
        compares_itself(optimizer)
        for wrapper in known_wrappers()[::-1]:
            self.consider(wrapper)
        listen(self)

    # -- when made -----------------------------------------------------------------------------

    def agree_on_all(self, fixed: Mapping[str, str]) -> None:
        """Compare everything, `fixed` included. Every rank calls it; nothing has been divided yet."""
        optimizer = self._optimizer()
        assert optimizer is not None, "called by the optimizer"
        self.params = frozenset(map(id, _params(optimizer)))
        self._name_params(optimizer)
        self._keys = tuple(sorted({*own_options(optimizer), *_options_of_groups(optimizer)}))
        self._read()
        groups = {f"size of group {n}": str(len(group["params"])) for n, group in enumerate(optimizer.param_groups)}
        params = _in_order(optimizer, self._names)
        refuse_crossed(self._collectives, "a ZeroRedundancyOptimizer")
        self._collectives.agree(_OCCASION, {**fixed, **groups, **params, **self.settings()})
        self._equal = self._values
        if not self._names and self._collectives.world > 1:
            _refuse_permuted(_params(optimizer), self._collectives)

    def know_options(self) -> None:
        """From now on the optimizer knows all options of its class, and what they are where none were given."""
        optimizer = self._optimizer()
        assert optimizer is not None, "called by the optimizer"
        self._keys = own_options(optimizer)
        self._equal = None  # so that the first step compares these as well
        self._read()

    # -- before a step -------------------------------------------------------------------------

    def check(self, joined: bool, uses_means: bool = True, votes: bool = False) -> None:
        """Before a step: raise on every rank if settings differ, here or, with `votes`, in `await_others`, which follows.

        With `uses_means` it is a step by `.grad`. Where a wrapper reduces the parameters and has not since the last step, it
        may be one that this rank makes alone: once more than the others, or by gradients of `no_sync()`.
        """
        if self._collectives.world == 1:
            return
        self._vote = None  # of a step that was refused before its update began
        self.prepare(joined)
        self._read()
        is_alone = self._attendance is Attendance.ALL and uses_means and self._rides_in_tail and not self._is_reduced
        # In the occasion itself, which is what is said of a rank that others meet elsewhere.
        occasion = f"{_OCCASION}, at a {_UNREDUCED}" if is_alone else _OCCASION
        changed = "" if self._values == self._equal else f"changed here: {self._changed(self._equal or ())}"
        if votes and self._votes and self._attendance is Attendance.ALL:
            gradients = self._gradients.number(self._reduced, self._steps[0]) if uses_means and not is_alone else 0
            self._vote = _Vote(occasion, agreeing_on(occasion, changed), gradients)
        elif changed or is_alone:
            self._collectives.agree(occasion, self.settings(), changed)
            self._equal = self._values

    def await_others(self) -> None:
        """Before the first parameter is changed: return when every rank makes the same step, by the same settings."""
        vote, self._vote = self._vote, None
        if vote is None:
            return
        numbers = [float(number & (1 << _VOTE_BITS) - 1) for number in (self._number(vote.occasion), vote.gradients)]
        # Summed over the ranks, these are `world` times one's own exactly if all have said the same.
        mine = [power for number in numbers for power in (number, number * number)]
        sums = torch.tensor(mine, dtype=torch.float64, device="cpu")
        # By its name: whoever finds the others elsewhere is to say what it is at, not how many numbers it sends.
        self._collectives.comes_to(vote.occasion)
        self._collectives.all_reduce_now(sums, vote.where)
        differs = [total != self._collectives.world * number for total, number in zip(sums.tolist(), mine, strict=True)]
        if any(differs[:2]):
            self._collectives.agree(_OCCASION, {**self.settings(), "step": vote.occasion})  # which names what differs
        self._equal = self._values
        if any(differs):
            self._gradients.differ(self._reduced, self._name_of)

    def _changed(self, earlier: Values) -> str:
        before, now = self._in_words(earlier), self._in_words(self._values)
        changed = [f"{name} from {before[name]} to {now[name]}" for name in now if before.get(name, now[name]) != now[name]]
        return "; ".join(changed[:3])

    # -- where backward steps ------------------------------------------------------------------

    def updated(self) -> None:
        """A backward has made an update. What is changed from now on is for the next."""
        self._read()
        self._used = self._values

    def changed_since_update(self) -> str:
        """What has been changed since, in words, if anything has."""
        self._read()
        return self._changed(self._used)

    def stepped(self) -> None:
        """A step begins, whose update is not part of a backward. Every rank makes it, those that have joined as well."""
        group = self._collectives.group
        _num_steps[group] = _num_steps.get(group, 0) + 1
        self._steps = (self._steps[0] + 1, _num_steps[group])
        self._is_reduced = False

    def clipped(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> None:
        """Gradients have been clipped, each rank its own or all together."""
        self._clip = (float(max_norm), float(norm_type), bool(error_if_nonfinite))
        self._num_clips += 1

    def loaded(self, states: Sequence[Any]) -> None:
        """A whole state has been loaded, which every rank does by itself. One per parameter, in the optimizer's order.

        Not by parameter: ranks may still have other values in them, and writing those out takes longer than loading.
        """
        self._num_loads += 1
        self._loaded = f"{self._num_loads}, the last with checksum {_checksum(states)}"

    # -- in backward (`ddp.features.settings.Teller`) ------------------------------------------

    def prepare(self, joined: bool) -> None:
        """Under join, ranks that have `joined` take over the options of the others."""
        optimizer = self._optimizer()
        config = getattr(optimizer, "_join_config", None)
        if config is not None:
            # As it was when the optimizer was dropped, else: it is a collective, and memory is freed at other moments
            # on other ranks.
            with_inputs = Attendance.JOINED if joined else Attendance.TRAINING
            self._attendance = with_inputs if config.enable else Attendance.ALL
        if self._attendance is not Attendance.ALL:
            self._followed.exchange(self._current_groups(), self._keys, joined)

    def agree_on_due(self, due: list[bool]) -> list[bool]:
        """Which buckets of parameters travel in the step under way, the same on all ranks: where ranks have joined, what
        those that train say. One that trains may have frozen parameters since, or kept a gradient of frozen ones.
        """
        if self._attendance is Attendance.ALL or self._collectives.world == 1:
            return due
        return self._followed.any_of(due, self._attendance is Attendance.JOINED)

    def tell(self) -> int:
        """A number made of the settings as they are now."""
        self._read()
        self._told = self._values
        return self._number()

    def _number(self, occasion: str = "") -> int:
        if self._values != self._numbered[0]:
            self._numbered = (self._values, zlib.crc32(repr(self._values).encode()))
        # What was done besides: a rank that did not clip has the limits of its last clip, as the others do.
        done = (self._numbered[1], self._num_clips, *self._steps)
        return zlib.crc32(b"%d %d %d %d" % done + occasion.encode())

    def all_have(self, told: int) -> None:
        """All ranks have told the same."""
        self._equal = self._told
        self._is_reduced = True

    def settings(self) -> dict[str, str]:
        """The settings read last, in words."""
        made, last = self._steps
        done = f"{made}, the last one as number {last} of all on this group" if made else "0"
        told = {"number of clip_grad_norm_ calls": str(self._num_clips), "number of step() calls": done}
        return {**self._in_words(self._values), **told}

    # -- parts ---------------------------------------------------------------------------------

    def concerns(self, wrapper: DistributedDataParallel) -> bool:
        """Whether the wrapper reduces parameters of the optimizer, on its group."""
        if wrapper.process_group is not self._collectives.group or self._collectives.world == 1:
            return False
        return any(id(param) in self.params for param in wrapper.reducer.params)

    def consider(self, wrapper: DistributedDataParallel) -> None:
        """Tell settings in the tails of `wrapper` if it reduces parameters of the optimizer."""
        if not self.concerns(wrapper):
            return
        reducer = wrapper.reducer
        self._gradients.add(reducer)
        self._name_of |= {id(p): spec.name for p, spec in zip(reducer.params, reducer.plan.specs, strict=True)}
        self._wrapper_of |= dict.fromkeys(map(id, reducer.params), reducer.number)
        optimizer = self._optimizer()
        if optimizer is not None:
            self._name_params(optimizer)
        carry(reducer, self)
        self._rides_in_tail = True

    def _name_params(self, optimizer: torch.optim.Optimizer) -> None:
        if self._name_of:
            self._reduced = [param for param in _params(optimizer) if id(param) in self._name_of]
            self._names = tuple(self._name_of.get(id(param), "?") for param in _params(optimizer))
            self._wrappers = tuple(sorted({self._wrapper_of.get(id(param), 0) for param in _params(optimizer)}))

    def _current_groups(self) -> list[dict[str, Any]]:
        optimizer = self._optimizer()
        if optimizer is not None:
            self._groups = optimizer.param_groups  # others, where a state has been loaded
        return self._groups

    def _read(self) -> None:
        """Read the options as they are now."""
        options = tuple(tuple([comparable(group.get(key)) for key in self._keys]) for group in self._current_groups())
        self._values = (self._keys, options, self._clip, self._loaded, self._names, self._wrappers)

    def _in_words(self, values: Values) -> dict[str, str]:
        if not values:
            return {}
        keys, options, clip, loaded, names, wrappers = values
        words = {
            f"{key} of group {number}": repr(value)
            for number, group in enumerate(options)
            for key, value in zip(keys, group, strict=True)
        }
        limits = "none" if clip is None else "max_norm={}, norm_type={}, error_if_nonfinite={}".format(*clip)
        words["limits of clip_grad_norm_"] = limits
        words["loaded states"] = loaded
        if wrappers:
            words["wrapper"] = f"number {', '.join(map(str, wrappers))} of this group"
        return words | {f"parameter {number}": f"'{name}'" for number, name in enumerate(names)}


def _params(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _options_of_groups(optimizer: torch.optim.Optimizer) -> set[str]:
    """Options of the class that groups have of their own. While the optimizer is made, its defaults are what was given."""
    known = set(inspect.signature(getattr(optimizer, "optimizer_class", type(optimizer))).parameters)
    return known.intersection(key for group in optimizer.param_groups for key in group) - {"params"}


def _in_order(optimizer: torch.optim.Optimizer, names: Sequence[str]) -> dict[str, str]:
    words = {}
    for number, param in enumerate(_params(optimizer)):
        name = f"'{names[number]}', " if names else ""
        # Buckets are made apart of those that are frozen; who freezes one later leaves them as they are.
        frozen = "" if param.requires_grad else ", frozen"
        dtype = str(param.dtype).removeprefix("torch.")
        words[f"parameter {number} "] = f"{name}shape {list(param.shape)}, {dtype}{frozen}"
    return words


def _refuse_permuted(params: Sequence[torch.Tensor], collectives: Collectives) -> None:
    """Of parameters without names and of the same shape, only their values tell that a rank has them in another order.

    Ranks may still have other values, which a wrapper, or whoever loads a checkpoint, makes equal later. So only those
    count that are all there on every rank, each in another place.
    """
    if any(param.is_meta for param in params):
        return
    first, *others = gather_digests(params, collectives, "comparing the order of parameters").tolist()
    for number, row in zip(collectives.ranks.numbers[1:], others, strict=True):
        if row != first and sorted(row) == sorted(first):
            place = next(n for n, value in enumerate(row) if value != first[n])
            theirs, usual = first.index(row[place]), collectives.ranks.numbers[0]
            raise MismatchError(
                f"{collectives.me}: the parameters of ZeroRedundancyOptimizer are in another order on rank {number}: its "
                f"parameter {place} has the values of parameter {theirs} of rank {usual}. Give all ranks the same order."
            )


def _checksum(state: Any) -> str:
    """A few digits by which two states differ, as good as surely. Rounded: hosts of different kinds add up differently."""
    total = 0.0
    for number, tensor in enumerate(_tensors(state), start=1):
        total += number * float(as_memory(tensor.detach()).sum(dtype=torch.float64))
    return f"{total:.6g}" if math.isfinite(total) else "not finite"


def _tensors(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        # Of a state that every rank has in parts (a subclass) no rank can add up the whole.
        return [tree] if type(tree) is torch.Tensor and not tree.is_sparse else []
    if isinstance(tree, Mapping):
        return [tensor for key in sorted(tree, key=str) for tensor in _tensors(tree[key])]
    if isinstance(tree, (list, tuple)):
        return [tensor for part in tree for tensor in _tensors(part)]
    return []
