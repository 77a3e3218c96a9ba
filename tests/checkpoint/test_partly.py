"""What a restore leaves as it is, and what it must not leave: gradients, states that were not chosen, ranks' own states."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from phalanx import Checkpointer, DistributedDataParallel, ZeroRedundancyOptimizer
from phalanx.data.loader import Loader
from phalanx.data.values import Exchange
from phalanx.errors import StateError
from tests.cluster import run_ranks

pytestmark = pytest.mark.timeout(60)

CPU = torch.device("cpu")


def backward(model: nn.Module, scale: float = 1.0) -> None:
    (scale * model(torch.ones(2, 3))).sum().backward()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, count: int = 1) -> None:
    for _ in range(count):
        optimizer.zero_grad()
        backward(model)
        optimizer.step()


# -- gradients -------------------------------------------------------------------------------------


def test_going_back_leaves_no_gradient_of_the_step_that_failed(tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Checkpointer(tmp_path, model, optimizer) as checkpointer:
        step(model, optimizer)
        checkpointer.save(1)
        optimizer.zero_grad()
        backward(model, float("nan"))
        checkpointer.restore(skip=["bias"])
        assert model.weight.grad is None and model.bias.grad is not None, "what is skipped stays as it is"
        checkpointer.restore()
    assert model.bias.grad is None
    backward(model)
    optimizer.step()
    assert all(bool(param.isfinite().all()) for param in model.parameters())


def rolled_back(rank: int, world: int, folder: str, overlaps: bool) -> bool:
    model = DistributedDataParallel(nn.Linear(3, 3))
    options = {"overlap_with_ddp": True, "step_in_backward": False} if overlaps else {}
    optimizer: Any = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, **options)
    step(model, optimizer, 2)
    with Checkpointer(folder, model, optimizer) as checkpointer:
        checkpointer.save(1)
        optimizer.zero_grad()
        backward(model)
        checkpointer.restore()
    expected = {name: value.detach().clone() for name, value in model.module.named_parameters()}
    backward(model)
    optimizer.step()
    return all(torch.allclose(value, expected[name] - 0.2) for name, value in model.module.named_parameters())


@pytest.mark.parametrize("overlaps", [False, True], ids=["", "overlapped"])
def test_going_back_between_backward_and_step_of_a_divided_optimizer(tmp_path: Path, overlaps: bool) -> None:
    # A gradient is 2 for every element: two samples of ones.
    assert run_ranks(2, rolled_back, str(tmp_path), overlaps) == [True, True]


@pytest.mark.parametrize("later", [False, True], ids=["frozen", "added later"])
def test_the_gradient_of_the_last_layer_alone_is_kept_too(tmp_path: Path, later: bool) -> None:
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(12)))
    last = list(model[-1].parameters())
    for param in model[:-1].parameters():
        param.requires_grad_(False)
    given = list(model[:-1].parameters()) if later else list(model.parameters())
    optimizer = torch.optim.SGD(given, lr=0.1)
    with Checkpointer(tmp_path, model, optimizer) as checkpointer:
        if later:
            optimizer.add_param_group({"params": last})
        step(model, optimizer)
        checkpointer.save(1)
        optimizer.zero_grad()
        backward(model)
        expected = [param.grad.clone() for param in last if param.grad is not None]
        checkpointer.save(2)
        checkpointer.wait()
        for number, kept in ((1, False), (2, True)):
            checkpointer.restore(number)
            assert [param.grad is not None for param in last] == [kept, kept], number
    assert all(torch.equal(param.grad, old) for param, old in zip(last, expected, strict=True) if param.grad is not None)


# -- states of optimizers --------------------------------------------------------------------------


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def chosen(rank: int, world: int, folder: str, kind: str) -> list[Any]:
    """Of a checkpoint after two steps, into a run after three, without the head; then from one that has no head."""
    torch.manual_seed(0)
    model, body = Pair(), nn.ModuleDict({"body": nn.Linear(3, 3)})

    def make(params: Any) -> Any:
        if kind == "plain":
            return torch.optim.Adam(params, lr=0.1)
        return ZeroRedundancyOptimizer(params, torch.optim.Adam, lr=0.1, partition=kind)

    adam = make(model.parameters())

    def counts() -> list[float]:
        if kind == "plain":
            return [float(adam.state[param]["step"]) for param in model.parameters()]
        adam.consolidate_state_dict(0)
        return [float(one["step"]) for one in adam.state_dict()["state"].values()] if rank == 0 else []

    step(model, adam, 2)
    with Checkpointer(folder, model, adam) as checkpointer:
        checkpointer.save(2)
        checkpointer.wait()
        step(model, adam, 1)
        found = [counts()]
        restored = checkpointer.restore(skip=["head.*"])
        assert restored is not None and "optimizer 'head.bias': skipped" in restored.left_out
        found.append(counts())
    small = make(body.parameters())
    step(body["body"], small, 5)
    with Checkpointer(f"{folder}/body", body, small) as checkpointer:
        checkpointer.save(5)
    with Checkpointer(f"{folder}/body", model, adam) as checkpointer:
        checkpointer.restore(strict=False)
        found.append(counts())
    step(model, adam, 1)
    return [*found, counts()]


@pytest.mark.parametrize("kind", ["plain", "element", "parameter"])
def test_states_of_parameters_that_were_not_chosen_stay_as_they_are(tmp_path: Path, kind: str) -> None:
    found = run_ranks(2, chosen, str(tmp_path), kind)[0]
    assert found == [[3, 3, 3, 3], [2, 2, 3, 3], [5, 5, 3, 3], [6, 6, 4, 4]]


def own_parameters(rank: int, world: int, folder: str) -> list[Any]:
    torch.manual_seed(0)
    net = Pair()
    net._ddp_params_and_buffers_to_ignore = ["head.weight", "head.bias"]  # type: ignore[assignment]
    model = DistributedDataParallel(net)
    adam = torch.optim.Adam(net.parameters(), lr=0.1)
    found: list[Any] = []
    with Checkpointer(folder, model, adam) as checkpointer:
        adam.zero_grad()
        backward(model, 1.0 + rank)
        if rank == 0:
            net.head.bias.grad = None  # a rank without a state, where others have one
        adam.step()
        live = {name: adam.state[param] for name, param in net.named_parameters() if param in adam.state}
        expected = {name: {key: value.clone() for key, value in state.items()} for name, state in live.items()}
        checkpointer.save(1)
        checkpointer.wait()
        step(model, adam, 1)
        checkpointer.restore()
        for name, param in net.named_parameters():
            state = adam.state.get(param, {})
            found.append(state.keys() == expected.get(name, {}).keys())
            found += [torch.equal(value, expected[name][key]) for key, value in state.items()]
    return [all(found), expected["head.weight"]["exp_avg"].tolist(), "head.bias" in expected]


def test_states_of_parameters_that_each_rank_trains_for_itself_are_each_ranks_own(tmp_path: Path) -> None:
    first, second = run_ranks(2, own_parameters, str(tmp_path))
    assert first[1] != second[1] and (first[2], second[2]) == (False, True)
    assert first[0] and second[0]
    # On another number of ranks there is rank 0's.
    net = Pair()
    adam = torch.optim.Adam(net.parameters(), lr=0.1)
    with Checkpointer(tmp_path, net, adam) as checkpointer:
        checkpointer.restore()
    assert adam.state[net.head.weight]["exp_avg"].tolist() == first[1] and not adam.state.get(net.head.bias)


def adam_into_adamw(rank: int, world: int, folder: str, kind: str) -> bool:
    model = nn.Linear(3, 3)
    adam = torch.optim.Adam(model.parameters(), lr=0.1, weight_decay=0.5)
    step(model, adam)
    with Checkpointer(folder, model, adam) as checkpointer:
        checkpointer.save(1)
    decayed = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1, partition=kind)
    with Checkpointer(folder, model, decayed) as checkpointer:
        checkpointer.restore()
    inner = decayed.optim.param_groups
    assert all(group["weight_decay"] == 0.5 for group in (*decayed.param_groups, *inner))
    return all(group["decoupled_weight_decay"] for group in (*decayed.param_groups, *inner))


@pytest.mark.parametrize("kind", ["element", "parameter"])
def test_adamw_stays_adamw_when_it_loads_what_adam_saved(tmp_path: Path, kind: str) -> None:
    assert run_ranks(2, adam_into_adamw, str(tmp_path), kind) == [True, True]


# -- parts that say beforehand whether they fit --------------------------------------------------


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(20))


def loader_of(rank: int, world: int) -> Loader:
    return Loader(DataLoader(Stream(), 2), Exchange(rank, world, CPU), CPU)


def save_mid_epoch(rank: int, world: int, folder: str) -> None:
    loader = loader_of(rank, world)
    model = nn.Linear(3, 3)
    with Checkpointer(folder, model, loader=loader) as checkpointer, torch.no_grad():
        for _ in loader:
            checkpointer.save(1)
            break


def test_a_loader_that_cannot_go_on_is_refused_before_anything_is_changed(tmp_path: Path) -> None:
    run_ranks(2, save_mid_epoch, str(tmp_path))
    model = nn.Linear(3, 3)
    before = model.weight.detach().clone()
    with Checkpointer(tmp_path, model, loader=loader_of(0, 1)) as checkpointer:
        with pytest.raises(StateError, match="a stream that was read on 2 ranks stands in the middle of epoch 0"):
            checkpointer.restore()
        assert torch.equal(model.weight, before)
        assert checkpointer.restore(parts=["model"]) is not None and not torch.equal(model.weight, before)


def test_what_nobody_here_loads_is_said(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with Checkpointer(tmp_path, model, optimizer, schedule, extra={"a": 1, "b": 2}) as checkpointer:
        checkpointer.save(0)
    with Checkpointer(tmp_path, model, optimizer) as reader:
        assert _said(reader) == ["scheduler: saved, but there is none here", "extra: saved, but there is none here"]
        assert _said(reader, parts=["model"]) == []
    with Checkpointer(tmp_path, optimizer=optimizer, scheduler=schedule, extra={"a": 0}) as reader:
        assert _said(reader, strict=False)[-2:] == [
            "model: saved, but there is none here",
            "extra 'b': saved, but there is none here",
        ]


def _said(reader: Checkpointer, **choice: Any) -> list[str]:
    restored = reader.restore(**choice)
    assert restored is not None
    return restored.left_out


def test_another_kind_of_generator_is_refused_before_anything_is_changed(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, nn.Linear(2, 2), extra={"noise": torch.Generator()}) as checkpointer:
        checkpointer.save(0)
    for other in (np.random.default_rng(0), random.Random(0)):
        model = nn.Linear(2, 2)
        before = model.weight.detach().clone()
        with Checkpointer(tmp_path, model, extra={"noise": other}) as reader:
            with pytest.raises(StateError, match=r"extra 'noise' is no state of a (Generator|Random)"):
                reader.restore()
        assert torch.equal(model.weight, before)


def test_groups_of_other_options_do_not_become_one_in_silence(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    two = [{"params": list(layer.parameters()), "lr": 0.5 / n} for n, layer in enumerate(model, 1)]
    with Checkpointer(tmp_path, model, torch.optim.SGD(two)) as checkpointer:
        checkpointer.save(0)
    one = torch.optim.SGD(model.parameters(), lr=0.7)
    with Checkpointer(tmp_path, model, one) as reader:
        with pytest.raises(StateError, match="group 0 has parameters of saved groups that differ in lr"):
            reader.restore()
        assert one.param_groups[0]["lr"] == 0.7
        (said,) = _said(reader, strict=False)
        assert "differ in lr" in said and one.param_groups[0]["lr"] == 0.5
        assert len(_said(reader, skip="1.*")) == 2  # of one group, and those that were skipped
    # Equal options are no reason to refuse: as those of an optimizer in backward, which has a group per parameter.
    two[1]["lr"] = 0.5
    with Checkpointer(tmp_path, model, torch.optim.SGD(two)) as checkpointer:
        checkpointer.save(1)
    with Checkpointer(tmp_path, model, one) as reader:
        assert _said(reader) == []
