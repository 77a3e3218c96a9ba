"""How does a step of phalanx compare with other ways to train the same model on the same ranks?

Two ranks, one compute thread each, AdamW, all sides interleaved in the same processes. Whoever shards is compared with
phalanx's DDP + ZeRO: FSDP2, which is part of torch, and DeepSpeed's ZeRO stage 1. torchft's DDP, which asks a quorum at
every step to survive lost replicas, is compared with phalanx's plain DDP. `make bench-peers` installs DeepSpeed and torchft
into an environment of their own; a peer that is not there or does not start is named below the table.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import phalanx
from bench import ranks
from bench.measure import Samples, interleave, ratio
from bench.models import CASES, Case
from bench.table import Result, Row, options, present
from phalanx.launch.worker import Worker

OURS, OURS_ZERO = "phalanx", "phalanx + ZeRO"
FSDP2, DEEPSPEED, TORCHFT = "FSDP2", "DeepSpeed ZeRO-1", "torchft"
MODULES = {FSDP2: "torch.distributed.fsdp", DEEPSPEED: "deepspeed", TORCHFT: "torchft"}
# Whom each peer is compared with.
RIVAL = {FSDP2: OURS_ZERO, DEEPSPEED: OURS_ZERO, TORCHFT: OURS}
MODELS = ("gpt-5m", "gpt-30m", "mlp")

Step = Callable[[], torch.Tensor]
"""One step; returns the loss before it."""


def installed() -> list[str]:
    """The peers that can be imported here."""
    return [name for name, module in MODULES.items() if importlib.util.find_spec(module)]


def ordinary(case: Case, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Step:
    """The training loop everybody writes."""

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = case.loss(model, batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def build_ours(case: Case, model: nn.Module, batch: Any, sharded: bool) -> Step:
    """DDP on shared memory where there is one, with the optimizer's state whole or divided."""
    backend = "phalanx" if "phalanx" in dist.Backend.backend_list else "gloo"
    group = dist.new_group(backend=backend)
    model = phalanx.DistributedDataParallel(model, process_group=group)
    if not sharded:
        return ordinary(case, model, torch.optim.AdamW(model.parameters(), lr=1e-3), batch)
    optimizer = phalanx.ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, process_group=group, overlap_with_ddp=True, lr=1e-3
    )
    return ordinary(case, model, optimizer, batch)


def build_fsdp2(case: Case, model: nn.Module, batch: Any) -> Step:
    """Parameters, gradients and state divided, each block a unit."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for child in getattr(model, "blocks", []):
        fully_shard(child, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return ordinary(case, model, torch.optim.AdamW(model.parameters(), lr=1e-3), batch)


def build_deepspeed(case: Case, model: nn.Module, batch: Any) -> Step:
    """State divided, on the default group."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 1},
            # Anything else clips, and trains differently.
            "gradient_clipping": 0.0,
            "zero_allow_untested_optimizer": True,
        },
    )

    def step() -> torch.Tensor:
        loss = case.loss(engine, batch)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


# The lighthouse of rank 0 and every rank's manager live as long as the rank.
_KEPT: list[Any] = []


def build_torchft(case: Case, model: nn.Module, batch: Any) -> Step:
    """Every rank a replica of its own, all of them needed for a step."""
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
    from torchft.coordination import LighthouseServer

    logging.getLogger("torchft").setLevel(logging.ERROR)
    rank, world = dist.get_rank(), dist.get_world_size()
    address = [""]
    if rank == 0:
        _KEPT.append(LighthouseServer(bind="127.0.0.1:0", min_replicas=world))
        address[0] = _KEPT[-1].address()
    dist.broadcast_object_list(address)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    manager = Manager(
        pg=ProcessGroupGloo(),
        load_state_dict=lambda state: None,
        state_dict=dict,
        min_replica_size=world,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=address[0],
        replica_id=f"rank{rank}",
        hostname="127.0.0.1",
        # All replicas begin with the same parameters here; nothing needs to be fetched.
        init_sync=False,
    )
    _KEPT.extend((store, manager))
    return ordinary(case, DistributedDataParallel(manager, model), Optimizer(manager, optimizer), batch)


