"""Torch's Logger, as far as other libraries call it: nothing is logged that `stats()` and the trace do not say."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..module import DistributedDataParallel


class TorchLogger:
    """The log of one wrapper. Holds no data of its own."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = ddp

    def set_construction_data_and_log(self, *_args: Any) -> None:
        """Read off the wrapper whenever asked for."""

    def set_runtime_stats_and_log(self) -> None:
        """Times are taken by the wrapper's timeline."""

    def set_error_and_log(self, error: str) -> None:
        """Shown by `_get_ddp_logging_data` from now on."""
        self._ddp.__dict__["_logged_error"] = error

    def _get_ddp_logging_data(self) -> Any:
        return self._ddp._get_ddp_logging_data()

    def _set_comm_hook_name(self, comm_hook: str) -> None:
        self._ddp.reducer.strategy.name = comm_hook

    def _set_uneven_input_join(self) -> None:
        self._ddp._has_joined = True

    def _set_static_graph(self) -> None:
        """The wrapper's own `_set_static_graph` has done it."""
