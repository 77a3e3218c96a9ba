"""What a program does itself around its steps, where it ends, and who comes to it with something else (see `mirrored`)."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR

import phalanx
from phalanx.checkpoint.capture import Subject
from phalanx.elastic import refusal
from phalanx.elastic.decision import Report
from phalanx.elastic.keeping import Keeping, Steps, Taken
from phalanx.elastic.refusal import CaughtLoss, refuse_what_cannot_change, wrappers_of
from phalanx.errors import ConfigError, MismatchError, PeerFailure
from tests.elastic.mirrored import Once, Run


def _decays(optimizer: Any, params: Any) -> None:
    optimizer.param_groups[0]["lr"] *= 0.5


def _shrinks(optimizer: Any, params: Any) -> None:
    with torch.no_grad():
        for param in params:
            param.mul_(0.5)


def _clips(optimizer: Any, params: Any) -> None:
    for param in params:
        param.data.clamp_(-0.3, 0.3)


def _around(run: Run, change: Any, place: str, lost: Any) -> tuple[torch.Tensor, float]:
    """A program that changes something itself, before each step or after it; what has come of it."""
    optimizer = SGD(run.model.parameters(), 0.1)

    def changes(training: Any, here: str) -> None:
        if here == place:
            if training.step == 3:
                lost("before")
            change(optimizer, run.model.parameters())
            if training.step == 3:
                lost("after")

    def train(training: Any) -> None:
        while training.step < 6:
            changes(training, "before the step")
            run.model(torch.ones(1, 2)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            changes(training, "after it")
            training.commit()

    run.prepare(optimizer).run(train)
    return run.model.weight.detach().clone(), optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("place", ["before the step", "after it"])
@pytest.mark.parametrize("change", [_decays, _shrinks, _clips])
def test_what_the_program_itself_changes_around_a_step_is_done_once(runs: Any, change: Any, place: str, moment: str) -> None:
    once = Once()
    weight, rate = _around(runs(), change, place, lambda when: once() if when == moment else None)
    expected, expected_rate = _around(runs(), change, place, lambda when: None)
    assert once.has_happened and torch.equal(weight, expected) and rate == expected_rate


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_scheduler_that_is_stepped_now_and_then_is_stepped_when_the_program_would(runs: Any, moment: str) -> None:
    run, lost = runs(), Once()
    optimizer = SGD(run.model.parameters(), 0.1)
    scheduler = LambdaLR(optimizer, lambda step: 1.0 / (1 + step))

    def train(training: Any) -> None:
        while training.step < 9:
            run.step(optimizer, torch.ones(1, 2))
            is_due = training.step % 3 == 2
            if training.step == 5 and moment == "before":
                lost()
            if is_due:
                scheduler.step()
            if training.step == 5 and moment == "after":
                lost()
            training.commit()

    run.prepare(optimizer, scheduler).run(train)
    assert lost.has_happened and scheduler.last_epoch == 3


@pytest.mark.parametrize("option", ["weight_decay", "lr"])
def test_options_that_the_program_changes_beside_a_scheduler_are_changed_once(runs: Any, option: str) -> None:
    run, lost = runs(), Once()
    optimizer = SGD(run.model.parameters(), 0.1, weight_decay=0.1)
    scheduler = LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    seen: dict[int, float] = {}

    def train(training: Any) -> None:
        while training.step < 6:
            value = optimizer.param_groups[0][option]
            assert seen.setdefault(training.step, value) == value, "another value for the same step"
            run.step(optimizer, torch.ones(1, 2))
            if training.step == 3:
                lost()
            scheduler.step()
            optimizer.param_groups[0][option] += 0.01
            training.commit()

    training = run.prepare(optimizer, scheduler)
    training.run(train)
    assert lost.has_happened and len(seen) == 6 and training._keeping is Keeping.WRITTEN


def test_a_scheduler_that_some_rank_has_stepped_is_stepped_by_those_who_complete_the_step(runs: Any) -> None:
    run = runs()
    optimizer = SGD(run.model.parameters(), 0.1)
    scheduler = LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    after_step = run.prepare(optimizer, scheduler)._transaction.after_step
    optimizer.step()
    assert not after_step.has_moved
    after_step.complete(is_due=True)
    assert scheduler.last_epoch == 1 and after_step.has_moved
    after_step.complete(is_due=True)
    assert scheduler.last_epoch == 1, "it has been stepped already"


def test_a_function_that_returns_in_the_midst_of_its_loop_has_committed_its_last_step(runs: Any) -> None:
    run, waits = runs(), []
    optimizer, loader = SGD(run.model.parameters(), 0.1), run.loader()
    training = run.prepare(optimizer, loader=loader)
    run.worker.barrier = lambda: waits.append(training.step)

    def train(training: Any) -> None:
        for _ in training.epochs(2):
            for (x,) in loader:
                run.step(optimizer, x)
                if training.step == 1:
                    return

    training.run(train)
    assert training.step == 2 and waits[-1] == 2, "nobody may end before all are there"


def test_who_comes_does_not_wait_at_the_end_of_epochs_that_are_long_over(runs: Any) -> None:
    run, waits = runs(), []
    optimizer, loader = SGD(run.model.parameters(), 0.1), run.loader()
    training = run.prepare(optimizer, loader=loader)
    run.worker.barrier = lambda: waits.append(loader.epoch)
    loader.go_on({**loader.state_dict(), "epoch": 1, "position": 4}, in_loop=False)
    assert list(training.epochs(1)) == [] and waits == [], "the others are in the midst of a later epoch"
    loader.go_on({**loader.state_dict(), "epoch": 1, "position": 0}, in_loop=False)
    assert list(training.epochs(1)) == [] and waits == [1]


def test_an_epoch_that_is_dealt_anew_is_not_at_its_end(runs: Any) -> None:
    run = runs()
    loader = run.loader()
    batches = iter(loader)
    next(batches)
    loader.go_on(loader.state_dict(), in_loop=False)
    assert not loader.is_at_beginning and not loader.is_at_end


def test_a_loader_for_evaluation_goes_on_where_those_are_who_were_there(runs: Any) -> None:
    run = runs()
    seen, run.exchange.generation = run.loader(), 2
    say = run.exchange.all_objects
    run.exchange.all_objects = lambda value: [value, (3, 0, "")] if value == (0, 0, "") else say(value)
    run.exchange.world = 1
    assert len(list(seen)) == 6, "of one rank of batches of two"
    assert seen.epoch == 4, "the other has looped over it three times"
    run.exchange.all_objects = say
    assert len(list(seen)) == 6 and seen.epoch == 5


@pytest.mark.parametrize("is_new", [False, True])
def test_one_who_comes_with_another_model_takes_nobody_with_it(runs: Any, is_new: bool) -> None:
    run = runs()
    training = run.prepare(SGD(run.model.parameters(), 0.1))
    training._has_entered = not is_new
    said = (Report(None), False, False, (None, None), False, None)
    run.exchange.all_objects = lambda value: [value, said]
    error = MismatchError("another model")
    training._take = lambda *_: (_ for _ in ()).throw(error)
    with pytest.raises(MismatchError if is_new else PeerFailure, match="another model"):
        training._go_on(run.member.meet(""), run.member, False)


@pytest.mark.parametrize("is_new", [False, True])
def test_one_who_does_not_fit_ends_though_the_others_have_left_it_by_then(runs: Any, is_new: bool) -> None:
    run = runs()
    training = run.prepare(SGD(run.model.parameters(), 0.1))
    training._has_entered = not is_new
    run.member.interruption = SimpleNamespace(error=lambda: PeerFailure("the generation is over", [0]))
    assert training._follows_loss(MismatchError("another model")) is not is_new


def test_no_two_who_come_draw_the_same_numbers(runs: Any) -> None:
    salts = []
    # The one comes, two others are lost before the first step, and another one comes.
    for number, generation, rank, world in ((4, 2, 3, 4), (5, 3, 2, 3)):
        run = runs()
        training, run.member.number = run.prepare(SGD(run.model.parameters(), 0.1)), number
        training._transaction.set_random = lambda passing, own, salt: salts.append(salt)
        formed = replace(run.member.formed, generation=generation, rank=rank, members=tuple(range(world)))
        training._apply(Taken(0, Keeping.HELD, None, training._keep_passing(), None), formed, run.member)
    assert len(set(salts)) == 2


def test_who_has_come_farthest_says_which_parameters_are_trained(runs: Any) -> None:
    run = runs()
    training = run.prepare(SGD(run.model.parameters(), 0.1))
    training._has_entered = training._version = 1
    run.exchange.all_objects = lambda value: [value, (-1, [True, True]), (0, [True, True]), (2, [False, True])]
    training._renew()
    assert [param.requires_grad for param in run.model.parameters()] == [False, True]
    run.exchange.all_objects = lambda value: [value, (1, [True, True])]
    training._steps.ended = 1  # what a step has begun with is said by those who have made it
    training._renew()
    assert [param.requires_grad for param in run.model.parameters()] == [False, True]


def test_a_wrapped_model_that_is_trained_and_not_given_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapper = phalanx.DistributedDataParallel.__new__(phalanx.DistributedDataParallel)
    torch.nn.Module.__init__(wrapper)
    wrapper.module, wrapper.__dict__["_hook"] = torch.nn.Linear(2, 1), None
    monkeypatch.setattr(refusal, "known_wrappers", lambda: [wrapper])
    optimizer = SGD(wrapper.parameters(), 0.1)
    given = torch.nn.ModuleDict({"one": wrapper})
    assert wrappers_of(Subject(given, optimizer, {}, None)) == [wrapper]
    refuse_what_cannot_change(Subject(given, optimizer, {}, None))
    with pytest.raises(ConfigError, match=r"Linear.*Pass the wrapper as model"):
        refuse_what_cannot_change(Subject(wrapper.module, optimizer, {}, None))


def test_no_step_begins_after_a_loss_that_the_script_has_caught(runs: Any) -> None:
    run, errors = runs(), [None, PeerFailure("the generation is over", [1])]
    wrapper = SimpleNamespace(
        reducer=SimpleNamespace(has_failed=False), collectives=SimpleNamespace(board=SimpleNamespace(knows=False))
    )
    caught = CaughtLoss(Subject(None, None, {}, None), run.member)
    caught._wrappers = [wrapper]
    run.member.interruption = SimpleNamespace(error=lambda: errors[-1])
    optimizer = SGD(run.model.parameters(), 0.1)
    after_step = run.prepare(optimizer)._transaction.after_step
    steps = Steps([optimizer], after_step, caught.look)
    before = run.model.weight.detach().clone()
    run.step(optimizer, torch.ones(1, 2))
    steps.end()  # without a sign of a loss here the others may just be pausing
    steps.forget()
    after = run.model.weight.detach().clone()
    assert not torch.equal(before, after)
    for where in (wrapper.reducer, wrapper.collectives.board):
        name = next(iter(vars(where)))
        setattr(where, name, True)
        with pytest.raises(PeerFailure, match="is over"):
            run.step(optimizer, torch.ones(1, 2))
        with pytest.raises(PeerFailure, match="is over"):
            steps.end()
        setattr(where, name, False)
    assert not steps.begun and torch.equal(run.model.weight, after)
    wrapper.reducer.has_failed = True
    errors.append(None)
    run.step(optimizer, torch.ones(1, 2))
    assert steps.ended == 1, "an error of the script's own that it has caught is its own affair"


def test_a_run_without_an_optimizer_commits_what_it_is_told_to(runs: Any) -> None:
    run, lost = runs(), Once()

    def train(training: Any) -> None:
        while training.step < 4:
            if training.step == 2:
                lost()
            training.commit()

    training = run.prepare(None)
    training.run(train)
    assert lost.has_happened and training.step == 4


def test_a_second_training_in_one_run_is_refused(runs: Any) -> None:
    run = runs()
    optimizer = SGD(run.model.parameters(), 0.1)
    first = run.prepare(optimizer)
    first.run(lambda training: None)
    first._leave_group()
    before = run.member.newest()
    with pytest.raises(ConfigError, match=r"for the second time.*in one such function"):
        run.prepare(optimizer).run(lambda training: pytest.fail("it was called"))
    assert run.member.newest() == before, "what the first one kept is as it was"
