"""The underscore names of torch's class that other libraries call, as thin aliases of ours.

Nothing here decides or moves anything; each method forwards to the public way of doing the same.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, cast

import torch
import torch.distributed as dist

from ..comm.hooks import allreduce_hook, fp16_compress_hook
from ..comm.replicate import CHUNK_BYTES, replicate
from ..comm.torch_backend import backend_of
from ..errors import ConfigError, ReductionError
from .features.buffers import BufferHook, BufferHookLocation
from .features.settings import compare

if TYPE_CHECKING:
    from .module import DistributedDataParallel

_DTYPE_NAMES = {torch.float32: "float", torch.float64: "double", torch.float16: "c10::Half"}
_DTYPE_NAMES |= {torch.bfloat16: "c10::BFloat16", torch.complex64: "c10::complex<float>"}


class TorchNames:
    """Mixed into DistributedDataParallel; knows it only by its public side."""

    # The wrapper whose forward, or backward of a compiled model, runs now, and the key of where that model is cut.
    _active_ddp_module: ClassVar[Any] = None
    _active_cut_key: ClassVar[str | None] = None
    # Where the model at the end of the last join() came from.
    _authoritative_rank: int | None = None
    _has_joined = False

    @property
    def _ddp(self) -> DistributedDataParallel:
        return cast("DistributedDataParallel", self)

    @property
    def broadcast_buffers(self) -> bool:
        """The deprecated name of `forward_sync_buffers`."""
        return self._ddp.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self._ddp.forward_sync_buffers = value

    @classmethod
    def _get_active_ddp_module(cls) -> Any:
        return cls._active_ddp_module

    @property
    def _distributed_rank(self) -> int:
        return self._ddp.collectives.rank

    @property
    def modules_buffers(self) -> list[torch.Tensor]:
        return list(self._ddp.buffer_sync.named().values())

    @property
    def named_module_buffers(self) -> dict[str, torch.Tensor]:
        return self._ddp.buffer_sync.named()

    @property
    def broadcast_bucket_size(self) -> int:
        """How many bytes travel at once when the model is replicated."""
        return CHUNK_BYTES

    def _default_broadcast_coalesced(
        self, bufs: Sequence[torch.Tensor] | None = None, bucket_size: int | None = None, authoritative_rank: int = 0
    ) -> None:
        """For buffer hooks that want what happens without one: buffers from one rank to all."""
        tensors = self.modules_buffers if bufs is None else list(bufs)
        self._distributed_broadcast_coalesced(tensors, bucket_size or CHUNK_BYTES, authoritative_rank)

    def _distributed_broadcast_coalesced(
        self, tensors: Sequence[torch.Tensor], buffer_size: int, authoritative_rank: int = 0
    ) -> None:
        ddp = self._ddp
        replicate(tensors, ddp.collectives, authoritative_rank, "synchronising buffers")

    @property
    def _module_parameters(self) -> list[torch.nn.Parameter]:
        ddp = self._ddp
        return [p for n, p in ddp.module.named_parameters() if n not in ddp.parameters_to_ignore]

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(module: Any, params_and_buffers_to_ignore: Any) -> None:
        """Name parameters and buffers of `module` that a wrapper made later leaves alone."""
        module._ddp_params_and_buffers_to_ignore = params_and_buffers_to_ignore
        for tensors in (module.named_parameters(), module.named_buffers()):
            for name, tensor in tensors:
                if name in params_and_buffers_to_ignore:
                    tensor._ddp_ignored = True

    @staticmethod
    def _get_data_parallel_params(module: torch.nn.Module, named_params: bool = False) -> Iterator[Any]:
        for name, param in module.named_parameters():
            if not hasattr(param, "_ddp_ignored"):
                yield (name, param) if named_params else param

    def _register_builtin_comm_hook(self, comm_hook_type: dist.BuiltinCommHookType) -> None:
        hooks: dict[Any, Callable[..., Any]] = {
            dist.BuiltinCommHookType.ALLREDUCE: allreduce_hook,
            dist.BuiltinCommHookType.FP16_COMPRESS: fp16_compress_hook,
        }
        self._ddp.register_comm_hook(self._ddp.process_group, hooks[comm_hook_type])
        self._ddp.reducer.strategy.name = str(comm_hook_type)

    def _register_buffer_comm_hook(
        self, state: Any, hook: Callable[..., Any], comm_hook_location: Any = BufferHookLocation.POST_FORWARD
    ) -> None:
        if not callable(hook):
            raise ConfigError(f"a buffer hook must be callable, got {type(hook).__name__}.")
        # Torch's own enumeration has the same member names.
        location = BufferHookLocation[comm_hook_location.name]
        self._ddp.buffer_sync.hook = BufferHook(hook, state, location)

    def _update_process_group(self, new_process_group: Any) -> None:
        if isinstance(new_process_group, dist.ProcessGroup):
            self._ddp.update_process_group(new_process_group)

    def _remove_autograd_hooks(self) -> None:
        self._ddp.reducer.hooks.detach()

    def _check_reducer_finalized(self) -> None:
        self._ddp.reducer.require_idle()

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Outputs are never cloned here, so there is nothing to switch off."""

    def _set_static_graph(self) -> None:
        ddp = self._ddp
        if ddp.static_graph:
            warnings.warn("You've set static_graph to be True, no need to set it again.", stacklevel=2)
            return
        if ddp.reducer.step:
            self._log_and_throw(
                ReductionError,
                "static_graph should be called before training loop starts: the order of gradients has been learnt. "
                "Pass static_graph=True to the constructor.",
            )
        ddp.static_graph = ddp.reducer.options.static_graph = True
        # Arguments were compared when the model was wrapped. This rank may be the only one to promise it.
        compare(ddp.reducer, {"static_graph": "set by _set_static_graph()"})

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        if sample_rate < 1:
            text = f"DDP runtime logging sample rate should be equal or greater than 1, got {sample_rate}."
            self._log_and_throw(ConfigError, text)
        self._ddp.timeline.sample_every = sample_rate

    def _log_and_throw(self, kind: type[Exception], text: str) -> NoReturn:
        self.__dict__["_logged_error"] = text
        raise kind(text)

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """Torch's table of facts, as far as it has a meaning here."""
        ddp = self._ddp
        reducer = ddp.reducer
        timeline, plan = ddp.timeline, reducer.plan
        timeline.read_device()
        sizes = ", ".join(str(bucket.num_bytes) for bucket in plan.buckets)
        dtypes = sorted({_DTYPE_NAMES.get(spec.dtype, str(spec.dtype)) for spec in plan.specs})
        data: dict[str, Any] = {
            "world_size": ddp.collectives.world,
            "rank": ddp.collectives.rank,
            "module_name": type(ddp.module).__name__,
            "device_ids": "" if not ddp.device_ids else ", ".join(map(str, ddp.device_ids)),
            "output_device": -1 if ddp.output_device is None else ddp.output_device,
            "broadcast_buffers": int(ddp.forward_sync_buffers),
            "bucket_cap_bytes": ddp.bucket_bytes_cap,
            "find_unused_parameters": int(ddp.find_unused_parameters),
            "gradient_as_bucket_view": int(ddp.gradient_as_bucket_view),
            "static_graph": int(ddp.static_graph),
            "can_set_static_graph": int(reducer.learnt.usage.looks_static),
            "backend_name": backend_of(ddp.process_group) or ddp.process_group.name(),
            # As in torch, the step that the times below belong to.
            "iteration": 0 if timeline.latest is None else timeline.latest.step,
            "dtypes": ", ".join(dtypes),
            "total_parameter_size_bytes": sum(spec.num_bytes for spec in plan.specs),
            "num_parameter_tensors": len(plan.specs),
            "bucket_sizes": sizes,
            "num_buckets_reduced": len(plan.buckets),
            "is_multi_device_module": ddp.is_multi_device_module,
            "join_uneven_inputs": self._has_joined,
            "has_sync_bn": any(isinstance(m, torch.nn.SyncBatchNorm) for m in ddp.module.modules()),
            "unused_parameter_size": sum(
                spec.num_bytes for spec in plan.specs if spec.name in set(reducer.unused_names)
            ),
            "has_rebuilt_buckets": int(bool(reducer.step)),
            "rebuilt_bucket_sizes": sizes,
            "prev_iteration_grad_ready_order_indices": ", ".join(map(str, reducer.learnt.order)),
            "rebuilt_per_bucket_param_indices": ", ".join(
                " ".join(str(slot.param) for slot in bucket.slots) for bucket in plan.buckets
            ),
        }
        count = max(timeline.num_sampled, 1)
        data |= {
            "avg_forward_compute_time": timeline.sum_forward_ns // count,
            "avg_backward_compute_time": timeline.sum_backward_ns // count,
            "avg_backward_comm_time": timeline.sum_communication_ns // count,
            "avg_backward_compute_comm_overlap_time": timeline.sum_hidden_ns // count,
        }
        for name in ("MASTER_PORT", "MASTER_ADDR", "TORCH_DISTRIBUTED_DEBUG", "CUDA_VISIBLE_DEVICES"):
            data[name.lower()] = os.environ.get(name, "N/A")
        if data["backend_name"] == "gloo":
            data["gloo_socket_ifname"] = os.environ.get("GLOO_SOCKET_IFNAME", "N/A")
            data["gloo_device_transport"] = os.environ.get("GLOO_DEVICE_TRANSPORT", "N/A")
            data["gloo_num_threads"] = 2
        if (latest := timeline.latest) is not None:
            data |= {
                "forward_compute_time": latest.forward_end_ns - latest.forward_start_ns,
                "backward_compute_time": latest.backward_end_ns - latest.backward_start_ns,
                "backward_comm_time": latest.communication_ns,
                "backward_compute_comm_overlap_time": latest.hidden_ns,
                "forward_compute_time_start": latest.forward_start_ns,
                "backward_compute_time_start": latest.backward_start_ns,
                "backward_compute_time_end": latest.backward_end_ns,
                "backward_comm_time_start": min(times.launched_ns for times in latest.buckets),
                "backward_comm_time_end": max(times.finished_ns for times in latest.buckets),
            }
        if reducer.strategy.name is not None:
            data["comm_hook"] = reducer.strategy.name
        error = self.__dict__.get("_logged_error", ddp.collectives.board.last_words)
        if error is not None:
            data |= {"has_error": 1, "error": error}
        return data


def activate(wrapper: Any, cut_key: str | None) -> Callable[[], None]:
    """Tell the compiler whose model runs from now on; returns what takes that back."""
    before = TorchNames._active_ddp_module, TorchNames._active_cut_key
    TorchNames._active_ddp_module, TorchNames._active_cut_key = wrapper, cut_key

    def take_back() -> None:
        TorchNames._active_ddp_module, TorchNames._active_cut_key = before

    return take_back
