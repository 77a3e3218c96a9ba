"""The parts of torch's forward and of its buffers that others call one by one, and what of torch's class is refused.

Each method forwards to what our wrapper does in its place. What has no meaning here raises when it is called, and
says what to use. Must not decide or move anything by itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.distributed.utils import _to_kwargs
from torch.nn.parallel.scatter_gather import gather, scatter_kwargs

from ...comm.hooks import check_hook
from ...errors import CommunicationError, ConfigError
from ...optim.in_backward import apply_in_backward
from .. import arguments
from ..features.buffers import BufferHookLocation
from ..features.join import announce_reduction, common_rank
from .logger import TorchLogger

if TYPE_CHECKING:
    from ..module import DistributedDataParallel

# Attributes that torch's constructor sets and ours has no counterpart of: what to read in their place.
REFUSED_ATTRIBUTES = {
    "_bucket_config": "`caps` (a BucketCaps, in bytes)",
    "_mp_stream": "nothing: low-precision copies are made in forward, on no stream of their own",
    "_submodule_to_event": "nothing: low-precision copies are made in forward",
}


def _refused(name: str, instead: str) -> Callable[..., Any]:
    """A method of torch's class that has no counterpart here."""

    def refuse(self: Any, *_args: Any, **_kwargs: Any) -> Any:
        raise ConfigError(
            f"DistributedDataParallel.{name} is a part of torch's implementation that phalanx does not have. {instead}"
        )

    refuse.__name__, refuse.__doc__ = name, f"Refused. {instead}"
    return refuse


_USE_JOIN = "Use the context `join()`, which does that for joined ranks."
_USE_PRECISION = "Pass mixed_precision= to the constructor."
_USE_DELAY = "Pass delay_all_reduce_named_params= and param_to_hook_all_reduce= to the constructor."


