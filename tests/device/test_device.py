"""Steps on a simulated device: none waits for the device on the host, and nothing is read before it is written.

What is simulated and what that proves: docs/design/devices.md.
"""

from __future__ import annotations

import functools
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import phalanx
from phalanx.cli.run import parse_workers
from phalanx.comm import hooks
from phalanx.comm.group.devices import DeviceBackends
from phalanx.comm.group.direct import collectives_of
from phalanx.comm.group.process_group import PhalanxProcessGroup
from phalanx.launch import worker
from phalanx.launch.environment import Environment

from .group import SimGroup
from .mistakes import FUTURE_MISTAKE, MISTAKES, Verdict, judge
from .mixtures import MIXTURES, WAITING
from .process import on_device
from .scenarios import SCENARIOS, Finding, observe

# A few on rank 0 too, which broadcasts where the others receive.
_AS_SOURCE = ("ddp plain", "ddp views", "hook fp16", "zero alone, by parameter", "zero overlapped")
_ALL = {**SCENARIOS, **MIXTURES, **WAITING}
# Several features together, each of which has a scenario of its own as well; but for the models of other dtypes.
_CROSSED = {name: mixture for name, mixture in MIXTURES.items() if "," in name and " model" not in name}
_OTHERS = {name: step for name, step in {**MIXTURES, **WAITING}.items() if name not in _CROSSED}


def _observe_all(names: list[str]) -> dict[str, Finding]:
    return {name: observe(name, _ALL[name]) for name in names}


@functools.cache
def _findings(rank: int, names: tuple[str, ...]) -> dict[str, Finding]:
    found: dict[str, Finding] = on_device(_observe_all, list(names), rank=rank)
    return found


def _finding(rank: int, name: str) -> Finding:
    """From one process for all scenarios of a kind: each alone would spend more time on starting."""
    kind = next(kind for kind in (SCENARIOS, _OTHERS, _CROSSED) if name in kind)
    return _findings(rank, tuple(kind) if rank else _AS_SOURCE)[name]


def _marked(cases: list[tuple[int, str]]) -> list[Any]:
    return [pytest.param(*case, marks=pytest.mark.thorough if case[1] in _CROSSED else ()) for case in cases]


_CASES = [(1, name) for name in _ALL] + [(0, name) for name in _AS_SOURCE]


@pytest.mark.parametrize(("rank", "name"), _marked(_CASES))
def test_scenario_trains_on_the_device(rank: int, name: str) -> None:
    finding = _finding(rank, name)
    assert finding.error is None, finding.error
    assert finding.num_operations > 20 * finding.num_steps, "the device was hardly used"


@pytest.mark.parametrize(("rank", "name"), _marked([case for case in _CASES if case[1] not in WAITING]))
def test_steady_steps_do_not_wait_for_the_device(rank: int, name: str) -> None:
    finding = _finding(rank, name)
    assert finding.error is None and not finding.syncs, "\n".join(f"{n} x {where}" for where, n in finding.syncs.items())


@pytest.mark.parametrize(("rank", "name"), _marked(_CASES))
def test_accesses_are_ordered_by_streams(rank: int, name: str) -> None:
    finding = _finding(rank, name)
    assert finding.error is None and not finding.races, "\n".join(f"{n} x {race}" for race, n in finding.races.items())


# ---- controls


@functools.cache
def _verdicts() -> dict[str, Verdict]:
    found: dict[str, Verdict] = on_device(judge, list(MISTAKES))
    return found


@pytest.mark.thorough  # which look at the simulation, not at the package
@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_of_order_is_noticed(name: str) -> None:
    verdict = _verdicts()[name]
    assert verdict.error is None, verdict.error
    assert verdict.num_fired, "the mistake was not made: the code that it changes has moved"
    assert verdict.new_races, f"{MISTAKES[name].scenario} with this mistake has no race that it has not without"


def test_hook_future_that_is_not_waited_for_is_noticed() -> None:
    verdict = on_device(judge, ["future"])["future"]
    assert verdict.num_fired and verdict.new_races, f"{FUTURE_MISTAKE.scenario}: no wait that could be left out"


def _chosen() -> tuple[str, str, int]:
    environment = Environment("test", rank=0, world=1, local_rank=0, local_world=1)
    device = worker._choose_device(environment, None)
    return str(device), worker._choose_backend(environment, device), parse_workers("auto")


def test_init_takes_the_device_that_c10d_has_a_backend_for() -> None:
    assert on_device(_chosen) == ("sim:0", "cpu:gloo,sim:simccl", 1)


def _beside_phalanx() -> tuple[list[float], list[float], int]:
    """A group of shared memory whose device tensors go to the device's own backend."""
    group = PhalanxProcessGroup(dist.HashStore(), 0, 1, [0], timedelta(seconds=10))
    device_group = SimGroup(dist.HashStore(), 0, 1)
    launched = []

    def of_device(_: Any, device: torch.device) -> SimGroup:
        launched.append(device)
        return device_group

    with mock.patch.object(DeviceBackends, "_make", of_device):
        collectives = collectives_of(group)
        assert collectives is not None
        x = torch.ones(8).to("sim")
        out = torch.zeros(8).to("sim")
        for work in (
            collectives.all_reduce(x, 0.5),
            collectives.reduce_scatter(out, x, 4.0),
            collectives.all_gather(out, x),
            collectives.broadcast(x, 0),
        ):
            work.wait()
    group.shutdown()
    return x.cpu().tolist(), out.cpu().tolist(), len(launched)


