"""What a user of a device sees beside training steps: late checks, times, groups, checks before anything is kept.

Each test is one function in a process of the simulated device, several to a process: starting one costs more than they do.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import pickle
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import phalanx
from phalanx.cli.selftest import device as selftest
from phalanx.ddp.agreement import device_for
from phalanx.ddp.reducer.strategy import AllReduce
from phalanx.errors import MismatchError
from phalanx.launch import worker
from tests.ddp.by_hand import Breaks, BrokenLayer

from .process import on_device
from .scenarios import observe


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4)).to("sim")


def _wrapped(**options: Any) -> phalanx.DistributedDataParallel:
    return phalanx.DistributedDataParallel(_model(), bucket_cap_mb=0.0005, **options)


def _backward(ddp: nn.Module) -> None:
    ddp.zero_grad()
    ddp(torch.ones(4, 8).to("sim")).square().mean().backward()


@contextlib.contextmanager
def _ranks_out_of_step() -> Iterator[None]:
    """What leaves here says another step, as of a rank that has run one backward less."""
    launch = AllReduce.launch

    def spoilt(self: AllReduce, bucket: Any) -> None:
        bucket.tail_data[:16] = 1 - bucket.tail_data[:16]
        launch(self, bucket)

    with mock.patch.object(AllReduce, "launch", spoilt):
        yield


def _with_a_wrong_step(**options: Any) -> phalanx.DistributedDataParallel:
    """A wrapper whose last backward averaged what did not belong together, which nobody knows yet."""
    ddp = _wrapped(**options)
    for _ in range(3):
        _backward(ddp)
    with _ranks_out_of_step():
        _backward(ddp)
    return ddp


def _raised(act: Callable[[], Any]) -> str:
    try:
        act()
    except MismatchError as error:
        return str(error)
    return ""


def _gradients(ddp: nn.Module) -> list[bool]:
    return [bool(param.grad.cpu().isfinite().all()) for param in ddp.parameters()]


def _late() -> dict[str, Any]:
    ddp = _with_a_wrong_step()
    plain = _gradients(ddp)
    said = _raised(lambda: _backward(ddp))
    poisoned = _with_a_wrong_step(on_late_mismatch="poison")
    void = [bool(param.grad.cpu().isnan().all()) for param in poisoned.parameters()]
    told = _raised(lambda: _backward(poisoned))
    sound = _wrapped(on_late_mismatch="poison")
    for _ in range(4):
        with sound.weight(5.0):
            _backward(sound)
    zero_ddp = _wrapped(on_late_mismatch="poison")
    zero = phalanx.ZeroRedundancyOptimizer(zero_ddp.parameters(), torch.optim.SGD, lr=0.1, overlap_with_ddp=True)
    for _ in range(3):
        _backward(zero_ddp)
        zero.step()
    return {"finite": plain, "said": said, "void": void, "told": told, "sound": _gradients(sound)}


def _durable() -> dict[str, str]:
    """Who finds out without another backward."""
    found = {}
    ddp = _with_a_wrong_step()
    found["verify"] = _raised(ddp.verify)
    found["state_dict"] = _raised(_with_a_wrong_step().state_dict)
    ddp = _with_a_wrong_step()
    found["module.state_dict"] = _raised(ddp.module.state_dict)
    with tempfile.TemporaryDirectory() as folder:
        ddp = _with_a_wrong_step()
        with phalanx.Checkpointer(folder, ddp, process_group=None) as saver, _alone(saver):
            found["Checkpointer.save"] = _raised(lambda: saver.save(4))
        found["nothing written"] = "yes" if not list(Path(folder).iterdir()) else "no"
    ddp = _with_a_wrong_step()
    zero = phalanx.ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1)
    found["consolidate_state_dict"] = _raised(zero.consolidate_state_dict)
    ddp = _with_a_wrong_step()
    found["end of join"] = _raised(lambda: ddp.join_hook().post_hook(True))
    ddp = _with_a_wrong_step()
    found["copies"] = str(type(pickle.loads(pickle.dumps(copy.deepcopy(ddp.module).cpu()))).__name__)
    with mock.patch.object(dist, "destroy_process_group") as left:
        found["leave"] = _raised(worker.leave)
        found["left"] = str(left.called)
    return found


@contextlib.contextmanager
def _alone(saver: Any) -> Iterator[None]:
    """One process stands for all ranks, whose texts nobody else writes."""
    with mock.patch.object(saver._agreement, "_store", None):
        yield


def _times() -> dict[str, Any]:
    ddp = _wrapped()
    for _ in range(4):
        _backward(ddp)
    stats = ddp.stats()
    logged = ddp._get_ddp_logging_data()
    return {
        "step": stats.step,
        "in order": all(0 <= b.ready_ms <= b.launched_ms <= b.finished_ms for b in stats.buckets),
        "finished": [b.finished_ms > 0 for b in stats.buckets],
        "logged": logged["avg_backward_comm_time"] > 0,
    }


class _Unused(nn.Module):
    """Its output needs no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, uses: bool) -> torch.Tensor:
        out: torch.Tensor = self.inner(x) if uses else x * 2
        return out


