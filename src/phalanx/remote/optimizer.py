"""DistributedOptimizer: one optimizer over parameters that live on remote workers.

Orchestrates; the parts are elsewhere: placement.py sorts parameters by owner, fanout.py asks the
owners, owned.py does the work there, groups.py and state.py keep the two ends in step.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import Tensor
from torch.optim import Optimizer

from phalanx.errors import ArgumentTypeError, ConfigError, RemoteError, StateError
from phalanx.remote import fanout
from phalanx.remote.failures import failure_of, step_failure
from phalanx.remote.fanout import Answers, Owner, Pending
from phalanx.remote.groups import Changes, Ledger, Options, PerOwner, agree, merge
from phalanx.remote.placement import Group, Share, parse, parse_group, place
from phalanx.remote.state import Part, StateDict, join, split


class OwnerTiming(NamedTuple):
    """How one owner spent a step: waiting for other updates, updating, and how many parameters."""

    waited_s: float
    update_s: float
    num_updated: int


class DistributedOptimizer(Optimizer):
    """Applies `optimizer_class` on every worker that owns some of the parameters in `params_rref`.

    `params_rref` is a list of RRefs, or of group dicts whose "params" are RRefs. `args` and `kwargs`
    go to the optimizer on each owner. Gradients come from a distributed autograd context; updates are
    serialised on each owner whichever caller asks for them, and owners run in parallel.

    `param_groups` are ordinary dicts. Options written to them, by hand or by a scheduler, travel with
    the next call; options that the optimizer changes by itself come back with its answer.

    Every failing owner is named in one error, in its own words. When construction fails, no owner is
    left with an optimizer. After a failed step, `StepFailed` tells where it was applied.
    """

    param_groups: list[dict[str, Any]]

    def __init__(self, optimizer_class: Callable[..., Optimizer], params_rref: Any, *args: Any, **kwargs: Any) -> None:
        if not callable(optimizer_class):
            raise ArgumentTypeError(f"optimizer_class is a {type(optimizer_class).__name__}; expected an optimizer class.")
        groups = parse(params_rref)
        self._make = (optimizer_class, args, kwargs)
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._num_accumulated = 0
        self._closed = False
        # The options of which every owner is known to have been told; None: ask each owner's own ledger.
        self._told: Ledger | None = None
        self._owners: list[Owner] = []
        owners, defaults = self._create(place(groups))
        self._owners = owners
        held = [self._mirror(number, group) for number, group in enumerate(groups)]
        # The base class is set up as after unpickling: its constructor wants tensors of this process.
        self.__setstate__({"defaults": dict(defaults), "param_groups": held})

    @property
    def owners(self) -> tuple[str, ...]:
        """The names of the workers that hold parameters of this optimizer."""
        return tuple(owner.name for owner in self._owners)

    @property
    def state(self) -> Any:  # type: ignore[override]
        """Refused: the state lives on the owners."""
        raise StateError("the state lives on the owners; state_dict() gathers a copy of it.")

    def step(  # type: ignore[override]
        self, context_id: int | None = None, *, timeout_s: float | None = None
    ) -> dict[str, OwnerTiming]:
        """Apply the context's gradients, plus accumulated ones, once on every owner.

        Returns each owner's timing. Within `timeout_s` (default: RPC's own limit) either every owner
        has answered, or StepFailed names those that failed and those that did not answer. An owner never
        begins a step after its time limit.
        """
        if context_id is None and not self._num_accumulated:
            raise ConfigError("step() needs a context, or gradients put aside by accumulate(context_id).")
        self._check_context(context_id)
        limit_s = _limit(timeout_s)
        number = next(self._numbers)
        deadline = time.monotonic() + limit_s
        answers = self._ask(
            lambda owner, changes: fanout.launch_step(owner, number, context_id, deadline, changes, timeout_s),
            timeout_s,
        )
        if answers.failures:
            raise step_failure(number, len(self._owners), answers.failures, list(answers.results))
        self._num_accumulated = 0
        timings: dict[str, OwnerTiming] = {}
        for owner in self._owners:
            waited_s, update_s, num_updated, clock = answers.results[owner.name]
            owner.note_clock(clock)
            timings[owner.name] = OwnerTiming(waited_s, update_s, num_updated)
        return timings

    def applied_on(self, step: int, *, timeout_s: float | None = None) -> dict[str, bool | None]:
        """Ask every owner whether it has applied `step`, a number from StepFailed; None: no answer."""
        answers = self._ask(
            lambda owner, changes: fanout.launch(owner, "has_applied", (step,), changes, timeout_s), timeout_s
        )
        return {name: answers.results.get(name) for name in self.owners}

    def accumulate(self, context_id: int) -> None:
        """Keep the context's gradients on the owners and add them to those the next step applies.

        A context counts once, even if it is given to `step` as well.
        """
        self._check_context(context_id)
        self._demand("accumulate gradients", "accumulate", lambda owner: (context_id,))
        self._num_accumulated += 1

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop accumulated gradients, and reset `.grad` of the parameters on their owners."""
        self._demand("zero gradients", "zero_grad", lambda owner: (set_to_none,))
        self._num_accumulated = 0

    def clip_grad_norm_(
        self,
        context_id: int | None,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
    ) -> Tensor:
        """Scale the gradients that `step(context_id)` would apply to a total norm of `max_norm`.

        The same number as torch.nn.utils.clip_grad_norm_ over all parameters in one process, bit for
        bit, and returned as there. Gradients are changed in place in the context.
        """
        self._check_context(context_id)
        measured = self._demand("measure gradients", "norms", lambda owner: (context_id, float(norm_type)))
        norms: dict[int, Tensor] = {}
        for owner in self._owners:
            numbers, found = measured[owner.name]
            positions = owner.part.flat()
            norms.update({positions[number]: norm for number, norm in zip(numbers, found, strict=True)})
        # In the order of the parameters: a sum of floats depends on its order.
        total = (
            torch.linalg.vector_norm(torch.stack([norms[at].cpu() for at in sorted(norms)]), norm_type)
            if norms
            else torch.tensor(0.0)
        )
        if error_if_nonfinite and not math.isfinite(total):
            raise RemoteError(f"the gradients' total norm of order {norm_type} is {total.item()}; they were not scaled.")
        coefficient = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        if coefficient != 1.0:
            self._demand("scale gradients", "scale", lambda owner: (context_id, coefficient))
        return total

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of RRefs, on the owners known so far or on new ones. All owners or none."""
        self._usable()
        group = parse_group(param_group)
        number = len(self.param_groups)
        shares = place([group], number, sum(self._sizes()))
        known = {owner.info.id: owner for owner in self._owners}
        old = [share for share in shares if share.info.id in known]
        created, _ = self._create([share for share in shares if share.info.id not in known])
        pendings = [fanout.launch(known[share.info.id], "add_group", (share.specs[0],), None) for share in old]
        answers = fanout.collect(pendings)
        if answers.failures:
            undone = [
                fanout.launch(known_owner, "drop_group", (), None)
                for known_owner in self._owners
                if known_owner.name in answers.results
            ]
            fanout.collect(undone)
            self._abandon(created)
            raise failure_of("add_param_group", len(shares), answers.failures)
        for share in old:
            owner = known[share.info.id]
            owner.part.groups.append(number)
            owner.part.positions.append(share.specs[0].positions)
            owner.ledger.append(answers.results[owner.name])
        self._owners += created
        self._told = None
        self.param_groups.append(self._mirror(number, group))

    def state_dict(self) -> StateDict:
        """A copy of the whole state on this worker, in the plain optimizer's format."""
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        saved = self._demand("save the state", "save", lambda owner: ())
        whole = join([owner.part for owner in self._owners], [saved[name] for name in self.owners], self._sizes())
        for after in self._optimizer_state_dict_post_hooks.values():
            whole = after(self, whole) or whole
        return whole

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Restore a whole state. One that does not fit is refused, and every owner's state is untouched."""
        self._usable()
        state_dict = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        cut = split(state_dict, [owner.part for owner in self._owners], self._sizes())
        parts = dict(zip(self.owners, cut, strict=True))
        staged = self._ask(lambda owner, changes: fanout.launch(owner, "stage", (parts[owner.name],), changes))
        if staged.failures:
            self._ask(lambda owner, changes: fanout.launch(owner, "discard", (), changes))
            raise failure_of("load_state_dict, nothing was changed", len(self._owners), staged.failures)
        committed = self._demand("load_state_dict, commit", "commit", lambda owner: ())
        for owner in self._owners:
            owner.note_options(committed[owner.name])
        self._told = None
        for number, group in enumerate(self.param_groups):
            mirrored = self._mirror(number, Group(None, group["params"]))
            group.clear()
            group.update(mirrored)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def close(self) -> None:
        """Let the owners' optimizers go now rather than when this object is collected."""
        if not self._closed:
            self._closed = True
            self._abandon(self._owners)

    def __reduce__(self) -> Any:
        raise ArgumentTypeError("a DistributedOptimizer belongs to the worker that made it; send its state_dict() instead.")

    def _create(self, shares: Sequence[Share]) -> tuple[list[Owner], Options]:
        """Make an owned optimizer for each share, all at once; on failure leave none behind."""
        here = rpc.get_worker_info().id
        owners = [
            Owner(
                share.info,
                share.info.id == here,
                Part(share.info.name, share.groups, [spec.positions for spec in share.specs]),
            )
            for share in shares
        ]
        optimizer_class, args, kwargs = self._make
        answers = fanout.collect(
            [
                fanout.launch_create(owner, optimizer_class, share.specs, args, kwargs)
                for owner, share in zip(owners, shares, strict=True)
            ]
        )
        defaults: Options = {}
        for owner in owners:
            if owner.name in answers.results:
                owner.note_created(answers.results[owner.name])
                defaults = answers.results[owner.name].defaults
        if answers.failures:
            self._abandon(owners)
            name = getattr(optimizer_class, "__name__", repr(optimizer_class))
            raise failure_of(f"making {name}", len(owners), answers.failures)
        return owners, defaults

    def _abandon(self, owners: Sequence[Owner]) -> None:
        for owner in owners:
            fanout.release(owner)

    def _mirror(self, number: int, group: Group) -> dict[str, Any]:
        held = {
            owner.name: owner.ledger.known[owner.part.groups.index(number)]
            for owner in self._owners
            if number in owner.part.groups
        }
        return {"params": list(group.params), **merge(held)}

    def _ask(self, launch: Callable[[Owner, Changes | None], Pending], timeout_s: float | None = None) -> Answers:
        """Launch a call on every owner, with changed options on board; take over what they tell."""
        with self._lock:
            self._usable()
            quiet = self._told is not None and not self._told.changes(self.param_groups)
            telling = None if quiet else Ledger(self.param_groups)
            pendings = [launch(owner, None if quiet else self._changes(owner)) for owner in self._owners]
        answers = fanout.collect(pendings, timeout_s)
        if telling is not None and not answers.failures:
            self._told = telling
        if answers.told:
            with self._lock:
                for owner, told in answers.told:
                    self._take_over(owner, told)
        return answers

    def _demand(self, doing: str, verb: str, args: Callable[[Owner], tuple[Any, ...]]) -> dict[str, Any]:
        answers = self._ask(lambda owner, changes: fanout.launch(owner, verb, args(owner), changes))
        if answers.failures:
            raise failure_of(doing, len(self._owners), answers.failures)
        return answers.results

    def _changes(self, owner: Owner) -> Changes | None:
        wanted = [
            {
                key: value[owner.name] if isinstance(value, PerOwner) else value
                for key, value in self.param_groups[number].items()
            }
            for number in owner.part.groups
        ]
        return owner.ledger.changes(wanted) or None

    def _take_over(self, owner: Owner, told: Changes) -> None:
        for index, (put, removed) in told.items():
            number = owner.part.groups[index]
            for key in (*put, *removed):
                values = {
                    other.name: known[key]
                    for other in self._owners
                    if number in other.part.groups and key in (known := other.ledger.known[other.part.groups.index(number)])
                }
                if values:
                    self.param_groups[number][key] = agree(values)
                else:
                    self.param_groups[number].pop(key, None)

    def _sizes(self) -> list[int]:
        return [len(group["params"]) for group in self.param_groups]

    def _usable(self) -> None:
        if self._closed:
            raise ConfigError("this DistributedOptimizer is closed; make a new one.")
        placed = sum(owner.part.size for owner in self._owners)
        if sum(self._sizes()) != placed:
            raise ConfigError(
                f"param_groups list {sum(self._sizes())} parameters, the owners hold {placed}. "
                "Add parameters with add_param_group; they cannot be written into param_groups."
            )

    @staticmethod
    def _check_context(context_id: int | None) -> None:
        if context_id is None:
            return
        if not isinstance(context_id, int) or isinstance(context_id, bool):
            raise ArgumentTypeError(
                f"context_id is a {type(context_id).__name__}; expected the int of dist_autograd.context()."
            )
        try:
            # Not public, but what torch's own class asks; get_gradients would copy every gradient here.
            dist_autograd._is_valid_context(context_id)
        except RuntimeError as error:
            raise ConfigError(
                f"context {context_id} is not open on this worker ({error}). "
                "Call inside the `with dist_autograd.context()` that gave it."
            ) from error


def _limit(timeout_s: float | None) -> float:
    if timeout_s is None:
        timeout_s = rpc.get_rpc_timeout() or threading.TIMEOUT_MAX / 2
    elif not timeout_s > 0:
        raise ConfigError(f"timeout_s is {timeout_s}; expected a number of seconds above zero.")
    return min(timeout_s, threading.TIMEOUT_MAX / 2)
