"""DistributedDataParallel: torch's signature and behaviour around our reducer.

This module puts the parts together: what travels together is decided in `plan`, when it travels in `reducer`, and all else
has a file of its own. Each rank constructs it at the same time, with the same model and arguments, which is compared first.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.distributed.device_mesh import DeviceMesh

from ..comm.hooks import adopt_hook, check_hook, check_state
from ..comm.memory.heap import keep_freed_memory
from ..comm.replicate import replicate
from ..comm.torch_backend import collectives_for
from ..errors import PhalanxError, ReductionError
from ..optim.engine import BackwardEnd
from ..optim.in_backward import num_applied
from ..plan import BucketPlan, build_plan
from ..plan.buckets import DEFAULT_CAP_BYTES
from . import arguments
from .agreement import agree_on_arguments, verify_same
from .buckets.tail import check_weight
from .features.buffers import BufferHookLocation, BufferSync
from .features.dist_autograd import current_context, gradients_of_context
from .features.drift import DriftCheck
from .features.durable import verify_before_state
from .features.in_backward import adopt
from .features.join import JoinedTraining, announce_reduction, common_rank
from .features.nonfinite import NonFinite
from .features.precision import LowPrecision, MixedPrecision
from .features.settings import TailSettings
from .features.steps import StepCount
from .frames import call, hides_from_dynamo, report_uncompiled, transparent, untraced
from .like_torch.base import TorchBase
from .like_torch.steps import REFUSED_ATTRIBUTES
from .notices import FirstInputs, notices
from .passes.arming import Forward
from .passes.order import order_of, recover, recover_before_leaving
from .reducer import HookStrategy, Reducer, ReducerOptions
from .statistics import Statistics, summarise
from .structure import map_tensors, may_nest, watch, with_own_tensors
from .timeline import Timeline
from .torch_names import TorchNames, activate
from .wrappers import announce

# Made anew by `_prepare` and `_assemble`, so not saved with the wrapper.
_TRANSIENT = frozenset(
    "process_group device_mesh collectives buffer_sync reducer timeline _low _trained _frozen _first_plan _hook "
    "_num_in_backward first_inputs".split()
)


def _reached(wrapper: weakref.ref[DistributedDataParallel], forward: Forward) -> None:
    # Weakly: hooks of tensors are invisible to the garbage collector, and a module may keep its own output.
    alive = wrapper()
    if alive is not None:
        alive._on_output(forward)


class DistributedDataParallel(TorchBase):
    """Train `module` on every rank of a group with gradients averaged during backward.

    All of torch 2.13's arguments are taken and mean the same. Four more: `on_unused` says what to do when no rank used
    some parameter: "warn" once (default), "raise", or "ignore". `on_nonfinite` says what to do about NaN and infinity in
    a rank's own gradients, before they spread: "raise", "warn", "skip" (drop the step's gradients on every rank),
    "ignore", or, by default, one warning when such gradients have reached the parameters. `on_late_mismatch="poison"` is
    for devices, where a step whose ranks did not belong together is found out one step late: its gradients become NaN on
    the device, so that they are not applied unseen. `check_drift_every` compares the parameters of the ranks after every
    so many backwards. Parameters and buffers are replicated from rank 0 at construction; after every backward all ranks
    hold bit-identical gradients. It is a subclass of torch's wrapper, for libraries that ask, and runs none of its code.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: Sequence[Any] | None = None,
        output_device: Any = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Sequence[tuple[str, torch.nn.Parameter]] | None = None,
        param_to_hook_all_reduce: torch.nn.Parameter | None = None,
        mixed_precision: MixedPrecision | None = None,
        device_mesh: DeviceMesh | None = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: list[int] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        *,
        on_unused: str | None = None,
        on_nonfinite: str | None = None,
        on_late_mismatch: str = "raise",
        check_drift_every: int | None = None,
    ) -> None:
        arguments.check_flags_of(locals())  # of which there are no others yet than the arguments
        torch.nn.Module.__init__(self)  # not torch's wrapper's, of which nothing runs
        Joinable.__init__(self)
        arguments.check_module(module)
        keep_freed_memory(os.environ)
        arguments.check_precision(mixed_precision)
        delayed = arguments.check_delayed(module, delay_all_reduce_named_params, param_to_hook_all_reduce)
        self.process_group = arguments.choose_group(process_group, device_mesh)
        arguments.adapt_to_mesh(module, device_mesh)
        self.module = module
        self.device_mesh = device_mesh
        self.parameters_to_ignore = arguments.names_to_ignore(module)
        self._delayed_names, self._delayed_until = delayed
        managed = [(n, p) for n, p in module.named_parameters() if n not in self.parameters_to_ignore]
        arguments.check_parameters(managed)
        every = [param for _, param in managed]
        self.device_ids, self.output_device = arguments.choose_devices(device_ids, output_device, every)
        arguments.check_layers(module, every[0].device.type)
        self.dim = dim
        self.device = every[0].device
        self.device_type = self.device.type
        self.is_multi_device_module = len({param.device for param in every}) > 1
        self.forward_sync_buffers, self.syncs_buffers_at_start = arguments.choose_buffer_sync(
            broadcast_buffers, forward_sync_buffers
        )
        arguments.warn_deprecated(check_reduction)
        total_bytes = sum(p.numel() * p.element_size() for _, p in managed if p.requires_grad)
        on_cpu = self.device_type == "cpu"
        num_buckets = collectives_for(self.process_group).worthwhile_buckets if on_cpu else None
        self.caps = arguments.choose_caps(bucket_cap_mb, bucket_cap_mb_list, total_bytes, num_buckets)
        self.bucket_bytes_cap_list = list(self.caps.caps_bytes) if bucket_cap_mb_list else []
        self.caps_are_given = bucket_cap_mb is not None or bool(bucket_cap_mb_list)
        self.bucket_bytes_cap = max(self.caps.caps_bytes) if self.caps_are_given else DEFAULT_CAP_BYTES
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = arguments.choose_views(gradient_as_bucket_view, mixed_precision)
        self.batched_grad_copy = batched_grad_copy
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self.static_graph = static_graph
        self.mixed_precision = mixed_precision
        self.on_unused = arguments.choose_on_unused(on_unused, find_unused_parameters or static_graph)
        self.on_nonfinite = arguments.check_on_nonfinite(on_nonfinite)
        self.on_late_mismatch = arguments.check_on_late_mismatch(on_late_mismatch)
        self.check_drift_every = arguments.check_every(check_drift_every)
        self.require_backward_grad_sync = self.require_forward_param_sync = True
        self._number = 0  # until the ranks have agreed on one
        self._prepare()
        arguments.check_replicated(self, init_sync)
        if init_sync:
            self._number = self._agree()
        self._assemble()
        if init_sync:
            self.replicate_module(0, self.syncs_buffers_at_start)

    # -- putting the parts together ------------------------------------------------------------

    def _prepare(self) -> None:
        """The parts that only describe: collectives, parameters, the first plan."""
        self.collectives = collectives_for(self.process_group)
        self.buffer_sync = BufferSync(self.module, self.parameters_to_ignore)
        named = list(self.module.named_parameters())
        trained = [(n, p) for n, p in named if p.requires_grad and n not in self.parameters_to_ignore]
        self._trained = trained  # also those that are frozen later
        self._frozen = [(n, p) for n, p in named if not p.requires_grad and n not in self.parameters_to_ignore]
        self._low: LowPrecision | None = None
        if self.mixed_precision is not None:
            self._low = LowPrecision(self.mixed_precision, self.module, self.parameters_to_ignore)
        self._first_plan = self._make_plan(trained)

    def _assemble(self) -> None:
        """The parts that work: reducer, its hooks, and those who listen to it."""
        self._hook: tuple[object, Callable[..., Any]] | None = None
        self._num_in_backward = -1  # nobody has looked yet
        options = ReducerOptions(
            as_views=self.gradient_as_bucket_view,
            static_graph=self.static_graph,
            on_unused=self.on_unused,
            drop_unused=self.skip_all_reduce_unused_params,
            poisons_late=self.on_late_mismatch == "poison",
        )
        self.reducer = Reducer([p for _, p in self._trained], self._first_plan, self.collectives, options, self._number)
        self.timeline = Timeline(self.reducer)
        self.first_inputs = FirstInputs()
        settings = TailSettings(self.reducer, StepCount(self))
        self.reducer.listeners.add(self.timeline, *notices(self, self.first_inputs), settings)
        if self._low is not None:
            self.reducer.listeners.add(self._low)
        if self.on_nonfinite is not None and self.on_nonfinite != "ignore":
            self.reducer.listeners.add(NonFinite(self.reducer, self.on_nonfinite))
        if self.check_drift_every is not None:
            self.reducer.listeners.add(DriftCheck(self, self.check_drift_every))
        verify_before_state(self.module, self)
        _ = self.collectives.board  # from now on the other ranks are told if this process ends by an exception
        announce(self)

    def _make_plan(self, trained: Sequence[tuple[str, torch.nn.Parameter]]) -> BucketPlan:
        reduce_dtype = None if self._low is None else self._low.reduce_dtype
        return build_plan(arguments.gradient_specs(self.module, trained, self._delayed_names, reduce_dtype), self.caps)

    def _agree(self) -> int:
        """Compare with the other ranks before any data moves; returns this wrapper's number among those of the group."""
        recover(self.process_group)  # of another wrapper that failed, more may be under way on some ranks than on others
        agree_on_arguments(self.collectives, arguments.in_words(self))
        settings = f"views={self.gradient_as_bucket_view} buffers={self.forward_sync_buffers}"
        order = order_of(self.collectives.group)
        order.num_named = verify_same(self._first_plan, settings, self.collectives, order.num_named, self.device) + 1
        return order.num_named

    def replicate_module(self, source: int, with_buffers: bool = True) -> None:
        """Overwrite parameters (and buffers) on every rank by those of rank `source`."""
        # By name: that ranks have the same ones was compared, not in which order each of them was registered.
        named = sorted(self.module.named_parameters(), key=lambda pair: pair[0])
        tensors: list[torch.Tensor] = [param for name, param in named if name not in self.parameters_to_ignore]
        if with_buffers:
            tensors += self.buffer_sync.in_order()
        replicate(tensors, self.collectives, source, "replicating the model")

    @property
    def plan(self) -> BucketPlan:
        """The plan in force: the first one, or the one made from the observed order."""
        return self.reducer.plan

    # -- forward -------------------------------------------------------------------------------

    @transparent
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        with torch.autograd.profiler.record_function("DistributedDataParallel.forward"):
            forward, inputs, kwargs = self._before_forward(inputs, kwargs)
            leave = self._enter_module()
            try:
                if hides_from_dynamo(self.module):
                    output = call(self.module, inputs, kwargs)
                else:
                    output = self.module(*inputs, **kwargs)
            except Exception as error:
                self._forward_raised(error)
                raise
            finally:
                self._leave_module(leave)
            report_uncompiled(self, self.reducer)
            return self._after_forward(forward, output, (inputs, kwargs))

    @untraced
    def _enter_module(self) -> Callable[[], None]:
        """Tell the compiler whose model runs, and lower its precision; `_leave_module` calls what takes both back."""
        take_back = activate(self, self.reducer.cut_key)
        if self._low is None:
            return take_back
        (context := ExitStack()).callback(take_back)
        context.enter_context(self._low.forward())
        return context.close

    @untraced
    def _leave_module(self, leave: Callable[[], None]) -> None:
        leave()

    @untraced
    def _forward_raised(self, error: Exception) -> None:
        # No failure yet: a script that catches it may do so on every rank alike, or be back with another batch.
        self.collectives.board.note_raised(error, " in forward")

    @untraced
    def _before_forward(self, inputs: Any, kwargs: Any) -> tuple[Forward | None, Any, Any]:
        self.collectives.board.retract_failure()
        forward = None
        # Without gradients, as in an evaluation, it is this rank's own affair: it takes part in no collective, and those
        # who have joined need not match it.
        if torch.is_grad_enabled():
            arguments.check_frozen(self._frozen, self.collectives.me)
            # Before any other collective: it may have to bring all ranks to the same point first.
            forward = self.reducer.forward_begins(self.require_backward_grad_sync)
            self.follow_moved_parameters()
            self.first_inputs.see(() if torch.jit.is_tracing() else (inputs, kwargs))
            if self._num_in_backward != num_applied():
                self._adopt_in_backward_optimizers()
            Join.notify_join_context(self)
            self._sync_buffers_at(BufferHookLocation.PRE_FORWARD)
            if self._join_config.enable:
                announce_reduction(self, self.require_backward_grad_sync)
        if self.device_ids:
            device = torch.device(self.device_type, self.device_ids[0])
            inputs, kwargs = map_tensors((inputs, kwargs), lambda tensor: tensor.to(device, non_blocking=True))
        if self._low is not None:
            inputs, kwargs = self._low.cast_inputs(inputs, kwargs)
        self.timeline.forward_begins(None if forward is None else inputs or kwargs)
        return forward, inputs, kwargs

    @untraced
    def _after_forward(self, forward: Forward | None, output: Any, inputs: Any) -> Any:
        self.timeline.forward_ended()
        if forward is None:
            return output
        self._sync_buffers_at(BufferHookLocation.POST_FORWARD)
        # Asked now and not when forward began: Lightning's manual optimisation takes it back inside.
        self.require_forward_param_sync = self.require_backward_grad_sync
        if (context_id := current_context()) is not None:
            forward.elsewhere = partial(gradients_of_context, context_id)
        # To a tensor that was there before, autograd comes when all that uses it is done: too late for the launch order.
        output = with_own_tensors(output, inputs) if self.reducer.order.has_several else output
        forward.returned(watched := watch(output, partial(_reached, weakref.ref(self), forward)))
        if self.reducer.strategy.gives_for_good:
            forward.may_nest = not watched.sees_all or may_nest(output)
        return output

    def _on_output(self, forward: Forward) -> None:
        """A pass of autograd has reached an output."""
        # Order matters: full-precision parameters are back before the reducer gives out gradients.
        if self._low is not None:
            self._low.begin_backward()
        if self.reducer.choose_buckets is not None and TorchNames._active_ddp_module is None:
            # What is computed again in backward (checkpointing) is to run the graphs that its forward ran.
            BackwardEnd(activate(self, self.reducer.cut_key)).queue()
        self.reducer.reached(forward)

    def follow_moved_parameters(self) -> None:
        """After `Module.to`, `.double()` and the like the buckets are of another kind than the gradients to come."""
        if self._low is not None and self._low.is_on:
            return  # computed again in backward, in low precision for as long as that lasts
        if self.reducer.is_outdated:
            self._first_plan = self._make_plan(self._trained)
            self.reducer.restart(self._first_plan)

    def known_parameters(self) -> set[int]:
        """The ids of the parameters that were there, and not ignored, when the model was wrapped."""
        return {id(param) for _, param in (*self._trained, *self._frozen)}

    def _adopt_in_backward_optimizers(self) -> None:
        self._num_in_backward = num_applied()
        adopt(self)

    # -- buffers -------------------------------------------------------------------------------

    def will_sync_module_buffers(self) -> bool:
        """Whether the next forward synchronises buffers."""
        return self.require_forward_param_sync and self.forward_sync_buffers and bool(self.buffer_sync.named())

    def _sync_buffers_at(self, location: BufferHookLocation) -> None:
        if self.forward_sync_buffers and self.require_forward_param_sync and self.buffer_sync.due(location):
            asks = self._join_config.enable and self.will_sync_module_buffers()  # as ranks that have joined do
            self.buffer_sync.run(self.collectives, common_rank(self, True) if asks else 0)

    # -- what users call around training -------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards of forwards run inside only add up local gradients; the next one outside reduces all."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    @contextmanager
    def weight(self, share: float) -> Iterator[None]:
        """Backwards run inside count `share` in the mean: gradients become Σ share·grad / Σ share.

        Give each rank its number of tokens or samples, 0 if it has none. Ranks that give nothing count 1.
        """
        check_weight(share)
        before, self.reducer.weight = self.reducer.weight, share
        try:
            yield
        finally:
            self.reducer.weight = before

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Let `hook(state, bucket)` reduce each bucket; once per wrapper, before training."""
        try:
            check_hook(hook, self.device)
            check_state(hook, state)
        except PhalanxError as error:
            self._log_and_throw(type(error), str(error))
        if self._hook is not None:
            raise ReductionError(
                "register_comm_hook or register_builtin_comm_hook can only be called once: "
                f"{arguments.name_of(self._hook[1])} is registered already. Wrap the model again for another hook."
            )
        self.reducer.recover()  # by the strategy of the pass that failed, if one did
        self._hook = (state, hook)
        self.reducer.use(HookStrategy(self.collectives, state, adopt_hook(hook)))

    def update_process_group(self, new_process_group: dist.ProcessGroup) -> None:
        """Go on over another group: shrunk, grown or renewed. Every rank of the new group takes part.

        Ranks that join construct their wrapper on the new group at the same time; parameters and buffers are then replicated
        from its rank 0. Registered hooks with a group of their own must be told separately.
        """
        before, self.process_group = self.process_group, arguments.choose_group(new_process_group, None)
        recover_before_leaving(before, self.process_group)
        self.collectives = collectives_for(self.process_group)
        self._first_plan = self._make_plan(self._trained)  # as ranks that join make it: the model may have moved since
        self._number = self._agree()
        self.reducer.move(self.collectives, self._number)
        self.reducer.restart(self._first_plan)
        self.replicate_module(0, self.forward_sync_buffers)

    def renew(self, new_process_group: dist.ProcessGroup | None = None) -> None:
        """Go on over another group as if just wrapped; nothing is replicated. Every rank of it calls this; hooks stay."""
        self.process_group = arguments.choose_group(new_process_group, None)
        self._reassemble(agrees=True)

    def verify(self) -> None:
        """Return when every backward so far is known to have averaged what belonged together; raise if one has not.

        On the CPU that is known at the end of each backward. On a device a step is judged at the end of the next, or here.
        Asked before anything is kept: by all `state_dict`s, the `Checkpointer`, `join` and the worker that leaves.
        """
        self.reducer.late_checks.judge(self.reducer)

    def stats(self) -> Statistics:
        """Times of the last sampled step, bucket by bucket, and what has been learnt of the model."""
        return summarise(self.reducer, self.timeline)

    # -- uneven inputs -------------------------------------------------------------------------

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """Train inside this context when ranks may have unequally many inputs. Every rank calls it, with the same."""
        told = {"enable": str(bool(enable)), "throw_on_early_termination": str(bool(throw_on_early_termination))}
        self.collectives.agree("the arguments of join", told)
        return Join([self], enable, throw_on_early_termination, divide_by_initial_world_size=divide_by_initial_world_size)

    def join_hook(self, **kwargs: Any) -> JoinHook:
        return JoinedTraining(self, bool(kwargs.get("divide_by_initial_world_size", True)))

    @property
    def join_device(self) -> torch.device:
        return self.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        return self.process_group

    # -- being a module ------------------------------------------------------------------------

    def train(self, mode: bool = True) -> DistributedDataParallel:
        return torch.nn.Module.train(self, mode)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in REFUSED_ATTRIBUTES:
                raise AttributeError(f"phalanx's wrapper has no {name!r}. Read {REFUSED_ATTRIBUTES[name]}.") from None
            wrapped = self.__dict__.get("_modules", {}).get("module")
            if wrapped is None or name.startswith("__"):
                raise
        # Outside of the handler: whoever misspells a name reads one traceback, of the model's, and not two.
        return getattr(wrapped, name)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As torch's, of a model that is known to be right."""
        self.verify()
        return torch.nn.Module.state_dict(self, *args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As torch's, for states saved from the wrapper (`module.` before each name) and from the model alone."""
        named = arguments.named_as_wrapped(state_dict, set(self.state_dict(keep_vars=True)))
        loaded = super().load_state_dict(named, strict, assign)
        if assign:
            # The module has other parameters than those that were wrapped: nobody would reduce them.
            self.reducer.recover()
            self._reassemble(agrees=False)
        return loaded

    def _reassemble(self, agrees: bool) -> None:
        self.reducer.hooks.detach()
        self.reducer.order.leave(self.reducer)
        hook = self._hook
        self._prepare()
        if agrees:
            self._number = self._agree()
        self._assemble()
        if hook is not None:
            self.register_comm_hook(*hook)

    def __getstate__(self) -> dict[str, Any]:
        self._check_default_group()
        return {name: value for name, value in self.__dict__.items() if name not in _TRANSIENT}

    def __setstate__(self, state: dict[str, Any]) -> None:
        arguments.check_pickle(state)
        torch.nn.Module.__setstate__(self, state)
        self.process_group = arguments.choose_group(None, None)
        self.device_mesh = None
        self._prepare()
        self._assemble()