class TorchSteps:
    """Mixed into DistributedDataParallel, in front of torch's class."""

    # What torch's constructor sets, as far as it has a value here.
    _use_python_reducer = False
    _delay_grad_buffer = None
    _delay_all_reduce_all_params = False
    _static_graph_delay_allreduce_enqueued = False
    use_side_stream_for_tensor_copies = False
    _ddp_sink_clone = False

    @property
    def _wrapper(self) -> DistributedDataParallel:
        return cast("DistributedDataParallel", self)

    @property
    def logger(self) -> TorchLogger:
        """Torch's log of a wrapper, as far as anybody calls it; `stats()` says more."""
        return TorchLogger(self._wrapper)

    @property
    def bucket_bytes_cap_default(self) -> bool:
        return not self._wrapper.caps_are_given

    @property
    def _delay_grad_views(self) -> list[torch.Tensor]:
        return []

    @property
    def _accum_grad_hooks(self) -> list[Any]:
        return []

    @property
    def _delay_all_reduce_params(self) -> list[torch.nn.Parameter]:
        wrapper = self._wrapper
        return [param for name, param in wrapper._trained if name in wrapper._delayed_names]

    @property
    def _comm_hooks(self) -> list[tuple[Callable[..., Any], object]]:
        hook = self._wrapper._hook
        return [] if hook is None else [(hook[1], hook[0])]

    @property
    def buffer_hook(self) -> Any:
        return self._wrapper.buffer_sync.hook

    @property
    def _has_rebuilt_buckets(self) -> bool:
        return self._wrapper.reducer.settled

    @property
    def _lazy_init_ran(self) -> bool:
        return self._wrapper._num_in_backward >= 0

    # -- inputs and outputs --------------------------------------------------------------------

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Sequence[Any]) -> Any:
        """Inputs cut along `dim` into one piece per device."""
        return scatter_kwargs(inputs, kwargs, device_ids, dim=self._wrapper.dim)

    def to_kwargs(self, inputs: Any, kwargs: Any, device_id: int) -> Any:
        """Inputs on one device, as tuples of one replica."""
        device = torch.device(self._wrapper.device_type, device_id)
        return _to_kwargs(inputs, kwargs, device, use_side_stream_for_tensor_copies=False)

    def gather(self, outputs: Any, output_device: Any) -> Any:
        """Outputs of several devices put together along `dim` on one."""
        return gather(outputs, output_device, dim=self._wrapper.dim)

    # -- forward in parts ----------------------------------------------------------------------

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> tuple[Any, Any]:
        forward, inputs, kwargs = self._wrapper._before_forward(inputs, kwargs)
        # A stack: a module may call another forward of the same wrapper inside.
        self._wrapper.__dict__.setdefault("_open_forwards", []).append((forward, (inputs, kwargs)))
        return inputs, kwargs

    def _post_forward(self, output: Any) -> Any:
        open_forwards = self._wrapper.__dict__.get("_open_forwards")
        if not open_forwards:
            raise ConfigError("_post_forward without _pre_forward. Call the wrapper itself, or both in this order.")
        forward, inputs = open_forwards.pop()
        return self._wrapper._after_forward(forward, output, inputs)

    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        with self._inside_ddp_forward():
            return self._wrapper.module(*inputs, **kwargs)

    @contextmanager
    def _inside_ddp_forward(self) -> Iterator[None]:
        context = self._wrapper._enter_module()
        try:
            yield
        finally:
            self._wrapper._leave_module(context)

    def _lazy_init(self) -> None:
        if not self._lazy_init_ran:
            self._wrapper._adopt_in_backward_optimizers()

    def _setup_in_backward_optimizers(self) -> None:
        self._lazy_init()

    def _clear_grad_buffer(self) -> None:
        """Delayed parameters lie in buckets like all others, which clear themselves."""

    # -- buffers -------------------------------------------------------------------------------

    def _assign_modules_buffers(self) -> None:
        """Buffers are looked up whenever they are needed."""

    def _check_sync_bufs_pre_fwd(self) -> bool:
        return self._is_due(BufferHookLocation.PRE_FORWARD)

    def _check_sync_bufs_post_fwd(self) -> bool:
        return self._is_due(BufferHookLocation.POST_FORWARD)

    def _is_due(self, location: BufferHookLocation) -> bool:
        return self._wrapper.will_sync_module_buffers() and self._wrapper.buffer_sync.due(location)

    def _sync_buffers(self) -> None:
        wrapper = self._wrapper
        self._sync_module_buffers(common_rank(wrapper, True) if wrapper._join_config.enable else 0)

    def _sync_module_buffers(self, authoritative_rank: int) -> None:
        self._wrapper.buffer_sync.run(self._wrapper.collectives, authoritative_rank)

    def _find_common_rank(self, input_rank: int, rank_cond: bool) -> int:
        if rank_cond and input_rank != self._wrapper.collectives.rank:
            raise ConfigError(f"_find_common_rank: a rank can only name itself, got {input_rank}.")
        return common_rank(self._wrapper, rank_cond)

    def _check_global_requires_backward_grad_sync(self, is_joined_rank: bool) -> bool:
        reduces = not is_joined_rank and self._wrapper.require_backward_grad_sync
        return announce_reduction(self._wrapper, reduces)

    # -- what torch's constructor is made of ---------------------------------------------------

    def _build_params_for_reducer(self) -> tuple[list[torch.nn.Parameter], list[bool]]:
        sparse = arguments.sparse_names(self._wrapper.module)
        trained = self._wrapper._trained
        return [param for _, param in trained], [name in sparse for name, _ in trained]

    def _build_debug_param_to_name_mapping(self, parameters: Sequence[torch.nn.Parameter]) -> dict[int, str]:
        names = {param: name for name, param in self._wrapper._trained}
        given = set(parameters)
        # In torch's words, for whoever looks for them.
        if given - names.keys():
            raise ConfigError(f"Expected param to name mapping of {len(names)} trained parameters, got {len(given)}.")
        missing = [name for param, name in names.items() if param not in given]
        if missing:
            raise ConfigError(f"Param with name {missing[0]} is trained and not among the {len(given)} given.")
        return {index: names[param] for index, param in enumerate(parameters)}

    def _get_parameters(self, m: torch.nn.Module, recurse: bool = True) -> Iterator[torch.nn.Parameter]:
        yield from m.parameters(recurse)

    def _passing_sync_batchnorm_handle(self, module: torch.nn.Module) -> None:
        arguments.check_layers(module, self._wrapper.device_type)

    def _check_comm_hook(self, hook: Any) -> None:
        check_hook(hook, self._wrapper.device)

    def _check_default_group(self) -> None:
        group = torch.distributed.group.WORLD if torch.distributed.is_initialized() else None
        if group is None or self._wrapper.process_group != group:
            raise CommunicationError(
                "DDP Pickling/Unpickling are only supported when using DDP with the default process group. "
                "Save state_dict() instead."
            )

    # -- what users call -----------------------------------------------------------------------

    def _set_sparse_metadata(self, global_unique_ids: dict[str, torch.Tensor]) -> None:
        """Torch has to be told which rows will come; here they travel with the values. Names are checked all the same."""
        known = {name for name, _ in self._wrapper._trained}
        unknown = sorted(set(global_unique_ids) - known)
        if unknown:
            raise ConfigError(f"_set_sparse_metadata: no trained parameter is called {unknown[0]!r}.")

    def _register_fused_optim(self, optim: type, *args: Any, optim_params: Any = None, **kwargs: Any) -> None:
        """Step each parameter during backward, as soon as it has its mean: `phalanx.optim.apply_in_backward`."""
        if args:
            # Torch hands them on by position, after the parameters; our optimizers take keywords.
            _self, _params, *names = inspect.signature(optim.__init__).parameters  # type: ignore[misc]
            kwargs = {**dict(zip(names, args, strict=False)), **kwargs}
        params = self._wrapper.reducer.params if optim_params is None else list(optim_params)
        apply_in_backward(optim, params, **kwargs)
        self._wrapper._adopt_in_backward_optimizers()

    # -- refused -------------------------------------------------------------------------------

    _register_accum_grad_hook = _refused(
        "_register_accum_grad_hook", 'Compile with torch.compile(model, backend="phalanx").'
    )
    _fire_reducer_autograd_hook = _refused("_fire_reducer_autograd_hook", _USE_PRECISION)
    _root_copy_hook = _refused("_root_copy_hook", _USE_PRECISION)
    _module_wait_for_copy_hook = _refused("_module_wait_for_copy_hook", _USE_PRECISION)
    _delayed_all_reduce_hook = _refused("_delayed_all_reduce_hook", _USE_DELAY)
    _register_delay_all_reduce_hook = _refused("_register_delay_all_reduce_hook", _USE_DELAY)
    _ddp_init_helper = _refused("_ddp_init_helper", "Wrap the model again.")
    _check_and_sync_module_buffers = _refused("_check_and_sync_module_buffers", _USE_JOIN)
    _sync_final_model = _refused("_sync_final_model", _USE_JOIN)
    _match_all_reduce_for_bwd_pass = _refused("_match_all_reduce_for_bwd_pass", _USE_JOIN)
    _match_unused_params_allreduce = _refused("_match_unused_params_allreduce", _USE_JOIN)
