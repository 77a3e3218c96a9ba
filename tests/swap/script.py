"""A script as people have it: no word of phalanx. `script.py FOLDER` writes what it found and trained."""

import json
import multiprocessing
import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP


def in_a_child(_: int) -> list[str]:
    """What a spawned process finds under torch's names."""
    import torch.nn.parallel.distributed as module
    from torch.nn.parallel import DistributedDataParallel

    return [DistributedDataParallel.__module__, module.DistributedDataParallel.__module__]


def main(folder: str, with_child: bool = True) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    net = torch.nn.Sequential(torch.nn.Linear(8, 300), torch.nn.BatchNorm1d(300), torch.nn.Tanh(), torch.nn.Linear(300, 2))
    model = DDP(net, device_ids=None, find_unused_parameters=True)
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=1e-2)
    chance = torch.Generator().manual_seed(rank)
    for step in range(6):
        with model.no_sync() if step % 2 == 0 else torch.enable_grad():
            model(torch.randn(4, 8, generator=chance)).pow(2).mean().backward()
        if step % 2:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    found = {"backend": dist.get_backend(), "wrapper": type(model).__module__, "optimizer": type(optimizer).__module__}
    if rank == 0 and with_child:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            found["child"] = pool.map(in_a_child, [0])[0]
    torch.save({"found": json.dumps(found), "weights": net.state_dict()}, os.path.join(folder, f"rank{rank}.pt"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
