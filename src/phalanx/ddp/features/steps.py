"""The steps that optimizers have made on a wrapper's parameters since its last backward: the same on all ranks.

A plain optimizer is stepped by each rank by itself. But that it is stepped, and by which options, can be seen by torch's own
hook of all optimizers. A rank that leaves a step out, makes one more, or makes one by gradients of `no_sync()` while the
others reduce theirs, comes to the next backward with another number; and so does one that makes a backward more, which
meets the next one of the others. One with another learning rate, by a schedule that goes by its own loss or by its own
number of batches, comes with other options. The first bucket's tail carries a number made of both (`settings`): what
differs is found out before the others apply anything more.

    number                               of steps since the last pass
    used                                 class, groups and options of the last step, and what it left out; these were applied
    now                                  its options when the next backward begins: they will be, and have not been yet

That ranks did not do the same is not yet a mistake. One may look for a learning rate and then load what it had saved; each
may step the parameters that it owns and send them to the others; all may train apart under `no_sync()` and take the mean of
their parameters. So if numbers differ, ranks compare their parameters, to the bit:

    parameters differ                    an error: the steps were not the same
    they are equal, only `now` differs   an error: the next step would not be, of optimizers of the same parameters
    they are equal otherwise             harmless: what each rank did by itself has been made good

Not counted:

    a step inside a step                 of sharded optimizers, which may run one of their own on some ranks only
    a step during backward               compared otherwise (`in_backward`, and ZeRO's own settings)
    a step with learning rates of 0      changes nothing: by one, checkpoints have an optimizer make its state

Must not know how an optimizer steps.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ...comm.untraced import untraced
from ...optim.engine import current_backward
from ...optim.options import comparable, own_options
from .drift import digests

if TYPE_CHECKING:
    from ..module import DistributedDataParallel

_RANKS_OWN = ("rank", "device", "seed")  # in the name of an option that is meant to differ
_MOST_NAMES = 4  # of parameters, in words
_MOST_GROUPS = 64  # of an optimizer, spread over all: one with a group per parameter is not read through in every step

Values = tuple[tuple[Any, ...], ...]
"""The values of options, per group."""


@dataclass(frozen=True, slots=True)
class _Part:
    """What an optimizer has of one wrapper; found once, not in every step. Of one that compares itself, its name only."""

    of: weakref.ref[torch.optim.Optimizer]
    optimizer: str
    left_out: str  # in words, what of the wrapper's parameters it does not have
    options: tuple[str, ...]
    numbers: tuple[int, ...]  # of the groups that have parameters of the wrapper
    divided: tuple[str, ...] = ()  # in words, which ones each of these has; a checksum tells those that are not named


class _Step:
    """One step of an optimizer. Its groups are held until the next pass: ranks free an optimizer at different moments."""

    __slots__ = ("groups", "part", "used")

    def __init__(self, part: _Part, optimizer: torch.optim.Optimizer) -> None:
        self.part = part
        self.groups = [optimizer.param_groups[number] for number in part.numbers]
        self.used = _read(self.groups, part.options)

    @property
    def values(self) -> tuple[str, str, tuple[str, ...], tuple[str, ...], Values, Values]:
        """All that ranks have in common, with the options as they are now. Not the groups' numbers: one rank may have
        others before them, of parameters that are its own."""
        part = self.part
        return part.optimizer, part.left_out, part.divided, part.options, self.used, _read(self.groups, part.options)


_AS_THEY_ARE = frozenset({bool, int, float, complex, type(None)})


def _read(groups: Sequence[dict[str, Any]], options: Sequence[str]) -> Values:
    # Twice in every step: a line of Python per value would be felt by models whose steps take a millisecond.
    rows = [tuple(map(group.get, options)) for group in groups]
    return tuple([row if _AS_THEY_ARE.issuperset(map(type, row)) else tuple(map(_number, row)) for row in rows])


def _in_words(names: Sequence[str]) -> str:
    rest = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + rest or "none"


def _number(value: Any) -> Any:
    # Of anybody's optimizer it is not known what a text is for: it may name a rank's own device or file.
    return "a text" if isinstance(value, str) else comparable(value)


class StepCount:
    """The steps on one wrapper's parameters (`settings.Teller`)."""

    params: frozenset[int] = frozenset()  # as a teller: it takes the place of no optimizer's settings

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = weakref.ref(ddp)  # whose reducer keeps this, and its parameters, so that their ids stay theirs
        self._names = {id(param): name for name, param in ddp._trained}
        self._group: Any = None
        self._were_uneven = False  # whether ranks may have made other steps before the last pass
        self._steps: list[_Step] = []  # since the last pass
        self._num_before = 0  # of all steps, those before the last pass
        self._told = 0
        self._last: tuple[Any, ...] = ()  # the values of the last step before the last pass
        self._told_step: _Step | None = None  # of which `_last` was made, if it is new
        self._numbered: tuple[tuple[Any, ...], int] = ((), 0)  # what was told last, and the number made of it
        _counts.add(self)
        _known.clear()
        _watch_steps()

    @property
    def num_steps(self) -> int:
        """Of all passes together."""
        return self._num_before + len(self._steps)

    def part_of(self, optimizer: torch.optim.Optimizer) -> _Part | None:
        """What it has of the wrapper, if anything."""
        numbered = [(n, id(param)) for n, group in enumerate(optimizer.param_groups) for param in group["params"]]
        groups = sorted({n for n, one in numbered if one in self._names})
        if not groups:
            return None
        kind = type(optimizer).__name__
        if optimizer in _compare_themselves:
            return _Part(weakref.ref(optimizer), kind, "", (), ())
        there = {one for _, one in numbered}
        left_out = _in_words([name for one, name in self._names.items() if one not in there])
        options = tuple(name for name in own_options(optimizer) if not any(word in name for word in _RANKS_OWN))
        numbers = tuple(groups[:: -(-len(groups) // _MOST_GROUPS)])
        members: dict[int, list[str]] = {number: [] for number in numbers}
        for number, one in numbered:
            if number in members and one in self._names:
                members[number].append(self._names[one])
        divided = tuple(f"{_in_words(names)} ({zlib.crc32(repr(names).encode()):x})" for names in members.values())
        return _Part(weakref.ref(optimizer), kind, left_out, options, numbers, divided)

    def stepped(self, before: int, step: _Step) -> None:
        """A step has ended, at whose begin there were `before`: steps inside of it, if there were any, are part of it."""
        del self._steps[max(0, before - self._num_before) :]
        self._steps.append(step)

    def loaded(self, optimizer: torch.optim.Optimizer) -> None:
        """It has loaded a state, by which it has other groups: the next step is made by these."""
        for step in (*self._steps, self._told_step):
            if step is not None and step.part.of() is optimizer:
                step.groups = [optimizer.param_groups[number] for number in step.part.numbers]

    def prepare(self, joined: bool) -> None:
        """Nothing is exchanged before a pass."""

    def tell(self) -> int:
        """A number made of the steps since the last pass, if they must be the same on all ranks; else 0."""
        steps, self._steps = self._steps, []
        self._told, self._num_before = len(steps), self._num_before + len(steps)
        if steps:
            self._told_step = steps[-1]
        if self._told_step is not None:
            # Anew also where it was told in a pass that failed: options may have changed since, on every rank alike, and
            # another rank may not have come to telling it before.
            self._last = self._told_step.values
        ddp = self._ddp()
        # A rank that has joined makes no steps; with a hook, ranks may be meant to train apart for a while (local SGD).
        is_uneven = ddp is None or ddp._join_config.enable or ddp.reducer.strategy.name is not None
        if ddp is not None and ddp.process_group is not self._group:
            # Members of another group may have come from elsewhere. Of the first one, all begin at nought.
            self._were_uneven |= self._group is not None
            self._group = ddp.process_group
        if is_uneven or self._were_uneven:
            self._told, self._last = 0, ()
        self._were_uneven = is_uneven
        told = (self._told, *self._last)
        if told != self._numbered[0]:
            self._numbered = told, zlib.crc32(repr(told).encode())
        return self._numbered[1]

    def settings(self) -> dict[str, str]:
        """What was told last, in words."""
        words = {"number of optimizer steps since the last averaged backward": str(self._told)}
        if not self._last:
            return words
        optimizer, left_out, divided, options, used, now = self._last
        words |= {"optimizer of the last step": optimizer, "parameters that it has not": left_out}
        words |= {f"parameters of group {number}": names for number, names in enumerate(divided)}
        for when, values in (("", now), (" in the last step, which has been applied", used)):
            for number, group in enumerate(values):
                words |= {f"{o} of group {number}{when}": repr(v) for o, v in zip(options, group, strict=True)}
        return words

    def evidence(self) -> dict[str, str]:
        """What shows whether it matters that ranks have told other things."""
        ddp = self._ddp()
        params = [] if ddp is None else [param for _, param in ddp._trained]
        groups = [] if self._told_step is None else self._told_step.groups
        stepped = {id(param) for group in groups for param in group["params"]}
        return {
            "parameters": repr(digests(params).tolist() if params else []),
            "used": repr((self._last[:-1], [number for number, param in enumerate(params) if id(param) in stepped])),
            "now": repr(self._last[-1:]),
        }

    def is_harmless(self, evidence: Sequence[Mapping[str, str]]) -> bool:
        """Whether what ranks did by themselves has been made good, and they are not about to do something else."""

        def are_equal(what: str) -> bool:
            return len({said[what] for said in evidence}) == 1

        if not are_equal("parameters") or (are_equal("used") and not are_equal("now")):
            return False
        self._last = ()  # it stays another one until the next step
        return True

    def all_have(self, told: int) -> None:
        """The step that was told is held no longer."""
        self._told_step = None


@dataclass(slots=True)
class _Stepped:
    """An optimizer: how many parameters it has, those who count its steps and what it has of each, and what each had
    counted when one began."""

    num_params: int
    counts: tuple[tuple[weakref.ref[StepCount], _Part], ...]
    before: list[int]


_counts: weakref.WeakSet[StepCount] = weakref.WeakSet()
# Found once per optimizer, not in every step.
_known: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Stepped] = weakref.WeakKeyDictionary()
# Those that say when they have loaded a state.
_say_loaded: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
_compare_themselves: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def compares_itself(optimizer: torch.optim.Optimizer) -> None:
    """Of this one only the number of steps is told: its ranks compare its options by other ways, and sooner."""
    _compare_themselves.add(optimizer)
    _known.pop(optimizer, None)


@cache
def _watch_steps() -> None:
    """From now on hear of every optimizer's steps in this process."""
    register_optimizer_step_pre_hook(_begins)
    register_optimizer_step_post_hook(_ended)


@untraced
def _begins(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    num_params = sum([len(group["params"]) for group in optimizer.param_groups])
    known = _known.get(optimizer)
    if known is None or known.num_params != num_params:
        found = tuple((weakref.ref(count), part) for count in _counts if (part := count.part_of(optimizer)) is not None)
        known = _known[optimizer] = _Stepped(num_params, found, [])
        if optimizer not in _say_loaded:
            _say_loaded.add(optimizer)
            optimizer.register_load_state_dict_post_hook(_loaded)
    known.before = [0 if (count := one()) is None else count.num_steps for one, _ in known.counts]


@untraced
def _ended(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    known = _known.get(optimizer)
    if known is None or current_backward() != -1 or all(_is_nought(group.get("lr")) for group in optimizer.param_groups):
        return
    for (one, part), before in zip(known.counts, known.before, strict=True):
        if (count := one()) is not None:
            count.stepped(before, _Step(part, optimizer))


@untraced
def _loaded(optimizer: torch.optim.Optimizer) -> None:
    for count in _counts:
        count.loaded(optimizer)


def _is_nought(rate: Any) -> bool:
    return isinstance(rate, (int, float)) and rate == 0  # of a tensor nobody asks: it may be on a device