class _Opaque(nn.Module):
    """Keeps its loss where no wrapper looks, and computes it again in backward, by a backward inside backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> None:
        self.loss = checkpoint(self.second, self.first(x), use_reentrant=True).square().mean()


def _threads_of_the_engine() -> dict[str, Any]:
    """Autograd calls hooks in a thread of the device, whose stack does not reach back to `backward()`."""
    ddp = phalanx.DistributedDataParallel(_Unused().to("sim"), on_unused="ignore")
    x = torch.ones(2, 8).to("sim").requires_grad_()
    for _ in range(2):
        ddp(x, True).sum().backward()
    before = ddp.reducer.step
    ddp(x, False).sum().backward()
    torch.autograd.grad(ddp(x, False).sum(), x)
    owed = ddp.reducer.step - before
    opaque = phalanx.DistributedDataParallel(_Opaque().to("sim"))
    gradients = []
    for _ in range(3):
        opaque.zero_grad()
        opaque(torch.ones(2, 8).to("sim"))
        opaque.module.loss.backward()
        gradients.append([param.grad is not None for param in opaque.parameters()])
    return {"owed": owed, "opaque steps": opaque.reducer.step, "gradients": gradients}


def _nonfinite() -> dict[str, Any]:
    ddp = _wrapped(on_nonfinite="skip")
    for _ in range(3):
        _backward(ddp)
    ddp.zero_grad()
    with pytest.warns(UserWarning, match="NaN or infinite"):
        ddp(torch.full((4, 8), torch.nan).to("sim")).square().mean().backward()
    return {"dropped": [param.grad is None for param in ddp.parameters()]}


def _given_up() -> dict[str, Any]:
    """A backward that raises on every rank, before each one that goes well; and an optimizer without a wrapper."""

    def failing() -> Callable[[torch.Tensor], None]:
        ddp = _wrapped()

        def step(_: torch.Tensor) -> None:
            handle = ddp.module[0].register_forward_hook(lambda _, inputs, output: Breaks.apply(output))
            with contextlib.suppress(BrokenLayer):
                _backward(ddp)
            handle.remove()
            _backward(ddp)

        return step

    def unnamed() -> Callable[[torch.Tensor], None]:
        zero = phalanx.ZeroRedundancyOptimizer(_model().parameters(), torch.optim.SGD, lr=0.1)
        return lambda _: zero.step()

    found = [observe("given up", failing), observe("unnamed", unnamed)]
    return {"races": [one.races for one in found], "errors": [one.error for one in found]}


def _without_set_device() -> dict[str, Any]:
    """A group for the device alone, parameters on its second one, and the first one current as nobody has set it."""
    group = dist.group.WORLD
    second = torch.device("sim", 1)
    served = {device.type for device in group._device_types}
    return {"served": served, "messages": str(device_for(group, second)), "current": torch.sim.current_device()}


def _composite() -> dict[str, Any]:
    """The device's own backend beside shared memory, as c10d makes such a group by name."""
    store = dist.HashStore()
    dist.destroy_process_group()
    dist.init_process_group("cpu:phalanx,sim:simccl", store=store, rank=0, world_size=1)
    ddp = _wrapped()
    for _ in range(3):
        _backward(ddp)
    ddp.verify()
    told = torch.ones(4)
    dist.all_reduce(told)
    return {"finite": _gradients(ddp), "cpu": told.tolist()}


