"""What optimizers step and keep, where that is not what it was at the start: groups, outsiders, nested states."""

from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import StepLR

from phalanx.checkpoint.capture import Subject
from phalanx.elastic.refusal import refuse_what_cannot_change
from phalanx.elastic.transaction import Transaction, _drop_groups
from phalanx.errors import ArgumentTypeError, ConfigError, StateError
from phalanx.zero.optimizer import ZeroRedundancyOptimizer
from tests.cluster import run_ranks
from tests.elastic.mirrored import Once, Run
from tests.elastic.program import Position


@pytest.mark.parametrize("kept", ["held", "written"])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_group_that_was_added_in_a_step_that_is_undone_is_added_again(runs: Any, kept: str, moment: str) -> None:
    run, losses = runs(), [Once(), Once()]
    run.model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    optimizer = SGD(run.model[1].parameters(), 0.1, momentum=0.9)
    extra = {"position": Position()} if kept == "written" else None
    numbers = []

    def train(training: Any) -> None:
        while training.step < 6:
            if training.step == 3:
                optimizer.add_param_group({"params": list(run.model[0].parameters())})
                if moment == "before":
                    losses[0]()
            numbers.append(len(optimizer.param_groups))
            run.model(torch.ones(1, 2)).square().mean().backward()
            if training.step == 3 and moment == "after":
                losses[0]()
            if training.step == 4:
                losses[1]()  # when the step that has added it is committed
            optimizer.step()
            optimizer.zero_grad()
            training.commit()

    run.prepare(optimizer, extra=extra).run(train)
    assert all(one.has_happened for one in losses) and set(numbers[:3]) == {1} and set(numbers[3:]) == {2}
    assert len(optimizer.state) == 4


def test_one_who_comes_without_a_group_is_told_of_it() -> None:
    optimizer = SGD(torch.nn.Linear(2, 1).parameters(), 0.1)
    with pytest.raises(StateError, match=r"SGD has 1 groups .* and 2 .* add all groups before the training function"):
        _drop_groups(optimizer, 2)


def test_a_learning_rate_in_a_tensor_that_the_script_changes_is_changed_once(runs: Any) -> None:
    run, lost = runs(), Once()
    optimizer = Adam(run.model.parameters(), lr=torch.tensor(0.5))

    def train(training: Any) -> None:
        while training.step < 5:
            run.step(optimizer, torch.ones(1, 2))
            if training.step == 3:
                lost()
            optimizer.param_groups[0]["lr"].mul_(0.5)
            training.commit()

    run.prepare(optimizer).run(train)
    assert lost.has_happened and optimizer.param_groups[0]["lr"].item() == 0.5**6


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_state_that_the_script_empties_after_the_step_is_emptied_once(runs: Any, is_replaced: bool) -> None:
    run, lost = runs(), Once()
    optimizer = SGD(run.model.parameters(), 0.1, momentum=0.9)

    def train(training: Any) -> None:
        while training.step < 6:
            run.step(optimizer, torch.ones(1, 2))
            if training.step == 5:
                lost()
            if training.step % 2 and is_replaced:
                optimizer.state = defaultdict(dict)
            elif training.step % 2:
                optimizer.state.clear()
            training.commit()

    run.prepare(optimizer).run(train)
    assert lost.has_happened and not optimizer.state


def test_an_epoch_without_a_step_of_the_optimizer_given_is_told_of(runs: Any) -> None:
    run = runs()
    given, loader = SGD(run.model.parameters(), 0.1), run.loader()
    training = run.prepare(given, loader=loader)
    seen: list[int] = []

    def train(training: Any) -> None:
        for epoch in training.epochs(4):
            other = SGD(run.model.parameters(), 0.1) if epoch else given
            for (x,) in loader if epoch < 3 else ():
                run.step(other, x)
            seen.append(training.step)

    with pytest.warns(UserWarning, match=r"no optimizer .* has stepped in epoch 1, so that nothing of it") as warned:
        training.run(train)
    assert len(warned) == 1 and training.step == 3


def test_a_parameter_that_is_part_of_nothing_given_is_refused() -> None:
    model, loss = torch.nn.Linear(2, 1), torch.nn.Linear(1, 1)
    optimizer = SGD([*model.parameters(), *loss.parameters()], 0.1)
    refuse_what_cannot_change(Subject(model, optimizer, {}, {"loss": loss}))
    refuse_what_cannot_change(Subject(torch.nn.ModuleList([model, loss]), optimizer, {}, None))
    with pytest.raises(ConfigError, match=r"optimizer steps a parameter of shape \(1, 1\), its number 2,.*in extra"):
        refuse_what_cannot_change(Subject(model, optimizer, {}, {"position": Position()}))


