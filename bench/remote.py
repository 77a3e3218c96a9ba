"""How long does a step of DistributedOptimizer take, compared with torch's, and how many can an owner bear?

*Latency*: one trainer, three owners with a hundred parameters each, one gradient context that both sides apply
again and again. *Throughput*: four trainers step at once on the same parameters of two owners, each with an
optimizer of its own; the gradients are all ones and the rate is 1, so the parameters count the updates, and
those that went missing are told. Both sides use one RPC session in the same processes, a block in turn.
"""

from __future__ import annotations

import logging
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
import torch.distributed.optim as torch_optim
import torch.distributed.rpc as rpc
from torch import optim

import phalanx.remote as remote
from bench import ranks
from bench.measure import Samples, interleave, ratio
from bench.table import Result, Row, options, present
from phalanx.launch.worker import Worker

OURS, TORCH = "phalanx", "torch"
NUM_PARAMS = 100
NUM_OWNERS, NUM_TRAINERS = 3, 4
STEPS_A_BLOCK = 20
OPTIMIZERS: dict[str, tuple[type[optim.Optimizer], dict[str, Any]]] = {
    "SGD": (optim.SGD, {"lr": 1e-3}),
    "SGD, momentum": (optim.SGD, {"lr": 1e-3, "momentum": 0.9}),
    "Adagrad": (optim.Adagrad, {"lr": 1e-3}),
    "Adam": (optim.Adam, {"lr": 1e-3}),
}

_HELD: list[torch.Tensor] = []


def hold(numel: int) -> list[Any]:
    """On an owner: make the parameters."""
    _HELD[:] = [torch.zeros(numel, requires_grad=True) for _ in range(NUM_PARAMS)]
    return [rpc.RRef(param) for param in _HELD]


def forward() -> torch.Tensor:
    """On an owner: a loss whose gradients are all ones."""
    return torch.stack([param.sum() for param in _HELD]).sum()


def held() -> list[float]:
    """On an owner: the first element of every parameter."""
    return [param[0].item() for param in _HELD]


def contender(name: str, kind: type[optim.Optimizer], params: list[Any], settings: dict[str, Any]) -> Any:
    """The optimizer under test."""
    made = remote.DistributedOptimizer if name == OURS else torch_optim.DistributedOptimizer
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return made(kind, params, **settings)


def gradients(context_id: int, owners: list[str]) -> None:
    """Fill the context with gradients on every owner."""
    losses = [rpc.rpc_async(owner, forward) for owner in owners]
    dist_autograd.backward(context_id, [torch.stack([loss.wait() for loss in losses]).sum()])


def time_latency(worker: Worker, numel: int, num_rounds: int, meeting: str) -> Any:
    """On rank 0, the trainer: milliseconds a step by optimizer, contender and round."""
    with _session(worker, meeting):
        if worker.rank:
            return None
        owners = [f"worker{rank}" for rank in range(1, worker.world)]
        params = [rref for owner in owners for rref in rpc.rpc_sync(owner, hold, args=(numel,))]
        found: dict[str, dict[str, tuple[float, ...]]] = {}
        with dist_autograd.context() as context_id:
            gradients(context_id, owners)
            for case, (kind, settings) in OPTIMIZERS.items():
                steps = {name: contender(name, kind, params, settings).step for name in (TORCH, OURS)}
                calls = {name: _bound(step, context_id) for name, step in steps.items()}
                samples = interleave(calls, num_rounds, STEPS_A_BLOCK, _pause)
                found[case] = {name: values.ms for name, values in samples.items()}
        return found


def time_throughput(worker: Worker, numel: int, num_rounds: int, meeting: str) -> Any:
    """On the trainers: milliseconds a block by contender; on rank 0 also the updates that went missing."""
    trainers = dist.new_group(list(range(NUM_TRAINERS)))
    with _session(worker, meeting):
        if worker.rank >= NUM_TRAINERS:
            return None
        owners = [f"worker{rank}" for rank in range(NUM_TRAINERS, worker.world)]
        shared: list[Any] = [None]
        if worker.rank == 0:
            shared = [[rref for owner in owners for rref in rpc.rpc_sync(owner, hold, args=(numel,))]]
        params = _share(shared[0], worker.rank)
        dist.barrier(trainers)
        made = {name: contender(name, optim.SGD, params, {"lr": 1.0}) for name in (TORCH, OURS)}
        missing = dict.fromkeys(made, 0.0)
        blocks: dict[str, list[float]] = {name: [] for name in made}
        with dist_autograd.context() as context_id:
            gradients(context_id, owners)
            for number in range(-1, num_rounds):
                for name in (TORCH, OURS) if number % 2 else (OURS, TORCH):
                    dist.barrier(trainers)
                    before = [rpc.rpc_sync(owner, held) for owner in owners]
                    dist.barrier(trainers)
                    started = time.perf_counter()
                    for _ in range(STEPS_A_BLOCK):
                        made[name].step(context_id)
                    dist.barrier(trainers)
                    elapsed = time.perf_counter() - started
                    after = [rpc.rpc_sync(owner, held) for owner in owners]
                    applied = torch.tensor(before) - torch.tensor(after)
                    missing[name] += float((NUM_TRAINERS * STEPS_A_BLOCK - applied).sum())
                    if number >= 0:
                        blocks[name].append(1e3 * elapsed)
        dist.barrier(trainers)
        return {"ms": blocks, "missing": missing}