def _selftest() -> dict[str, float]:
    place = selftest.Place(dist.get_rank(), dist.get_world_size(), torch.device("sim", 0), alike=True)
    # What this rank gathers of the other one's slices is its own: there is nothing to compare of ZeRO.
    return {way.name: selftest.train(way, place) for way in selftest.WAYS if way.zero is None}


_FUNCTIONS: dict[str, Callable[[], Any]] = {
    "late": _late,
    "durable": _durable,
    "times": _times,
    "threads": _threads_of_the_engine,
    "nonfinite": _nonfinite,
    "given up": _given_up,
    "without set_device": _without_set_device,
    "composite": _composite,  # last: it leaves the group that the others use
}


def _all() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, function in _FUNCTIONS.items():
        try:
            found[name] = function()
        except Exception as error:
            import traceback

            found[name] = f"{error!r} {traceback.format_exc()[-1500:]}"
    return found


@functools.cache
def _found() -> dict[str, Any]:
    found: dict[str, Any] = on_device(_all)
    return found


def test_mismatch_found_late_says_which_step_and_can_void_it() -> None:
    found = _found()["late"]
    assert found["finite"] == [True] * 4, "found one step late, and given out as if it were a mean"
    assert "step 3 (found later, at step 5)" in found["said"] and "not at the same step" in found["said"]
    assert found["void"] == [True] * 4, "the gradients of a step that is void are NaN on the device"
    assert "its means were made NaN" in found["told"]
    assert found["sound"] == [True] * 4, "weights are no mismatch"


def test_nothing_is_kept_before_the_last_step_was_judged() -> None:
    found = _found()["durable"]
    for asker in (
        *("verify", "state_dict", "module.state_dict", "Checkpointer.save"),
        *("consolidate_state_dict", "end of join", "leave"),
    ):
        assert "not at the same step" in found[asker], asker
    assert found["nothing written"] == "yes" and found["left"] == "True" and found["copies"] == "Sequential"


def test_buckets_are_timed_by_events_of_the_device() -> None:
    found = _found()["times"]
    assert found["step"] >= 1 and found["in order"] and all(found["finished"]) and found["logged"]


def test_hooks_in_the_devices_thread_know_which_pass_they_are_in() -> None:
    found = _found()["threads"]
    assert found["owed"] == 1, "backward() without gradients is reduced, autograd.grad is not"
    assert found["opaque steps"] == 3 and found["gradients"] == [[True] * 4] * 3


def test_nonfinite_gradients_are_dropped_in_the_same_step() -> None:
    assert _found()["nonfinite"] == {"dropped": [True] * 4}


def test_ranks_come_to_the_same_point_on_the_device_after_a_backward_that_raised() -> None:
    assert _found()["given up"] == {"races": [{}, {}], "errors": [None, None]}


def test_ranks_meet_on_the_device_of_their_parameters_not_on_the_current_one() -> None:
    assert _found()["without set_device"] == {"served": {"sim"}, "messages": "sim:1", "current": 0}


@pytest.mark.thorough  # the same on the CPU is in cli/test_commands.py
def test_selftest_of_the_doctor_trains_on_the_device() -> None:
    # As rank 0, whose model is not overwritten by what a receiver is said to have received.
    found = on_device(_selftest, rank=0)
    assert len(found) == sum(way.zero is None for way in selftest.WAYS)
    assert all(difference <= 1e-3 for difference in found.values()), found


def test_device_has_its_own_backend_beside_shared_memory() -> None:
    assert _found()["composite"] == {"finite": [True] * 4, "cpu": [1.0] * 4}
