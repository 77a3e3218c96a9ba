"""ZeroRedundancyOptimizer: torch's signature around optimizer state divided among the ranks.

This class is thin on purpose: who owns what is decided in `plan.shards` and stepped in `partition/`, the state is held,
moved, saved and loaded in `state/`, and `overlap/` joins it to backward.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from ..comm.torch_backend import collectives_for
from ..ddp.arguments import choose_group
from ..ddp.module import DistributedDataParallel
from ..ddp.passes.order import recover
from ..errors import ConfigError, PhalanxError, ReductionError, StateError
from . import step_hooks
from .asked import Asked
from .clipping import check_limits, clip_gradients, clip_shards, clipped_in_join
from .join import JoinedStep, wrappers_of
from .memory import MemoryReport, report_memory
from .other_steps import refuse_other_steps
from .overlap.overlap import Overlap
from .partition.element import Placement
from .partition.kinds import check_class, choose_partition
from .partition.local import runs_hooks
from .partition.param_table import check_group, check_params, in_our_words
from .partition.partition import evaluate
from .partition.update import TORN
from .settings import CommonSettings
from .shown_state import ShowsState
from .state.caller import asked_by_checkpoint
from .state.loading import check_states, check_structure, install, normalised
from .state.sharded_optimizer import ShardedOptimizer


class NotConsolidated(PhalanxError, RuntimeError):
    """A whole state was asked for where there is none."""


class ZeroRedundancyOptimizer(ShowsState, torch.optim.Optimizer, Joinable):
    """An `optimizer_class` whose state is divided among the ranks of a group.

    All of torch 2.13's arguments are taken and mean the same; trailing keywords go to `optimizer_class`. Every
    rank makes it with the same parameters and options, and steps it at the same time, after a backward that
    leaves the same averaged gradients everywhere. Afterwards parameters are equal on all ranks and bit for bit
    what `optimizer_class` alone would have made of them.

    `partition` says how parameters are divided: "element" cuts their buckets into equal shards, for optimizers that act
    element by element; "parameter" gives whole ones to ranks; "auto" takes the former where it is right.
    `shared_parameters=True`, for all ranks on one host, keeps one physical copy of the parameters for all of them.
    With `stage=2` gradients that a rank does not own are freed: `step` leaves no `.grad` behind.

    With `overlap_with_ddp=True` backward itself reduces, steps and gathers, bucket by bucket, in the
    phalanx.DistributedDataParallel that wraps the parameters, made before or after; calling `step` is then allowed
    but does nothing more. `step_in_backward=False` leaves the stepping to `step`, so that gradients can be clipped
    or unscaled first.
    """

    def __init__(
        self,
        params: Any,
        optimizer_class: type[torch.optim.Optimizer],
        process_group: dist.ProcessGroup | None = None,
        parameters_as_bucket_view: bool = False,
        overlap_with_ddp: bool = False,
        *,
        stage: int = 1,
        partition: str = "auto",
        step_in_backward: bool | None = None,
        shared_parameters: bool = False,
        **defaults: Any,
    ) -> None:
        # Whatever may be refused is refused before the first collective: a rank that raises alone leaves the others waiting.
        listed = check_params(params)
        check_class(optimizer_class)
        self._asked = Asked.of(
            stage, partition, parameters_as_bucket_view, overlap_with_ddp, step_in_backward, shared_parameters
        )
        # Torch's constructor calls add_param_group, which must not reach for what is only made below.
        self.initialized = False
        with in_our_words("ZeroRedundancyOptimizer"):
            torch.optim.Optimizer.__init__(self, listed, defaults)
        Joinable.__init__(self)
        self.stage, self.parameters_as_bucket_view = stage, self._asked.as_views
        self.optimizer_class, self._given_defaults = optimizer_class, defaults
        self._overlap: Overlap | None = None
        self._divide(process_group)

    def _divide(self, process_group: dist.ProcessGroup | None) -> None:
        """Make the parts that depend on who takes part. Every rank is here at the same point."""
        asked, defaults = self._asked, self._given_defaults
        self.process_group = choose_group(process_group, None)
        recover(self.process_group)
        (collectives := collectives_for(self.process_group)).board.retract_failure()  # of one whose place this one takes
        self.rank, self.world_size = collectives.rank, collectives.world
        self.global_rank = dist.get_rank() if dist.is_initialized() else self.rank
        choice = choose_partition(self.optimizer_class, asked.partition, self.world_size, defaults)
        placement = asked.placement(choice, self.world_size)
        if placement is Placement.SHARED or asked.overlaps:
            refuse_other_steps(ZeroRedundancyOptimizer)
        self._settings = CommonSettings(self, collectives)
        name = f"{(kind := self.optimizer_class).__module__}.{kind.__qualname__}"
        self._settings.agree_on_all({"optimizer_class": name, **asked.in_words(choice)})
        self._sharded = ShardedOptimizer(kind, defaults, self.param_groups, choice, collectives, placement)
        self._sharded.local.asks(self._settings.agree_on_due, self._settings.await_others)
        # Schedulers look here for options that were left at their default.
        self.defaults = {**self.optim.defaults}
        self._settings.know_options()
        self._consolidated: dict[int, Any] | None = None
        self._has_state = False  # whether a step was made or a state loaded: on every rank alike, whatever each owns
        self._hook_arguments: tuple[tuple[Any, ...], dict[str, Any]] = ((self,), {})
        self._is_shadowing = False  # amid a step that only other ranks have inputs for
        self.initialized = True
        # Last: joining a wrapper that exists already calls back into this object.
        if asked.overlaps:
            has_hooks, steps = partial(step_hooks.are_there, self), asked.steps_in_backward
            self._overlap = Overlap(self._sharded, self.stage, steps, has_hooks, self._begin_update, self._end_update)

    def renew(self, process_group: dist.ProcessGroup | None = None) -> None:
        """Go on over another group, without the state, which whoever calls it loads. Every rank of that group calls it.

        Wrappers of the same parameters are renewed between `let_go` and this.
        """
        self.let_go()
        self._divide(process_group)

    def let_go(self) -> None:
        """Have nothing to do with the group and its wrappers any more."""
        if self._overlap is not None:
            self._overlap.retire()
            self._overlap = None

    @property
    def optim(self) -> torch.optim.Optimizer:
        """The optimizer that this rank runs on its own part of the parameters."""
        return self._sharded.optim

    @property
    def sharded(self) -> ShardedOptimizer:
        """Parameters, partition and state, for whoever saves and loads them part by part."""
        return self._sharded

    @property
    def partition(self) -> str:
        """How parameters are divided: "element" or "parameter"."""
        return self._sharded.choice.partition

    @property
    def partition_reason(self) -> str:
        """Why they are divided so, in words."""
        return self._sharded.choice.reason

    @property
    def is_torn(self) -> bool:
        """Whether a step, or a backward that steps, raised midway, which left the parameters between two steps."""
        return self._sharded.update.state is TORN

    @property
    def _all_params(self) -> list[torch.Tensor]:
        return self._sharded.table.params

    # -- training ------------------------------------------------------------------------------

    def step(self, closure: Any = None, **kwargs: Any) -> Any:
        """Update the parameters from their averaged gradients; every rank calls it.

        Returns what the closure returned, if there is one. Keywords go to the optimizer's own `step`.
        """
        # torch.distributed.checkpoint makes a step on zeros where it finds no state, and does not find what lies elsewhere.
        if self._has_state and asked_by_checkpoint() is not None:
            return None
        # First of all: it is a collective, which tells ranks that have joined to follow this step. They have been told.
        if not self._is_shadowing:
            Join.notify_join_context(self)
        if self._overlap is not None and self._overlap.in_backward:
            return self._confirm_update(self._overlap, closure, kwargs)
        with torch.autograd.profiler.record_function("Optimizer.step#ZeroRedundancyOptimizer.step"):
            # A derived class that has its own step is wrapped with the hooks by torch.
            if runs_hooks(type(self)):
                return self._step(closure, **kwargs)
            # What was not given, hooks do not see either.
            given = (self,) if closure is None else (self, closure)
            (_, *rest), kwargs = step_hooks.before(self, given, kwargs)
            result = self._step(*rest, **kwargs)
            step_hooks.after(self, (self, *rest), kwargs)
            return result

    # Torch would wrap `step` with the hooks a second time.
    step.hooked = True  # type: ignore[attr-defined]

    def _step(self, closure: Any = None, **kwargs: Any) -> Any:
        sharded = self._sharded
        recover(sharded.collectives.group)
        sharded.refuse_torn()
        sharded.collectives.board.retract_failure()
        # A state collected earlier is outdated from here on, even if the step raises.
        self._consolidated = None
        if callable(closure):
            closure = self._followed_by_options(closure)
            sharded.take_options(self.param_groups)  # some classes read options before they evaluate (LBFGS)
        else:
            self._take_options(votes=True)
        try:
            if self._overlap is None:
                result = sharded.step(closure, kwargs)
            else:
                result = evaluate(closure)
                self._overlap.step(kwargs)
        except BaseException as error:
            self._step_raised(error)
            raise
        # Not before: a rank whose step raised has made one less than the others, and is found out by it.
        self._settings.stepped()
        sharded.local.push(self.param_groups)
        self._has_state = True
        # Most of every gradient belongs to other ranks. Left there, it would live on until the user's own zero_grad().
        if self.stage == 2:
            self.zero_grad()
        return result

    def _take_options(self, votes: bool = False) -> None:
        """Have the local optimizer step by the options that the user sees, and has edited, once all ranks have the same."""
        self._settings.check(self._is_shadowing, uses_means=self._overlap is None, votes=votes)
        # Schedulers edit the groups that the user sees; the local optimizer has groups of its own.
        self._sharded.take_options(self.param_groups)

    def _followed_by_options(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The closure, and what it made of the options: an optimizer steps by those that its closure leaves."""

        def followed() -> Any:
            result = closure()
            self._take_options()
            return result

        return followed

    def _step_raised(self, error: BaseException) -> None:
        update = self._sharded.update
        if update.is_under_way:
            # One rank by itself is left with what the plain optimizer leaves. Others wait for what this one was to send.
            if self.world_size == 1:
                update.end()
            else:
                self._sharded.collectives.board.post_error(error, " in step()")
        update.raised()

    def _confirm_update(self, overlap: Overlap, closure: Any, kwargs: dict[str, Any]) -> Any:
        """`step` where backward steps: raises if it cannot have done what is asked for."""
        if kwargs:
            raise ConfigError(
                f"step() was given {sorted(kwargs)}, but the step has been made during backward. Make the optimizer with "
                "step_in_backward=False."
            )
        self._sharded.refuse_torn()
        # Before looking whether there was an update: the closure runs the backward that makes it.
        loss = evaluate(closure)
        if overlap.confirm() and (changed := self._settings.changed_since_update()):
            raise ConfigError(
                f"rank {self.rank}: {changed}: too late for this step(), since backward had made the step by then. Change "
                "options before backward or after step(), or make the optimizer with step_in_backward=False."
            )
        return loss

    def _begin_update(self) -> dict[str, Any]:
        """An update begins in the midst of backward; returns the keywords for the optimizer's step."""
        _, kwargs = self._hook_arguments = step_hooks.before(self, (self,), {})
        self._sharded.take_options(self.param_groups)
        self._consolidated = None
        return dict(kwargs)

    def _end_update(self) -> None:
        """All buckets of that update are stepped."""
        self._sharded.local.push(self.param_groups)
        self._opt_called = self._has_state = True  # schedulers look here for whether there was a step before theirs
        step_hooks.after(self, *self._hook_arguments)
        self._settings.updated()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, at any time; every rank calls it. State that exists is partitioned anew with the rest."""
        check_group(param_group, self.param_groups)
        if self.initialized:
            recover(self._sharded.collectives.group)  # by the groups of the pass that failed, if one did
        with in_our_words("add_param_group"):
            super().add_param_group(param_group)
        if self.initialized:
            try:
                self._settings.agree_on_all({})
                with nullcontext() if self._overlap is None else self._overlap.regrouping():
                    self._sharded.add_group(self.param_groups)
            # Every rank refuses the same group, so that all of them take it back and go on as before.
            except PhalanxError:
                self.param_groups.pop()
                raise
            self._consolidated = None

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> torch.Tensor:
        """Scale all gradients so that their norm, over all parameters, is at most `max_norm`; returns the norm.

        Exact however gradients are sharded. Every rank calls it and gets the same number.
        """
        check_limits(max_norm, norm_type)
        overlap = self._overlap
        if overlap is not None and overlap.in_backward:
            raise ReductionError(
                "clip_grad_norm_() comes too late: the step has been made during backward. Make the optimizer with "
                "step_in_backward=False."
            )
        shards = None if overlap is None else overlap.gradient_shards
        # A rank that has joined without inputs does not clip, and is not at fault.
        if not self._join_config.enable:
            self._settings.clipped(max_norm, norm_type, error_if_nonfinite)
        elif shards is not None and self.world_size > 1:
            raise clipped_in_join(self._sharded.collectives.me)
        if shards is None:
            others = None if self._join_config.enable else self._sharded.collectives
            return clip_gradients(self._all_params, max_norm, norm_type, error_if_nonfinite, others)
        grads = [param.grad for param in self._all_params if param.grad is not None]
        return clip_shards(shards.owned(), grads, max_norm, norm_type, error_if_nonfinite, self._sharded.collectives)

    @property
    def local_state_bytes(self) -> int:
        """Bytes of optimizer state on this rank, without asking the others; `memory` asks."""
        return self._sharded.local.num_state_bytes

    def memory(self) -> MemoryReport:
        """Bytes of state, gradients and parameters on each rank, and without sharding. Every rank calls it."""
        scatter = None if self._overlap is None else self._overlap.scatter
        return report_memory(self._sharded, 0 if scatter is None else scatter.num_bytes)

    # -- state ---------------------------------------------------------------------------------

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Collect the whole state in the memory of rank `to`, part by part; every rank calls it."""
        if isinstance(to, bool) or not isinstance(to, int) or not 0 <= to < self.world_size:
            raise ConfigError(f"to must be a rank of the group, 0 to {self.world_size - 1}, got {to!r}.")
        self._verify()
        # Before anything moves: each rank would send to another one, and none would have the whole state.
        self._sharded.collectives.agree("consolidate_state_dict", {"to": str(to)})
        self._consolidated = self._sharded.collect(to)

    def state_dict(self) -> dict[str, Any]:
        """Exactly what `optimizer_class` alone would return; on the rank to which it was consolidated.

        Asked by torch.distributed.checkpoint's `get_state_dict`, on every rank: the same with each tensor in parts.
        """
        asking = asked_by_checkpoint()
        if asking is not None:
            self._verify()
            return self._packed(self._states_in_parts(getattr(asking.get("info"), "full_state_dict", False)))
        if self._consolidated is None and self.world_size == 1:
            self.consolidate_state_dict()
        if self._consolidated is None:
            raise NotConsolidated(
                f"{self._sharded.collectives.me}: Optimizer state has not been consolidated on this rank since the last "
                f"step. Please call `consolidate_state_dict(to={self.rank})` on all ranks beforehand if you meant to save "
                "the global state, or sharded_state_dict() to save it without gathering."
            )
        return self._packed(self._consolidated)

    def _verify(self) -> None:
        """What is about to be kept was made of gradients that belonged together."""
        recover(self._sharded.collectives.group)
        self._sharded.refuse_torn()
        for wrapper in self.wrappers:
            wrapper.verify()

    def _states_in_parts(self, whole: bool) -> dict[int, Any]:
        if whole:
            collected = [self._sharded.collect(rank) for rank in range(self.world_size)]
            return next(state for state in collected if state is not None)
        from .state.shards import shards_of  # torch.distributed.checkpoint takes long to import

        return shards_of(self._sharded)

    def _packed(self, states: dict[int, Any]) -> dict[str, Any]:
        # Torch reads `self.state`. It is lent for this call only: kept, it would be a second state that no step updates.
        self._lent = defaultdict(dict, {self._all_params[index]: state for index, state in states.items()})
        try:
            return super().state_dict()
        finally:
            self._lent = None

    def _begin_anew(self) -> None:
        if self.initialized:
            self._sharded.forget_state()
            self._settings.loaded(())  # which all ranks must have done
            self._consolidated = None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a whole state, saved by this class or by `optimizer_class` alone, on any number of ranks.

        Every rank loads the same. A state that does not fit raises StateError and changes nothing.
        """
        try:
            super().load_state_dict(state_dict)
        except StateError:
            raise
        # Torch's own errors say neither which group nor which parameter is wrong; our check does, where it can.
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            check_structure(state_dict, self.param_groups)
            raise StateError(f"not a state that this optimizer can load: {error!r}.") from error

    def sharded_state_dict(self) -> dict[str, torch.Tensor]:
        """This rank's part of the state, for `torch.distributed.checkpoint.save`; every rank calls it.

        Nothing is gathered or copied: save it before the next step.
        """
        from .state.checkpoint import save_form  # torch.distributed.checkpoint takes long to import

        self._verify()
        return save_form(self._sharded, self.param_groups)

    def load_sharded_state_dict(self, checkpoint: Any, prefix: str = "") -> None:
        """Load what was saved from `sharded_state_dict()`, by any number of ranks and partition; every rank calls it.

        `checkpoint` is a folder or a `torch.distributed.checkpoint.StorageReader`; `prefix` is the key in the saved dict,
        with dots between several. A checkpoint that does not fit raises StateError and changes nothing.
        """
        from .state.checkpoint import CheckpointLoad

        self.set_options(CheckpointLoad(self._sharded, checkpoint, prefix).run(self.param_groups))

    def set_options(self, options: Sequence[Mapping[str, Any]]) -> None:
        """Take over the options of groups, after the state was set part by part (`sharded`). The same on every rank."""
        for group, loaded in zip(self.param_groups, options, strict=True):
            group.update(loaded)
        # AdamW, for one, does not take over from Adam how weight decay is meant. States are set already.
        normalised(self.optim, {}, self.param_groups)
        self._sharded.local.pull(self.param_groups)
        self._consolidated = None
        self._has_state = True

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Torch calls this from load_state_dict, after the user's hooks and before anything has changed.
        if not self.__dict__.get("initialized"):
            super().__setstate__(state)
            return
        # Every rank cuts its own part out of the same whole, so nothing is sent; and nothing is changed before `install`.
        states, groups = dict(state["state"]), state["param_groups"]
        elementwise = self.partition == "element"
        check_states(states, self._sharded.table, self.optimizer_class, elementwise)
        install(self._sharded, normalised(self.optim, states, groups))
        super().__setstate__({"param_groups": groups})
        self._sharded.local.pull(groups)
        self._sharded.local.push(groups)
        self._settings.loaded([state["state"].get(param) for group in groups for param in group["params"]])
        self._consolidated = None
        self._has_state = True

    def __getstate__(self) -> dict[str, Any]:
        raise StateError(
            "a ZeroRedundancyOptimizer cannot be pickled or copied: it belongs to a process group. Save "
            "state_dict() or sharded_state_dict() instead."
        )

    # -- uneven inputs -------------------------------------------------------------------------

    @property
    def wrappers(self) -> list[DistributedDataParallel]:
        """Those that reduce parameters of this optimizer."""
        return wrappers_of(self._all_params)

    def _step_joined(self) -> None:
        """Step this rank's part with the others, without inputs of its own; for ranks that have joined."""
        self._is_shadowing = True
        try:
            self.step()
        finally:
            self._is_shadowing = False
        if self.wrappers:
            # Not at the beginning of the next one: after the last, a user's loop would add to what is left here.
            # What was given to this rank belongs to this step only; the others clear theirs themselves.
            self.zero_grad()

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """What a rank does that has run out of inputs: it goes on stepping its part."""
        return JoinedStep(self._step_joined, self.wrappers)

    @property
    def join_device(self) -> torch.device:
        """The device of the collectives that tell ranks about each other."""
        return self._all_params[0].device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The group whose ranks step together."""
        return self.process_group

    def __repr__(self) -> str:
        lines = super().__repr__()
        return f"{lines[:-1].rstrip()}\npartition: {self.partition} ({self.partition_reason}), stage {self.stage}\n)"
