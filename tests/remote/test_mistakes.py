"""Wrong arguments and failing optimizers: one clear error, every worker named, nothing left behind."""

from __future__ import annotations

import pickle
import time
from typing import Any

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import Tensor, optim

import phalanx.remote as remote
from phalanx.errors import ArgumentTypeError, ConfigError, RemoteError, StateError
from phalanx.remote.owner import num_owned
from tests.remote.world import layers_on, run_rpc, through, values_of, weights_of

WORKERS = ["worker0", "worker1", "worker2"]
SHAPES = [(4, 4)] * 3


def raised(kind: type[Exception], call: Any, *args: Any, **kwargs: Any) -> str:
    try:
        call(*args, **kwargs)
    except kind as error:
        return str(error)
    raise AssertionError(f"{kind.__name__} was not raised")


def owned_everywhere() -> list[int]:
    """How many optimizers each worker holds, when they have let go of those that nobody waited to be let go of."""
    deadline = time.monotonic() + 5.0
    while any(found := [rpc.rpc_sync(worker, num_owned) for worker in WORKERS]) and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


def constant() -> int:
    return 5


def computed() -> Tensor:
    return torch.ones(2, requires_grad=True) * 2


def broken() -> Tensor:
    raise ValueError("no such parameter")


def make_mistakes() -> None:
    params = weights_of(layers_on(WORKERS, SHAPES))
    make = remote.DistributedOptimizer
    assert "params_rref is empty" in raised(ConfigError, make, optim.SGD, [], lr=0.1)
    assert "params_rref[1] is a Tensor" in raised(ArgumentTypeError, make, optim.SGD, [params[0], torch.ones(1)])
    assert "RRef(param)" in raised(ArgumentTypeError, make, optim.SGD, [torch.ones(1)])
    for foreign in (5, "params", {"params": params}, params[0]):
        assert "expected a list" in raised(ArgumentTypeError, make, optim.SGD, foreign)
    assert "no parameters" in raised(ConfigError, make, optim.SGD, [{"params": []}])
    assert "expected a dict" in raised(ArgumentTypeError, make, optim.SGD, [{"params": params[:1]}, params[1]])
    assert "optimizer class" in raised(ArgumentTypeError, make, "SGD", params)
    text = raised(ConfigError, make, optim.SGD, [*params, params[1]], lr=0.1)
    assert "parameters 1 and 3 are the same tensor" in text and "worker1" in text
    text = raised(ConfigError, make, optim.SGD, [params[0], rpc.remote("worker2", computed)], lr=0.1)
    assert "parameter 1 is not a leaf" in text and "worker2" in text
    text = raised(ArgumentTypeError, make, optim.SGD, [rpc.remote("worker1", constant)], lr=0.1)
    assert "refers to a int" in text and "worker1" in text
    assert "no such parameter" in raised(RemoteError, make, optim.SGD, [rpc.remote("worker1", broken)], lr=0.1)
    text = raised(RemoteError, make, optim.SGD, params, lr=-1.0)
    assert "Invalid learning rate: -1.0" in text and "3 of 3 workers" in text and "ValueError" in text
    assert "momentun" in raised(RemoteError, make, optim.SGD, params, momentun=0.9)
    assert owned_everywhere() == [0, 0, 0]


def test_wrong_arguments_are_refused_with_clear_errors() -> None:
    run_rpc(3, make_mistakes)


class FailsOnTwo(optim.SGD):
    """Cannot be made on worker1 and worker2."""

    def __init__(self, params: Any, lr: float) -> None:
        name = rpc.get_worker_info().name
        if name != "worker0":
            raise ValueError(f"not on {name}, please")
        super().__init__(params, lr)


def fail_to_construct() -> remote.WorkersFailed:
    params = weights_of(layers_on(WORKERS, SHAPES))
    try:
        remote.DistributedOptimizer(FailsOnTwo, params, lr=0.1)
    except remote.WorkersFailed as error:
        assert owned_everywhere() == [0, 0, 0]
        return error
    raise AssertionError("nothing was raised")