def test_gradients_of_something_extra_that_is_stepped_are_forgotten_with_the_step(runs: Any) -> None:
    weights = []
    for lost in (Once(), lambda: None):
        run = runs()
        loss = torch.nn.Linear(1, 1)
        torch.nn.init.ones_(loss.weight)
        optimizer = SGD([*run.model.parameters(), *loss.parameters()], 0.1)

        def train(training: Any) -> None:
            while training.step < 4:
                loss(run.model(torch.ones(1, 2))).sum().backward()  # noqa: B023
                if training.step == 2:
                    lost()  # noqa: B023
                optimizer.step()  # noqa: B023
                optimizer.zero_grad()  # noqa: B023
                training.commit()

        run.prepare(optimizer, extra={"loss": loss}).run(train)
        weights.append(loss.weight.detach().clone())
    assert torch.equal(*weights)


def test_a_scheduler_that_is_not_given_is_refused() -> None:
    model = torch.nn.ModuleList([torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)])
    optimizers = {str(number): SGD(one.parameters(), 0.1) for number, one in enumerate(model)}
    refuse_what_cannot_change(Subject(model, optimizers, {}, None))
    first, second = [StepLR(one, 2) for one in optimizers.values()]
    refuse_what_cannot_change(Subject(model, optimizers, {"scheduler": first}, {"second": second}))
    refuse_what_cannot_change(Subject(model, optimizers, {"scheduler": first}, {"position": Position()}))
    for given in ({}, {"scheduler": first}):
        with pytest.raises(ConfigError, match=r"has a learning rate scheduler that .* was not given.*in extra"):
            refuse_what_cannot_change(Subject(model, optimizers, given, {"generator": torch.Generator()}))


class Keeping:
    """With whatever it is given for a state."""

    def __init__(self, state: Any) -> None:
        self._state = state

    def state_dict(self) -> dict[str, Any]:
        return {"state": self._state}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@pytest.mark.parametrize("state", [threading.Lock(), lambda: 1, torch.ones(2, requires_grad=True) * 2])
def test_a_state_that_cannot_be_copied_is_refused_by_its_name(state: Any) -> None:
    given = Keeping(state)
    for subject in (Subject(None, None, {}, {"mine": given}), Subject(None, None, {"scheduler": given}, {})):
        with pytest.raises(ArgumentTypeError, match=r"of (extra 'mine'|the scheduler), a Keeping, cannot be copied"):
            refuse_what_cannot_change(subject)


class Preconditioned(torch.optim.Optimizer):
    """Keeps a list of matrices per parameter, and makes a new one, or new ones in it, at each step."""

    def __init__(self, params: Any, is_new: bool) -> None:
        super().__init__(params, {"lr": 0.1})
        self._is_new = is_new

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in (param for group in self.param_groups for param in group["params"]):
            found = self.state[param].setdefault("matrices", [torch.zeros(2), torch.zeros(3)])
            made = [one + 1 for one in found]
            if self._is_new:
                self.state[param]["matrices"] = made
            else:
                found[:] = made


@pytest.mark.parametrize("is_new", [False, True])
def test_copies_have_nested_states_as_they_are(is_new: bool) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = Preconditioned(model.parameters(), is_new)
    transaction = Transaction(Subject(model, optimizer, {}, None))
    for count in (1.0, 2.0, 3.0):
        optimizer.step()
        pieces, _, _ = transaction._describe(0, 1)
        found = [one.values.tolist() for one in pieces if one.key.startswith("optimizer/weight/")]
        assert found == [[count] * 2, [count] * 3]


def _loses_before_the_first_commit(rank: int, world: int) -> tuple[list[Any], list[Any]]:
    """What a divided optimizer has of a step before the training function, then and inside of it."""
    with pytest.MonkeyPatch.context() as patch:
        run, lost = Run(patch, worlds=(1, 1)), Once()
        optimizer = ZeroRedundancyOptimizer(run.model.parameters(), Adam, lr=0.1)
        run.step(optimizer, torch.ones(1, 2))
        training: Any = run.prepare(optimizer)
        meet = run.member.meet
        run.member.meet = lambda *about: replace(meet(*about), has_committed=False)  # type: ignore[method-assign]
        write, seen = training._transaction.write, list[list[Any]]()

        def write_after_loss(*args: Any) -> None:
            lost()
            write(*args)

        def look(_: Any = None) -> None:
            seen.append([state["exp_avg"].tolist() for state in optimizer.optim.state.values()])

        training._transaction.write = write_after_loss
        look()
        training.run(look)
        run.close()
    assert lost.has_happened
    before, inside = seen
    return before, inside


def test_a_divided_state_that_was_there_before_the_first_commit_outlives_a_loss() -> None:
    ((before, inside),) = run_ranks(1, _loses_before_the_first_commit)
    assert before and inside == before
