"""Communication hooks: gradients travel in another form.

A built-in hook sends int8 in place of float32 and carries the rounding error on to the next step; a hook of
one's own is a function that returns a future.

    phalanx run --nproc 2 examples/communication_hook.py
"""

import torch
import torch.distributed as dist
from torch import nn

import phalanx
from phalanx.comm.hooks import Int8State, int8_hook


def halved_range(group: dist.ProcessGroup, bucket: phalanx.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A hook of one's own: clip every element to [-0.5, 0.5] before averaging."""
    tensor = bucket.buffer().clamp_(-0.5, 0.5).div_(dist.get_world_size(group))
    work = dist.all_reduce(tensor, group=group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def train(worker: phalanx.Worker, hook: str) -> float:
    torch.manual_seed(0)
    model = phalanx.DistributedDataParallel(nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1)))
    if hook == "int8":
        model.register_comm_hook(Int8State(dist.group.WORLD), int8_hook)
    elif hook == "clipped":
        model.register_comm_hook(dist.group.WORLD, halved_range)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    torch.manual_seed(100 + worker.rank)
    loss = torch.zeros(())
    for _ in range(60):
        x = torch.randn(32, 8)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def main() -> None:
    worker = phalanx.init()
    for hook in ("none", "int8", "clipped"):
        loss = train(worker, hook)
        if worker.is_first:
            print(f"hook {hook}: loss {loss:.3f}")


if __name__ == "__main__":
    main()
