"""What an elastic run must have come to, computed again by one process from what its ranks wrote down."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import torch

from tests.elastic.program import Plan, after_step, checksum, loss_of, make_data, make_net, make_optimizer, make_scheduler

Record = dict[str, Any]


def committed_records(folder: Path) -> dict[int, list[Record]]:
    """By step, the batches that it was made of: those of the last generation that began it."""
    by_step: dict[int, list[Record]] = defaultdict(list)
    for path in folder.glob("records-*"):
        for line in path.read_text().splitlines():
            record = json.loads(line)
            by_step[record["step"]].append(record)
    for step, records in by_step.items():
        last = max(record["generation"] for record in records)
        by_step[step] = sorted(
            (record for record in records if record["generation"] == last), key=lambda one: (one["micro"], one["rank"])
        )
    return dict(sorted(by_step.items()))


def check_records(plan: Plan, steps: dict[int, list[Record]], num_steps: int) -> None:
    """Steps without a gap, by all ranks of their generation, and each sample once per epoch."""
    assert list(steps)[:num_steps] == list(range(1, num_steps + 1)), f"steps {list(steps)}, {num_steps} were committed"
    assert len(steps) - num_steps <= (plan.accumulate > 1), "a step was begun after the last one"
    for step, records in steps.items():
        if step > num_steps:
            continue
        worlds = {record["world"] for record in records}
        assert len(worlds) == 1, f"step {step} was made by worlds of {worlds}"
        (world,) = worlds
        expected = [(micro, rank) for micro in range(plan.accumulate) for rank in range(world)]
        assert [(one["micro"], one["rank"]) for one in records] == expected, f"step {step}: {records}"
    used: dict[int, Counter[int]] = defaultdict(Counter)
    for records in steps.values():
        for record in records:
            if record["count"]:
                used[record["epoch"]].update(record["ids"])
    if not plan.has_loader:
        return
    assert sorted(used) == list(range(plan.epochs))
    for epoch, counts in used.items():
        wrong = {sample: counts[sample] for sample in range(plan.samples) if counts[sample] != 1}
        assert not wrong, f"epoch {epoch}: samples used another number of times than once: {wrong}"


def check_random_numbers(folder: Path) -> None:
    """A worker draws the same in every attempt at a step, and nothing twice."""
    for path in folder.glob("records-*"):
        drawn: dict[tuple[int, int], float] = {}
        for line in path.read_text().splitlines():
            record = json.loads(line)
            place = record["step"], record["micro"]
            assert drawn.setdefault(place, record["noise"]) == record["noise"], f"{path.name}: step {place} drew anew"
        assert len(set(drawn.values())) == len(drawn), f"{path.name}: a random number came twice"


def check_commits(folder: Path) -> None:
    """Whoever begins a step has committed the one before it, and never makes that one again."""
    for path in folder.glob("records-*"):
        steps = [json.loads(line)["step"] for line in path.read_text().splitlines()]
        assert steps == sorted(steps), f"{path.name}: a committed step was undone: {steps}"


def compute(plan: Plan, steps: dict[int, list[Record]], num_steps: int) -> tuple[dict[str, torch.Tensor], dict[int, Any]]:
    """The parameters after all committed steps, and the buffers of each worker."""
    net, data = make_net(plan), make_data(plan)
    params = list(net.parameters())
    optimizer = make_optimizer(plan, params, sharded=False)
    scheduler = make_scheduler(plan, optimizer)
    buffers: dict[int, list[torch.Tensor]] = {}
    # Of rank 0 in the step before: what one takes who has just come and is rank 0 at once, all others being lost.
    latest = [buffer.clone() for buffer in net.buffers()]
    for step in range(1, num_steps + 1):
        total = [torch.zeros_like(param) for param in params]
        weight = sum(record["count"] for record in steps[step] if record["micro"] == plan.accumulate - 1)
        for record in steps[step] if is_exact(plan) else ():
            difference = abs(record["before"] - checksum(params))
            assert difference < 1e-6, f"step {step} of generation {record['generation']} began elsewhere, by {difference}"
        for micro in range(plan.accumulate):
            records = [record for record in steps[step] if record["micro"] == micro]
            # Before each forward everybody takes the buffers of rank 0.
            begin = buffers.get(records[0]["worker"], latest)
            for record in records:
                _set(net, begin)
                loss = loss_of(net, data[record["ids"]], record["noise"]) / plan.accumulate
                for sum_, grad in zip(total, torch.autograd.grad(loss, params), strict=True):
                    sum_ += grad * (record["count"] / weight)
                buffers[record["worker"]] = [buffer.clone() for buffer in net.buffers()]
            latest = buffers[records[0]["worker"]]
        for param, grad in zip(params, total, strict=True):
            param.grad = grad
        for one in optimizer.values() if isinstance(optimizer, dict) else [optimizer]:
            one.step()
        after_step(plan, optimizer, params)
        if scheduler is not None:
            scheduler.step()
    return {name: param.detach() for name, param in net.named_parameters()}, buffers


def is_exact(plan: Plan) -> bool:
    """Whether only rounding in double precision lies between a run and its reference."""
    return plan.model in ("plain", "norm")


def _set(net: torch.nn.Module, values: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for buffer, value in zip(net.buffers(), values, strict=True):
            buffer.copy_(value)


def check_parameters(plan: Plan, folder: Path, steps: dict[int, list[Record]], results: dict[int, Any]) -> float:
    """Every rank has what the steps give. Returns the largest difference."""
    num_steps = next(iter(results.values()))["step"]
    params, buffers = compute(plan, steps, num_steps)
    # Means of two or three are rounded, in double precision; the others by what they are.
    limit = {"low": 0.1, "hook:half": 0.02, "hook:int8": 0.05, "hook:powersgd": 0.2}.get(plan.model, 1e-7)
    largest = 0.0
    for worker in results:
        state = torch.load(folder / f"model-{worker}")
        for name, param in params.items():
            largest = max(largest, float((state[name] - param).abs().max()))
        if plan.model == "norm" and worker in buffers:
            names = [name for name in state if name not in params]
            for name, value in zip(names, buffers[worker], strict=True):
                assert torch.allclose(state[name].double(), value.double(), rtol=1e-6, atol=1e-6), f"{name} of {worker}"
    assert largest < limit, f"parameters differ by {largest} from those of the same steps"
    return largest