def test_construction_fails_as_one_error_and_leaves_no_optimizer_behind() -> None:
    error = run_rpc(3, fail_to_construct)
    assert error.workers == ("worker1", "worker2")
    for name in error.workers:
        assert f"{name}: ValueError: not on {name}, please" in str(error)
    assert str(error).count('raise ValueError(f"not on {name}, please")') == 2


class FailsOnDemand(optim.SGD):
    """Raises in the middle of an update on workers whose lr is negative."""

    def step(self, closure: Any = None) -> None:
        super().step()
        if rpc.get_worker_info().name in self.param_groups[0].get("failing", ()):
            raise ValueError("Error running optimizer.")


def fail_to_step() -> remote.StepFailed:
    layers = layers_on(WORKERS, SHAPES)
    optimizer = remote.DistributedOptimizer(FailsOnDemand, weights_of(layers), lr=0.1)
    x = torch.ones(2, 4)
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [through(layers, x).sum()])
        optimizer.step(context_id)
        optimizer.param_groups[0]["failing"] = ("worker1", "worker2")
        try:
            optimizer.step(context_id)
        except remote.StepFailed as error:
            failed = error
        assert optimizer.applied_on(1) == {"worker0": True, "worker1": True, "worker2": True}
        assert optimizer.applied_on(failed.step) == {"worker0": True, "worker1": False, "worker2": False}
        optimizer.param_groups[0]["failing"] = ()
        timings = optimizer.step(context_id)
        assert set(timings) == set(WORKERS)
    return failed


def test_a_step_that_fails_on_two_owners_says_so_of_both() -> None:
    error = run_rpc(3, fail_to_step)
    assert (error.applied, error.failed, error.unknown) == (("worker0",), ("worker1", "worker2"), ())
    assert error.step == 2 and all(failure.touched for failure in error.failures)
    assert str(error).count("ValueError: Error running optimizer.") >= 2 and "Traceback" in str(error)


def misuse() -> None:
    layers = layers_on(WORKERS, SHAPES)
    optimizer = remote.DistributedOptimizer(optim.SGD, weights_of(layers), lr=0.1)
    with dist_autograd.context() as context_id:
        pass
    before = values_of(layers)
    for call in (optimizer.step, optimizer.accumulate, lambda context: optimizer.clip_grad_norm_(context, 1.0)):
        assert "is not open on this worker" in raised(ConfigError, call, context_id)
        assert "expected the int" in raised(ArgumentTypeError, call, "context")
    assert "needs a context" in raised(ConfigError, optimizer.step)
    with dist_autograd.context() as context_id:
        assert "timeout_s" in raised(ConfigError, optimizer.step, context_id, timeout_s=0)
        optimizer.param_groups[0]["params"].append("another")
        assert "add_param_group" in raised(ConfigError, optimizer.step, context_id)
        optimizer.param_groups[0]["params"].pop()
        optimizer.step(context_id)
    assert all(map(torch.equal, values_of(layers), before))
    assert "state_dict" in raised(ArgumentTypeError, pickle.dumps, optimizer)
    assert "state_dict" in raised(StateError, lambda: optimizer.state)
    # A group that fits on one owner and not on another is added nowhere.
    stray = weights_of(layers_on(["worker1"], SHAPES[:1]))
    held = optimizer.param_groups[0]["params"][2]
    assert "same tensor" in raised(ConfigError, optimizer.add_param_group, {"params": [*stray, held]})
    assert len(optimizer.param_groups) == 1 and len(optimizer.state_dict()["param_groups"]) == 1
    optimizer.add_param_group({"params": stray})
    assert len(optimizer.state_dict()["param_groups"]) == 2
    optimizer.close()
    assert "closed" in raised(ConfigError, optimizer.state_dict)


def test_misuse_is_refused_and_changes_nothing() -> None:
    run_rpc(3, misuse)
