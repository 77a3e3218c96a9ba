"""Several hosts: the same script, started on each with torchrun (or srun, or mpirun, or phalanx run).

On the first host, whose address the others can reach:

    torchrun --nnodes 2 --node-rank 0 --nproc-per-node 2 --master-addr head --master-port 29500 examples/two_hosts.py

and on the second:

    torchrun --nnodes 2 --node-rank 1 --nproc-per-node 2 --master-addr head --master-port 29500 examples/two_hosts.py

Nothing in the script changes: `phalanx.init()` reads where the ranks are.
"""

import socket

import torch
from torch import nn

import phalanx


def main() -> None:
    worker = phalanx.init()
    torch.manual_seed(0)
    model = phalanx.DistributedDataParallel(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(100 + worker.rank)
    for _ in range(40):
        x = torch.randn(32, 8)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(
        f"rank {worker.rank} of {worker.world}, {worker.local_rank} of {worker.local_world} on "
        f"{socket.gethostname()}: weight sum {model.module.weight.sum().item():.4f}"
    )


if __name__ == "__main__":
    main()
