"""Lightning: importing this module registers `strategy="phalanx"` for Trainer and for Fabric.

The strategies are Lightning's own DDP strategies with our wrapper and, on the processor, our backend. Whatever else they do
(launching, samplers, manual optimisation, checkpoints) stays Lightning's.
"""

from __future__ import annotations

from typing import Any

import torch

from phalanx.comm.group.process_group import register
from phalanx.ddp.module import DistributedDataParallel
from phalanx.errors import ConfigError

try:
    from lightning.fabric.strategies import STRATEGY_REGISTRY as FABRIC_STRATEGIES
    from lightning.fabric.strategies import DDPStrategy as FabricDDP
    from lightning.pytorch.strategies import DDPStrategy as TrainerDDP
    from lightning.pytorch.strategies import StrategyRegistry as TRAINER_STRATEGIES
except ImportError as error:
    needs = "phalanx.integrations.lightning needs Lightning. Install it: pip install 'phalanx[lightning]'."
    raise ConfigError(needs) from error

NAME = "phalanx"


def _backend(given: str | None, device: torch.device) -> str | None:
    """Shared memory on the processor; elsewhere, and where the user named one, as it is."""
    register()
    return given or (NAME if device.type == "cpu" else None)


class PhalanxStrategy(TrainerDDP):  # type: ignore[misc]
    """For `lightning.Trainer`. Takes what Lightning's DDPStrategy takes."""

    strategy_name = NAME

    def _setup_model(self, model: torch.nn.Module) -> DistributedDataParallel:
        return DistributedDataParallel(model, device_ids=self.determine_ddp_device_ids(), **self._ddp_kwargs)

    def _get_process_group_backend(self) -> str:
        chosen = _backend(self._process_group_backend, self.root_device)
        return chosen or str(super()._get_process_group_backend())


class FabricPhalanxStrategy(FabricDDP):  # type: ignore[misc]
    """For `lightning.Fabric`. Takes what Fabric's DDPStrategy takes."""

    def setup_module(self, module: torch.nn.Module) -> DistributedDataParallel:
        """Wrap a module."""
        return DistributedDataParallel(module, device_ids=self._determine_ddp_device_ids(), **self._ddp_kwargs)

    def _get_process_group_backend(self) -> str:
        chosen = _backend(self._process_group_backend, self.root_device)
        return chosen or str(super()._get_process_group_backend())


# Lightning starts workers by running the script again, or by multiprocessing; one name for each of its ways.
_STARTS = {NAME: "popen", f"{NAME}_spawn": "spawn", f"{NAME}_fork": "fork"}


def _register(registry: Any, strategy: type) -> None:
    for name, start in _STARTS.items():
        if name not in registry:
            registry.register(name, strategy, description=f"Phalanx, started by {start}", start_method=start)


_register(TRAINER_STRATEGIES, PhalanxStrategy)
_register(FABRIC_STRATEGIES, FabricPhalanxStrategy)
