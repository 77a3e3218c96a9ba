"""A model trained by phalanx.DistributedDataParallel through every hook, torch's and ours."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import DDPCommHookType, debugging_hooks, register_ddp_comm_hook

import phalanx
from phalanx.comm import hooks
from phalanx.errors import ConfigError
from tests.cluster import run_ranks
from tests.comm.hooks import test_average as own
from tests.comm.hooks import test_torch as torchs

pytestmark = pytest.mark.timeout(60)

STEPS = 12

# How far trained parameters may be from those trained without a hook, relative to how far training moved
# them. Hooks not named here compress to a tenth and less.
DRIFT = {
    "allreduce": 1e-5,
    "fp16": 5e-3,
    "bf16": 1e-2,
    "fp16_wrapper": 5e-3,
    "bf16_wrapper": 1e-2,
    "int8": 1e-2,
    "local_sgd": 1e-5,
    "batched_power_sgd": 1e-5,
    "quantised_per_tensor": 0.05,
    "quantised_per_channel": 0.05,
}


class Net(nn.Module):
    """Convolutions that lie as channels_last, and a layer that nobody calls in every second step."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))
        self.features.to(memory_format=torch.channels_last)
        self.hidden = nn.Linear(8 * 36, 32)
        self.extra = nn.Linear(32, 32)
        self.head = nn.Linear(32, 10)
        self.step = 0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.hidden(self.features(images).flatten(1)))
        if self.step % 2 == 0:
            hidden = hidden + torch.relu(self.extra(hidden))
        self.step += 1
        return self.head(hidden)


def _register(model: Any, whose: str, name: str) -> None:
    if whose == "none":
        return
    case = (own.CASES if whose == "own" else torchs.CASES)[name]
    model.register_comm_hook(case.make_state(), case.hook)


