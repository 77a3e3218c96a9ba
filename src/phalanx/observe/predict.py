"""What a training run will need, before it is run: memory a rank, and the time of a step. Pure.

Memory is arithmetic over the plan. Time is a simulation of one step from a `Calibration` measured on this
machine: buckets become ready when their last gradient was seen to, travel one after the other, and what does
not fit under backward is waited for. Assumptions are listed in `ASSUMPTIONS` and printed with every prediction.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from phalanx.errors import ConfigError
from phalanx.plan.buckets import BucketPlan
from phalanx.plan.shards import shard_numel

ASSUMPTIONS = (
    "Every rank computes as fast as those that were measured here; where ranks outnumber cores they share them.",
    "Collectives of one rank run one after the other, in plan order.",
    "Between hosts: one lead a host, a ring over the hosts, the bandwidth and latency given; nobody else uses it.",
    "Activations, the allocator's slack and Python itself (about 0.3 GB a rank) are not part of the memory.",
)


@dataclass(frozen=True)
class MemoryRow:
    """Bytes a rank holds under one way of training; of the fullest rank where they differ."""

    way: str
    parameters: int
    gradients: int
    state: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.state


def memory_rows(plan: BucketPlan, other_bytes: int, state_bytes: int, world: int, bucket_view: bool) -> list[MemoryRow]:
    """DDP, ZeRO-1 and ZeRO-2 side by side.

    `other_bytes` are buffers and frozen parameters, `state_bytes` what the optimizer holds for all
    parameters. Without `bucket_view`, gradients are held twice: as `.grad` and in the buckets. ZeRO-2 steps
    in backward: buckets share the memory of one, since each has been used when the next one is packed.
    """
    if world < 1:
        raise ConfigError(f"a world has at least one rank, got {world}")
    gradients = sum(bucket.num_bytes for bucket in plan.buckets)
    parameters = gradients + other_bytes
    sliced = sum(shard_numel(b.numel, world) * b.dtype.itemsize for b in plan.buckets)
    share = sliced / gradients if gradients else 1.0
    held = gradients if bucket_view else 2 * gradients
    largest = max((bucket.num_bytes for bucket in plan.buckets), default=0)
    return [
        MemoryRow("DDP", parameters, held, state_bytes),
        MemoryRow("ZeRO-1", parameters, held, round(state_bytes * share)),
        MemoryRow("ZeRO-2", parameters, largest, round(state_bytes * share)),
    ]


@dataclass(frozen=True)
class Calibration:
    """One machine's speed with one model: seconds, measured on `world` ranks at once."""

    world: int
    cores: int
    backend: str
    forward_s: float
    backward_s: float
    optimizer_s: float
    ready: tuple[float, ...]
    """For each parameter in the plan's order of specs, the share of backward after which its gradient is there."""
    transfers: tuple[tuple[int, float], ...]
    """(bytes, seconds) of all-reduces by themselves, increasing."""
    overlap: float
    """1 when a collective under compute costs compute nothing, 0 when it costs all its time."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(value: dict[str, Any]) -> Calibration:
        pairs = tuple((int(size), float(seconds)) for size, seconds in value["transfers"])
        return Calibration(**{**value, "ready": tuple(value["ready"]), "transfers": pairs})


@dataclass(frozen=True)
class Network:
    """What joins the hosts."""

    gbit_per_s: float = 10.0
    latency_us: float = 30.0

    def ring_s(self, num_bytes: int, hosts: int) -> float:
        """An all-reduce between one lead a host."""
        if hosts == 1:
            return 0.0
        sent = 2 * (hosts - 1) / hosts * num_bytes
        return 2 * (hosts - 1) * self.latency_us * 1e-6 + sent * 8 / (self.gbit_per_s * 1e9)


@dataclass(frozen=True)
class StepPrediction:
    """One step of one world, in seconds."""

    world: int
    hosts: int
    compute_s: float
    communication_s: float
    exposed_s: float
    """The part of communication that makes the step longer."""

    @property
    def step_s(self) -> float:
        return self.compute_s + self.exposed_s

    @property
    def efficiency(self) -> float:
        """The share of the step that is compute."""
        return self.compute_s / self.step_s


def fewest_hosts(world: int, cores: int) -> int:
    """Over how many hosts like this one `world` ranks are spread evenly with a core each."""
    # By the ranks of a host, which are few however large the world is.
    return world // next(ranks for ranks in range(min(world, cores), 0, -1) if world % ranks == 0)


def transfer_s(transfers: Sequence[tuple[int, float]], num_bytes: int) -> float:
    """Seconds of a transfer, by straight lines between measured sizes, and the last one's speed beyond."""
    sizes = [size for size, _ in transfers]
    if num_bytes <= sizes[0]:
        return transfers[0][1]
    for (small, fast), (large, slow) in itertools.pairwise(transfers):
        if num_bytes <= large:
            return fast + (slow - fast) * (num_bytes - small) / (large - small)
    return transfers[-1][1] * num_bytes / sizes[-1]


def predict_step(
    plan: BucketPlan, measured: Calibration, world: int, hosts: int = 1, network: Network | None = None
) -> StepPrediction:
    """Simulate one step of plain DDP."""
    if world < 1 or hosts < 1 or world % hosts:
        raise ConfigError(f"{world} ranks cannot be spread evenly over {hosts} hosts. Choose a multiple.")
    network = network or Network()
    local = world // hosts
    # Both compute and collectives slow down once ranks share cores; the calibration includes its own sharing.
    crowding = max(1.0, local / measured.cores) / max(1.0, measured.world / measured.cores)
    forward, backward = measured.forward_s * crowding, measured.backward_s * crowding
    at = communication = hidden = 0.0
    for bucket in plan.buckets if world > 1 else ():
        inside = transfer_s(measured.transfers, bucket.num_bytes) * crowding if local > 1 else 0.0
        takes = inside + network.ring_s(bucket.num_bytes, hosts)
        ready = backward * max((measured.ready[slot.param] for slot in bucket.slots), default=1.0)
        start = max(at, ready)
        at = start + takes
        communication += takes
        hidden += max(0.0, min(at, backward) - start)
    stolen = hidden * (1 - measured.overlap)
    return StepPrediction(
        world,
        hosts,
        compute_s=forward + backward + measured.optimizer_s * crowding,
        communication_s=communication,
        exposed_s=max(0.0, at - backward) + stolen,
    )