def test_device_tensors_of_a_phalanx_group_go_to_the_backend_of_their_device() -> None:
    assert on_device(_beside_phalanx) == ([2.0] * 8, [2.0] * 8, 1)


def _forgets_nan(name: str) -> list[bool]:
    """Whether gradients are finite: with NaN in one input, and with a sound one afterwards. Nobody steps in between."""
    make_state, hook = _FEEDBACK[name]
    ddp = phalanx.DistributedDataParallel(torch.nn.Linear(64, 64).to("sim"))
    ddp.register_comm_hook(make_state(), hook)
    seen = []
    for spoilt in (False, False, False, True, False):
        x = torch.ones(2, 64)
        x[0, 5] = torch.nan if spoilt else 1.0
        ddp.zero_grad()
        ddp(x.to("sim")).square().mean().backward()
        seen.append(all(bool(param.grad.cpu().isfinite().all()) for param in ddp.parameters()))
    return seen


_FEEDBACK: dict[str, Any] = {
    "int8": (hooks.Int8State, hooks.int8_hook),
    "topk": (functools.partial(hooks.TopKState, ratio=0.1), hooks.topk_hook),
    "powersgd": (functools.partial(hooks.PowerSGDState, start_powerSGD_iter=2), hooks.powerSGD_hook),
}


def _forgetting() -> dict[str, list[bool]]:
    return {name: _forgets_nan(name) for name in _FEEDBACK}


def test_hooks_show_nan_and_forget_it_without_asking_the_device() -> None:
    assert on_device(_forgetting) == {name: [True, True, True, False, True] for name in _FEEDBACK}


def _host_reads() -> dict[str, list[str]]:
    from .memory import ledger
    from .streams import Event, Stream, current_stream

    def masked(x: torch.Tensor) -> object:
        return x[x > 0]

    def waits(x: torch.Tensor) -> object:
        return torch.distributed.all_reduce(x, async_op=True).wait(torch.distributed.default_pg_timeout)

    reads: dict[str, Any] = {
        "item": lambda x: x.sum().item(),
        "float": lambda x: float(x[0]),
        "tolist": lambda x: x.tolist(),
        "bool": lambda x: bool(x.isfinite().all()),
        "equal": lambda x: torch.equal(x, x),
        "nonzero": lambda x: x.nonzero(),
        "mask": masked,
        "cpu": lambda x: x.cpu(),
        "copy into pageable memory": lambda x: torch.empty(8).copy_(x, non_blocking=True),
        "tensor from a list": lambda x: torch.tensor([1.0, 2.0], device=x.device),
        "blocking copy from pinned memory": lambda x: x.copy_(torch.zeros(8, pin_memory=True)),
        "copy from pageable memory": lambda x: x.copy_(torch.zeros(8), non_blocking=True),
        "wait with a limit": waits,
        "barrier": lambda x: torch.distributed.barrier(),
        "synchronize the device": lambda x: torch.accelerator.synchronize(),
        "synchronize a stream": lambda x: current_stream().synchronize(),
        "synchronize an event": lambda x: current_stream().record_event().synchronize(),
    }
    free: dict[str, Any] = {
        "arithmetic": lambda x: x.add_(1).mul(2).sum(),
        "fill by index": lambda x: x.__setitem__(3, 1.0),
        "pinned copy to the device": lambda x: x.copy_(torch.zeros(8, pin_memory=True), non_blocking=True),
        "pinned copy to the host": lambda x: torch.zeros(8, pin_memory=True).copy_(x, non_blocking=True),
        "wait": lambda x: torch.distributed.all_reduce(x, async_op=True).wait(),
        "query": lambda x: Event().query(),
        "streams": lambda x: Stream().wait_stream(current_stream()),
    }
    found = {}
    for name, act in (reads | free).items():
        x = torch.ones(8).to("sim")
        ledger.reset()
        act(x)
        found[name] = [sync.kind for sync in ledger.syncs]
    return {"reads": [n for n in reads if not found[n]], "free": [n for n in free if found[n]]}


def test_every_kind_of_host_read_is_counted_and_nothing_else_is() -> None:
    assert on_device(_host_reads) == {"reads": [], "free": []}


def _late_copy() -> list[Any]:
    from .memory import ledger
    from .streams import Event, arrive

    target = torch.zeros(4, pin_memory=True)
    target.copy_(torch.arange(4.0).to("sim"), non_blocking=True)
    event = Event()
    event.record()
    early = target.isnan().all().item()
    polls = [event.query(), event.query()]
    source = torch.zeros(4, pin_memory=True)
    device = torch.empty(4, device="sim")
    ledger.reset()
    device.copy_(source, non_blocking=True)
    source.fill_(1.0)
    arrive(everything=True)
    return [early, polls, target.tolist(), [race.kind for race in ledger.races]]


def test_pinned_memory_arrives_with_its_event_and_may_not_be_overwritten_before() -> None:
    assert on_device(_late_copy) == [True, [False, True], [0.0, 1.0, 2.0, 3.0], ["pinned source overwritten"]]
