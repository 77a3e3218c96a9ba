"""A Ray Train program: `ray_program.py torch|phalanx FOLDER` writes the final weights to FOLDER/SIDE.pt."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any


def train(config: dict[str, Any]) -> None:
    """What each worker runs: `prepare_model` is Ray's, and wraps."""
    import ray.train
    import torch
    import torch.distributed as dist
    from ray.train.torch import prepare_model

    torch.manual_seed(0)
    model = prepare_model(torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2)))
    assert type(model).__module__.startswith(config["side"])
    assert dist.get_backend() == ("phalanx" if config["side"] == "phalanx" else "gloo")
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    rank = ray.train.get_context().get_world_rank()
    chance = torch.Generator().manual_seed(rank)
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(4, 8, generator=chance)).pow(2).mean().backward()
        optimizer.step()
    if rank == 0:
        torch.save(model.module.state_dict(), os.path.join(config["folder"], f"{config['side']}.pt"))
    ray.train.report({"done": 1})


def main(side: str, folder: str) -> None:
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    config = TorchConfig()
    if side == "phalanx":
        from phalanx.integrations.ray import PhalanxConfig

        config = PhalanxConfig()
    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=True, object_store_memory=100_000_000)
    trainer = TorchTrainer(
        train,
        train_loop_config={"side": side, "folder": folder},
        scaling_config=ScalingConfig(num_workers=2, use_gpu=False),
        torch_config=config,
        run_config=RunConfig(storage_path=str(Path(folder, "ray").resolve())),
    )
    trainer.fit()
    ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