BUILDERS: dict[str, Callable[[Case, nn.Module, Any], Step]] = {
    OURS: lambda case, model, batch: build_ours(case, model, batch, sharded=False),
    OURS_ZERO: lambda case, model, batch: build_ours(case, model, batch, sharded=True),
    FSDP2: build_fsdp2,
    DEEPSPEED: build_deepspeed,
    TORCHFT: build_torchft,
}


def attempt(name: str, case: Case, rank: int) -> tuple[Step | None, float, str]:
    """A warm contender and its loss, or the reason why it cannot take part."""
    torch.manual_seed(0)
    try:
        step = BUILDERS[name](case, case.build(), case.batch(torch.Generator().manual_seed(100 + rank)))
        return step, [step().item() for _ in range(4)][-1], ""
    except Exception as error:
        if name in (OURS, OURS_ZERO):
            raise
        traceback.print_exc()
        return None, 0.0, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def time_case(worker: Worker, case: str, num_rounds: int, peers: list[str]) -> Any:
    """On each rank: milliseconds a step by contender and round, and why a peer could not take part."""
    torch.set_num_threads(1)
    steps: dict[str, Step] = {}
    absent: dict[str, str] = {}
    losses: dict[str, float] = {}
    for name in (OURS, OURS_ZERO, *peers):
        step, loss, reason = attempt(name, CASES[case], worker.rank)
        if step is None:
            absent[name] = reason
        else:
            steps[name], losses[name] = step, loss
            # Who trains something else, or nothing, is not compared.
            if abs(loss - losses[OURS]) > 0.01 * abs(losses[OURS]):
                absent[name] = f"its loss after 4 steps is {loss:.4f}, ours {losses[OURS]:.4f}"
                del steps[name]
    found = interleave(steps, num_rounds, 2, dist.barrier)
    return {"ms": {name: list(samples.ms) for name, samples in found.items()}, "absent": absent}


def shut_down(worker: Worker) -> None:
    """End what torchft has started."""
    dist.barrier()
    for kept in reversed(_KEPT):
        end = getattr(kept, "shutdown", None)
        if end is not None:
            end()
    _KEPT.clear()


def compare(worker: Worker, case: str, num_rounds: int, peers: list[str]) -> Any:
    """`time_case`, leaving nothing running."""
    try:
        return time_case(worker, case, num_rounds, peers)
    finally:
        shut_down(worker)


def measure(models: list[str], num_rounds: int) -> Result:
    """All peers that take part here."""
    peers = installed()
    result = Result("peers", (__doc__ or "").splitlines()[0], "phalanx", "the other")
    for case in models:
        by_rank = ranks.run(2, "bench.peers:compare", {"case": case, "num_rounds": num_rounds, "peers": peers})
        spent = [found["ms"] for found in by_rank]
        # A step has ended when its slowest rank has.
        ms = {name: Samples(tuple(map(max, zip(*(one[name] for one in spent), strict=True)))) for name in spent[0]}
        for peer in (name for name in peers if name in ms):
            ours = RIVAL[peer]
            found = ratio(ms[ours], ms[peer])
            name = f"{case}: {ours} / {peer}"
            result.rows.append(Row(name, ms[ours].median, ms[peer].median, found.median, found.low, found.high))
        for peer, reason in by_rank[0]["absent"].items():
            result.notes.append(f"{case}: {peer} did not run here: {reason}")
    missing = [name for name in MODULES if name not in peers]
    if missing:
        result.notes.append(f"{' and '.join(missing)}: not installed in this environment; try `make bench-peers`")
    return result


def main() -> None:
    parser = options("phalanx beside FSDP2, DeepSpeed and torchft, two ranks")
    parser.add_argument("--case", action="append", choices=MODELS, help="only these models")
    parsed = parser.parse_args()
    # DeepSpeed writes and compiles where it likes; not into the user's home.
    with tempfile.TemporaryDirectory(prefix="phalanx-bench-") as folder:
        os.environ.setdefault("TORCH_EXTENSIONS_DIR", folder)
        present(measure(parsed.case or list(MODELS), 3 if parsed.quick else 11), parsed)


if __name__ == "__main__":
    main()
