"""Parameter servers: embeddings on two servers, two trainers, a dense part replicated in DDP.

    python examples/parameter_server.py [--steps 300]

The model guesses how much a user likes an item. The users' embeddings live on one server and the items' on the
other; each trainer asks for the rows of its batch, and distributed autograd carries the gradients back. One
DistributedOptimizer a trainer updates the embeddings where they are and the trainer's copy of the dense part.
All four processes are started here, on this host, and listen on loopback only.
"""

from __future__ import annotations

import argparse
import tempfile
import time

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import nn

import phalanx
from phalanx import remote

TRAINERS = ["trainer0", "trainer1"]
SERVERS = ["users", "items"]
NUM_ROWS, WIDTH, BATCH = 100, 8, 64


class Table:
    """One embedding on its server."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(NUM_ROWS, WIDTH)

    def look_up(self, rows: torch.Tensor) -> torch.Tensor:
        return self.embedding(rows)

    def weight(self) -> torch.Tensor:
        return self.embedding.weight


_TABLES: dict[str, Table] = {}


def table() -> Table:
    """This server's table, made when the first trainer asks for it."""
    name = rpc.get_worker_info().name
    return _TABLES.setdefault(name, Table(seed=SERVERS.index(name)))


def likes(users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
    """The truth to be learned: tastes and flavours, two numbers each, that point the same way or not."""
    tastes, flavours = torch.randn(2, NUM_ROWS, 2, generator=torch.Generator().manual_seed(9))
    return ((tastes[users] * flavours[items]).sum(1) > 0).float()


def train(rank: int, group: dist.ProcessGroup, num_steps: int) -> None:
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, 1))
    model = phalanx.DistributedDataParallel(dense, process_group=group)
    tables = [rpc.remote(server, table) for server in SERVERS]
    params = [found.remote().weight() for found in tables] + [rpc.RRef(param) for param in model.parameters()]
    optimizer = remote.DistributedOptimizer(torch.optim.Adam, params, lr=0.05)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)
    generator = torch.Generator().manual_seed(100 + rank)
    losses, started = [], time.perf_counter()
    for step in range(num_steps):
        users, items = torch.randint(0, NUM_ROWS, (2, BATCH), generator=generator)
        with dist_autograd.context() as context_id:
            taste, flavour = tables[0].rpc_async().look_up(users), tables[1].rpc_async().look_up(items)
            scores = model(taste.wait() * flavour.wait()).squeeze(1)
            loss = nn.functional.binary_cross_entropy_with_logits(scores, likes(users, items))
            dist_autograd.backward(context_id, [loss])
            optimizer.clip_grad_norm_(context_id, 1.0)
            optimizer.step(context_id)
        scheduler.step()
        losses.append(loss.item())
        if rank == 0 and step % (num_steps // 5) == 0:
            print(f"step {step:4d}   loss {losses[-1]:.3f}", flush=True)
    rate = num_steps * BATCH / (time.perf_counter() - started)
    tenth = num_steps // 10
    first, last = sum(losses[:tenth]) / tenth, sum(losses[-tenth:]) / tenth
    # One write, so that the lines of two trainers do not mix.
    print(f"{TRAINERS[rank]}: loss {first:.3f} -> {last:.3f}, {rate:.0f} examples/s\n", end="", flush=True)


def run(rank: int, folder: str, num_steps: int) -> None:
    torch.set_num_threads(1)
    names = TRAINERS + SERVERS
    # On one host the workers can meet in a file: no port to choose, and nothing that listens.
    with remote.init(names[rank], rank, len(names), store=dist.FileStore(f"{folder}/rpc", len(names))):
        if rank < len(TRAINERS):
            store = dist.FileStore(f"{folder}/trainers", len(TRAINERS))
            dist.init_process_group("gloo", store=store, rank=rank, world_size=len(TRAINERS))
            train(rank, dist.group.WORLD, num_steps)
            dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (folder, parser.parse_args().steps), nprocs=len(TRAINERS + SERVERS))


if __name__ == "__main__":
    main()