def _parameters_of(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def train(
    rank: int, world: int, whose: str = "none", name: str = "", as_view: bool = False
) -> tuple[list[float], torch.Tensor, torch.Tensor]:
    """Losses of every step, the parameters at the beginning and at the end."""
    torch.manual_seed(0)
    model = phalanx.DistributedDataParallel(Net(), bucket_cap_mb=0.005, gradient_as_bucket_view=as_view)
    _register(model, whose, name)
    start = _parameters_of(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(100 + rank)
    images, labels = torch.randn(16, 3, 6, 6), torch.randint(0, 10, (16,))
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, start, _parameters_of(model)


@pytest.fixture(scope="module")
def without_hook() -> tuple[list[float], torch.Tensor, torch.Tensor]:
    result: tuple[list[float], torch.Tensor, torch.Tensor] = run_ranks(2, train)[0]
    return result


ALL = [
    *(("own", name, nth % 2 == 0) for nth, name in enumerate(own.CASES)),
    # All but the optimizer, which steps parameters that the one of this test would step again.
    *(("torch", name, nth % 2 == 0) for nth, name in enumerate(torchs.CASES) if name != "optimizer"),
    *(pytest.param("own", name, nth % 2 == 1, marks=pytest.mark.thorough) for nth, name in enumerate(own.CASES)),
]


@pytest.mark.covering(1)
@pytest.mark.parametrize(("whose", "name", "as_view"), ALL)
def test_every_hook_trains_the_model_and_keeps_replicas_identical(
    whose: str, name: str, as_view: bool, without_hook: tuple[list[float], torch.Tensor, torch.Tensor]
) -> None:
    by_rank = run_ranks(2, train, whose, name, as_view)
    losses, start, end = by_rank[0]
    assert torch.equal(end, by_rank[1][2])
    expected_losses, _, expected = without_hook
    if name in DRIFT:
        drift = float((end - expected).norm() / (expected - start).norm())
        assert drift < DRIFT[name]
    learnt = (losses[0] - losses[-1]) / (expected_losses[0] - expected_losses[-1])
    assert learnt > 0.8


def train_with_noop(rank: int, world: int) -> torch.Tensor:
    torch.manual_seed(0)
    model = phalanx.DistributedDataParallel(nn.Linear(4, 4))
    model.register_comm_hook(None, debugging_hooks.noop_hook if rank else hooks.noop_hook)
    model(torch.full((2, 4), float(rank + 1))).sum().backward()
    assert model.module.weight.grad is not None
    return model.module.weight.grad.clone()


def test_noop_hooks_leave_every_rank_its_own_gradients() -> None:
    one, two = run_ranks(2, train_with_noop)
    assert torch.equal(2 * one, two) and bool((one == 2).all())


def train_by_enumeration(rank: int, world: int) -> list[str]:
    failed = []
    for kind in DDPCommHookType:
        torch.manual_seed(0)
        model = phalanx.DistributedDataParallel(Net(), bucket_cap_mb=0.005)
        register_ddp_comm_hook(kind, model, state=None)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(4, 3, 6, 6)).square().mean().backward()
            optimizer.step()
        if all(torch.equal(one, two) for one, two in zip(before, model.parameters(), strict=True)):
            failed.append(kind.name)
    return failed


def test_torchs_enumeration_of_hooks_registers_each_of_them() -> None:
    assert run_ranks(2, train_by_enumeration) == [[], []]


def train_saved_and_resumed(rank: int, world: int) -> bool:
    """Six steps at once, and three, a save of everything, and three more in a new wrapper."""

    def make(state: Any) -> tuple[Any, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = phalanx.DistributedDataParallel(nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 20)))
        model.register_comm_hook(state, hooks.topk_hook)
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(model: Any, optimizer: torch.optim.Optimizer, nth: int) -> None:
        generator = torch.Generator().manual_seed(10 * nth + rank)
        optimizer.zero_grad()
        model(torch.randn(8, 20, generator=generator)).square().mean().backward()
        optimizer.step()

    straight, straight_optimizer = make(hooks.TopKState(ratio=0.1))
    for nth in range(6):
        step(straight, straight_optimizer, nth)
    state = hooks.TopKState(ratio=0.1)
    model, optimizer = make(state)
    for nth in range(3):
        step(model, optimizer, nth)
    saved = state.state_dict(), model.state_dict(), optimizer.state_dict()
    state = hooks.TopKState(ratio=0.1)
    model, optimizer = make(state)
    state.load_state_dict(saved[0])
    model.load_state_dict(saved[1])
    optimizer.load_state_dict(saved[2])
    for nth in range(3, 6):
        step(model, optimizer, nth)
    return all(torch.equal(one, two) for one, two in zip(straight.parameters(), model.parameters(), strict=True))


def test_training_resumes_bit_for_bit_with_the_saved_hook_state() -> None:
    assert run_ranks(2, train_saved_and_resumed) == [True, True]


def train_two_models(rank: int, world: int, name: str, together: bool) -> str:
    """Two models that share a hook's state, in one backward or in turns: what is said by the second step at the latest."""
    state = own.CASES[name].make_state()
    models = [phalanx.DistributedDataParallel(nn.Sequential(nn.Linear(20, 30), nn.Linear(30, 20))) for _ in range(2)]
    for model in models:
        model.register_comm_hook(state, own.CASES[name].hook)
    with pytest.raises(ConfigError) as raised:
        for _ in range(2):
            losses = [model(torch.ones(4, 20)).square().mean() for model in models]
            if together:
                (losses[0] + losses[1]).backward()
            else:
                for loss in losses:
                    loss.backward()
    return str(raised.value)


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("name", ["int8", "top_k", "power_sgd"])
def test_a_state_is_not_shared_by_two_models(name: str, together: bool) -> None:
    for said in run_ranks(2, train_two_models, name, together):
        assert "the wrappers of two models, which both have a parameter" in said


def train_one_after_the_other(rank: int, world: int) -> int:
    """Two models, the second made of the first, with one state."""
    state = hooks.Int8State()
    first = nn.Linear(20, 30)
    second = copy.deepcopy(first)
    for model in (first, second):
        wrapped = phalanx.DistributedDataParallel(model)
        wrapped.register_comm_hook(state, hooks.int8_hook)
        for _ in range(3):
            wrapped(torch.ones(4, 20)).square().mean().backward()
    return state.iter


def test_a_state_may_go_on_with_another_model() -> None:
    assert run_ranks(2, train_one_after_the_other) == [6, 6]
