"""What `phalanx plan` prints: tables of buckets, memory and step time. Imports torch, so apart from the command."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from rich.table import Table
from torch import nn

from phalanx.cli.console import bytes_in_words, console
from phalanx.comm.collectives import Collectives
from phalanx.comm.group.direct import ShmCollectives
from phalanx.ddp.arguments import choose_caps, sparse_names
from phalanx.errors import ConfigError
from phalanx.launch.worker import threads_for
from phalanx.observe.calibrate import MOST_RANKS, calibrate, optimizer_state_bytes, resolve
from phalanx.observe.predict import ASSUMPTIONS, Calibration, Network, fewest_hosts, memory_rows, predict_step
from phalanx.plan.buckets import BucketPlan, build_plan
from phalanx.plan.params import specs_of

_SHOWN_BUCKETS = 24


@dataclass(frozen=True)
class Wanted:
    """The command's options."""

    worlds: tuple[int, ...]
    hosts: int | None
    gbit: float
    latency_us: float
    optimizer: str
    bucket_cap_mb: float | None
    bucket_view: bool
    backend: str | None


def show(target: str, wanted: Wanted, with_time: bool) -> int:
    """Print the prediction for the model that `target` names."""
    spread = {world: wanted.hosts or fewest_hosts(world, threads_for(1)) for world in wanted.worlds}
    uneven = next((world for world, over in spread.items() if world % over), None)
    if uneven is not None:
        raise ConfigError(f"{uneven} ranks cannot be spread evenly over {wanted.hosts} hosts. Choose a multiple.")
    optimizer_class = _optimizer(wanted.optimizer)
    built = resolve(target)
    together = all(over == 1 for over in spread.values())
    on_cpu = all(parameter.is_cpu for parameter in built.model.parameters())
    shared = together and on_cpu and wanted.backend in (None, "phalanx")
    plan = plan_model(built.model, wanted.bucket_cap_mb, (ShmCollectives if shared else Collectives).worthwhile_buckets)
    console().print(_plan_table(plan))
    state = optimizer_state_bytes(built.model.parameters(), optimizer_class)
    console().print(_memory_table(built.model, plan, state, wanted))
    if built.loss is None and with_time:
        console().print("[yellow]No step time:[/] the function returned no loss to measure.")
    elif with_time:
        local = max(world // over for world, over in spread.items())
        with console().status(f"measuring on {min(local, MOST_RANKS)} ranks"):
            measured = calibrate(target, local, wanted.optimizer, wanted.backend)
        console().print(_time_table(plan, measured, spread, Network(wanted.gbit, wanted.latency_us)))
    for line in ASSUMPTIONS:
        console().print(f"[dim]• {line}[/]")
    return 0


def plan_model(
    model: nn.Module, bucket_cap_mb: float | None, num_buckets: int = Collectives.worthwhile_buckets
) -> BucketPlan:
    """The plan that DistributedDataParallel would start with on a transport that likes `num_buckets`."""
    trainable = [(name, value) for name, value in model.named_parameters() if value.requires_grad]
    if not trainable:
        raise ConfigError("the model has no parameter that requires a gradient: there is nothing to plan")
    total_bytes = sum(value.numel() * value.element_size() for _, value in trainable)
    caps = choose_caps(bucket_cap_mb, None, total_bytes, num_buckets)
    return build_plan(specs_of(trainable, sparse_names(model)), caps)


def _optimizer(name: str) -> type[torch.optim.Optimizer]:
    found = getattr(torch.optim, name, None)
    if not isinstance(found, type) or not issubclass(found, torch.optim.Optimizer):
        raise ConfigError(f"torch.optim has no optimizer {name!r}, such as AdamW or SGD")
    return found


def _plan_table(plan: BucketPlan) -> Table:
    total = sum(bucket.num_bytes for bucket in plan.buckets)
    title = f"{len(plan.specs)} parameters, {bytes_in_words(total)} of gradients, plan {plan.hash[:12]}"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2), pad_edge=False)
    for name in ("bucket", "dtype", "parameters", "size"):
        table.add_column(name, justify="right")
    table.add_column("first … last")
    for bucket in plan.buckets[:_SHOWN_BUCKETS]:
        names = [plan.specs[slot.param].name for slot in bucket.slots]
        table.add_row(
            str(bucket.index),
            str(bucket.dtype).removeprefix("torch.") + (" sparse" if bucket.sparse else ""),
            str(len(names)),
            bytes_in_words(bucket.num_bytes),
            names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}",
        )
    if len(plan.buckets) > _SHOWN_BUCKETS:
        table.add_row("…", "", "", "", f"{len(plan.buckets) - _SHOWN_BUCKETS} more")
    return table


def _memory_table(model: nn.Module, plan: BucketPlan, state: int, wanted: Wanted) -> Table:
    planned = sum(bucket.num_bytes for bucket in plan.buckets)
    tensors = [*model.parameters(), *model.buffers()]
    other = sum(tensor.numel() * tensor.element_size() for tensor in tensors) - planned
    title = f"\nmemory a rank, {wanted.optimizer}"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2), pad_edge=False)
    for name in ("world", "", "parameters", "gradients", "optimizer", "total"):
        table.add_column(name, justify="right")
    for world in wanted.worlds:
        for row in memory_rows(plan, other, state, world, wanted.bucket_view):
            sizes = map(bytes_in_words, (row.parameters, row.gradients, row.state, row.total))
            table.add_row(str(world) if row.way == "DDP" else "", row.way, *sizes)
    return table


def _time_table(plan: BucketPlan, measured: Calibration, spread: dict[int, int], network: Network) -> Table:
    title = f"\nstep time of DDP, from {measured.world} ranks measured on {measured.backend}"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2), pad_edge=False)
    for name in ("world", "hosts", "step", "compute", "communication", "exposed", "efficiency"):
        table.add_column(name, justify="right")
    for world, hosts in spread.items():
        step = predict_step(plan, measured, world, hosts, network)
        parts = (step.step_s, step.compute_s, step.communication_s, step.exposed_s)
        table.add_row(str(world), str(hosts), *(f"{1e3 * part:.1f} ms" for part in parts), f"{step.efficiency:.0%}")
    return table