_SHARED: list[Any] = []


def _receive(params: list[Any]) -> None:
    _SHARED[:] = params


def _share(params: list[Any] | None, rank: int) -> list[Any]:
    """Every trainer's RRefs of the parameters, sent by rank 0."""
    if params is not None:
        for trainer in range(1, NUM_TRAINERS):
            rpc.rpc_sync(f"worker{trainer}", _receive, args=(params,))
        return params
    while not _SHARED:
        time.sleep(0.01)
    return list(_SHARED)


def _session(worker: Worker, meeting: str) -> remote.Session:
    torch.set_num_threads(1)
    # Torch's class warns, through logging, of every optimizer that it cannot script.
    logging.getLogger("torch.distributed.optim").setLevel(logging.ERROR)
    store = dist.FileStore(meeting, worker.world)
    return remote.init(f"worker{worker.rank}", worker.rank, worker.world, store=store)


def _bound(step: Callable[[int], object], context_id: int) -> Callable[[], object]:
    return lambda: step(context_id)


def _pause() -> None:
    # Torch's step leaves messages about its RRefs behind; each side shall pay for its own.
    time.sleep(0.02)


def _run(world: int, function: str, numel: int, num_rounds: int) -> list[Any]:
    with tempfile.TemporaryDirectory(prefix="phalanx-bench-") as folder:
        meeting = str(Path(folder) / "meeting")
        arguments = {"numel": numel, "num_rounds": num_rounds, "meeting": meeting}
        return ranks.run(world, f"bench.remote:{function}", arguments)


def _latency_rows(numel: int, num_rounds: int) -> list[Row]:
    found = _run(1 + NUM_OWNERS, "time_latency", numel, num_rounds)[0]
    rows: list[Row] = []
    for case, by_name in found.items():
        ours, theirs = Samples(tuple(by_name[OURS])), Samples(tuple(by_name[TORCH]))
        share = ratio(ours, theirs)
        name = f"{case}, {NUM_PARAMS} × {numel} on each of {NUM_OWNERS}"
        rows.append(Row(name, ours.median, theirs.median, share.median, share.low, share.high, target=0.8))
    return rows


def _throughput_row(num_rounds: int, notes: list[str]) -> Row:
    numel = 256
    found = _run(NUM_TRAINERS + 2, "time_throughput", numel, num_rounds)[0]
    num_updates = NUM_TRAINERS * STEPS_A_BLOCK
    rates = {name: Samples(tuple(1e3 * num_updates / ms for ms in blocks)) for name, blocks in found["ms"].items()}
    share = ratio(rates[OURS], rates[TORCH])
    lost = {name: round(count) for name, count in found["missing"].items()}
    notes.append(
        f"updates of single parameters lost with {NUM_TRAINERS} trainers at once: "
        f"phalanx {lost[OURS]}, torch {lost[TORCH]}"
    )
    return Row.of_rates(
        f"SGD, {NUM_TRAINERS} trainers at once on 2 owners",
        rates[OURS].median,
        rates[TORCH].median,
        (share.median, share.low, share.high),
        target=1 / 1.2,
        note=f"{lost[OURS]} lost",
    )


def measure(num_rounds: int = 11, numels: tuple[int, ...] = (256, 4096)) -> Result:
    """Both questions, as a result to show or keep."""
    result = Result("remote", (__doc__ or "").splitlines()[0], OURS, TORCH)
    for numel in numels:
        result.rows += _latency_rows(numel, num_rounds)
    result.rows.append(_throughput_row(num_rounds, result.notes))
    return result


def main() -> None:
    parser = options("phalanx DistributedOptimizer beside torch's, over RPC")
    parser.add_argument("--rounds", type=int, default=11)
    parsed = parser.parse_args()
    present(measure(3 if parsed.quick else parsed.rounds), parsed)


if __name__ == "__main__":
    main()
