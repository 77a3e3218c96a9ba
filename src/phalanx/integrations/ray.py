"""Ray Train: `TorchTrainer(..., torch_config=PhalanxConfig())`, and `ray.train.torch.prepare_model` as before.

Ray starts the workers, so the swap has to be made there, before their process group is. Ray's own modules have bound torch's
class by then, and are told.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from phalanx.errors import ConfigError
from phalanx.swap import install

try:
    from ray.train.torch import TorchConfig
    from ray.train.torch.config import _TorchBackend
except ImportError as error:
    raise ConfigError("phalanx.integrations.ray needs Ray Train. Install it: pip install 'phalanx[ray]'.") from error


def _swap() -> None:
    """Run in every worker."""
    install("ray")


class _PhalanxBackend(_TorchBackend):  # type: ignore[misc]
    """Ray's own, after the swap has been made in every worker."""

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        worker_group.execute(_swap)
        super().on_start(worker_group, backend_config)


@dataclass
class PhalanxConfig(TorchConfig):  # type: ignore[misc]
    """Ray's TorchConfig with our wrapper and our backend in place of gloo."""

    @property
    def backend_cls(self) -> type:
        """What Ray runs around the workers."""
        return _PhalanxBackend
