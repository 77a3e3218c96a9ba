"""The names of torch's C++ Reducer that other libraries call, on ours.

Lightning's manual optimisation, Accelerate's `trigger_sync_in_backward` and torch's pipelining arm a backward by hand
(`prepare_for_backward`). The rest is there or says what to use. Must not know of modules.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from ...errors import ConfigError

if TYPE_CHECKING:
    from ..reducer.reducer import Reducer


class TorchReducer:
    """Mixed into Reducer."""

    @property
    def _ours(self) -> Reducer:
        return cast("Reducer", self)

    def prepare_for_backward(self, tensors: Any = ()) -> None:
        """The next backward is reduced, whatever forwards before it were run in; `tensors` are not needed here."""
        self._ours._arming.demand()

    def prepare_for_forward(self) -> None:
        """The wrapper's forward does what has to be done."""

    def _rebuild_buckets(self) -> bool:
        """Whether buckets were made anew just now. They are at the end of the first backward, never in a forward."""
        return False

    def _delay_all_reduce(self) -> None:
        """Torch's first backward of a static graph has to be flushed by hand; ours ends by itself."""

    def _set_static_graph(self) -> None:
        self._ours.options.static_graph = True

    def _ddp_graph_static(self) -> bool:
        return self._ours.learnt.usage.looks_static

    def _get_local_used_map(self) -> Any:
        raise _refusal("_get_local_used_map", "ddp.stats() names the parameters that no rank used.")

    def _remove_autograd_hooks(self) -> None:
        self._ours.hooks.detach()

    def _check_reducer_finalized(self) -> None:
        self._ours.require_idle()

    def set_logger(self, logger: Any) -> None:
        """There is no log to set."""

    def _set_sparse_metadata(self, metadata: Any) -> None:
        """Rows travel with their values."""

    def get_backward_stats(self) -> Any:
        raise _refusal("get_backward_stats", "Use ddp.stats().")

    def _install_post_backward_futures(self, futures: Any) -> Any:
        raise _refusal("_install_post_backward_futures", "Use phalanx.optim.apply_in_backward.")

    def _get_zeros_like_grad_buckets(self) -> Any:
        raise _refusal("_get_zeros_like_grad_buckets", "Use ddp.join().")

    def _push_all_rebuilt_params(self) -> Any:
        raise _refusal("_push_all_rebuilt_params", "Use ddp.join().")

    def _set_forward_pass_work_handle(self, *_args: Any) -> Any:
        raise _refusal("_set_forward_pass_work_handle", "Use ddp.join().")

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> Any:
        raise _refusal("_set_ddp_runtime_logging_sample_rate", "The wrapper has a method of that name.")

    def _run_comm_hook(self, bucket: Any) -> Any:
        raise _refusal("_run_comm_hook", "Call the hook itself.")

    def _run_allreduce_hook(self, bucket: Any) -> Any:
        raise _refusal("_run_allreduce_hook", "Call phalanx's allreduce_hook.")

    def _set_optimizer_in_backward(self) -> Any:
        raise _refusal("_set_optimizer_in_backward", "Use phalanx.optim.apply_in_backward.")

    def _set_mixed_precision_param_dtype(self, dtype: Any) -> Any:
        raise _refusal("_set_mixed_precision_param_dtype", "Pass mixed_precision= to the constructor.")

    def _autograd_hook(self, index: int) -> Any:
        raise _refusal("_autograd_hook", "Gradients are announced by autograd itself.")

    def _reset_state(self) -> Any:
        raise _refusal("_reset_state", "Use ddp.update_process_group(group).")

    def _update_process_group(self, group: Any) -> Any:
        raise _refusal("_update_process_group", "Use ddp.update_process_group(group).")


def _refusal(name: str, instead: str) -> ConfigError:
    return ConfigError(f"Reducer.{name} is a part of torch's implementation that phalanx does not have. {instead}")
