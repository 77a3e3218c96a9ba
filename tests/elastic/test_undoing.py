"""What a loss undoes, completes and does again, in the lines of a program that are around a step (see `mirrored`)."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau, StepLR

import phalanx
from phalanx.checkpoint.capture import Subject
from phalanx.elastic.image import ImageSource
from phalanx.elastic.keeping import Keeping
from phalanx.elastic.refusal import refuse_what_cannot_change
from phalanx.elastic.transaction import Transaction
from phalanx.errors import ConfigError
from tests.elastic.mirrored import Once
from tests.elastic.program import Position


def test_a_scaler_that_was_left_inside_of_its_step_scales_the_next_one_anew(runs: Any) -> None:
    run, lost = runs(), Once()
    optimizer, scaler = SGD(run.model.parameters(), 0.1), torch.amp.GradScaler("cpu", init_scale=8.0)
    before = run.model.weight.detach().clone()
    optimizer.register_step_pre_hook(lambda *_: lost())

    def train(training: Any) -> None:
        scaler.scale(run.model(torch.ones(1, 2)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        training.commit()

    run.prepare(optimizer, extra={"scaler": scaler}).run(train)
    assert lost.has_happened
    assert torch.allclose(run.model.weight, before - 0.1), "with gradients that were never unscaled"


@pytest.mark.parametrize("moment", ["before", "after", "next"])
@pytest.mark.parametrize("kept", ["held", "written"])
def test_what_follows_the_loop_of_an_epoch_is_done_once_though_a_rank_is_lost_meanwhile(
    runs: Any, moment: str, kept: str
) -> None:
    run = runs()
    optimizer, loader, lost, seen = SGD(run.model.parameters(), 0.1, momentum=0.9), run.loader(), Once(), []
    scheduler = StepLR(optimizer, 1, gamma=0.5)
    extra = {"position": Position()} if kept == "written" else None
    training = run.prepare(optimizer, scheduler, loader, extra)

    def train(training: Any) -> None:
        for epoch in training.epochs(2):
            for number, (x,) in enumerate(loader):
                if (epoch, number, moment) == (1, 0, "next"):
                    lost()
                run.step(optimizer, x)
            if epoch == 0 and moment == "before":
                lost()
            scheduler.step()
            if epoch == 0 and moment == "after":
                lost()
            seen.append((epoch, scheduler.last_epoch, optimizer.param_groups[0]["lr"]))

    training.run(train)
    assert lost.has_happened and (kept == "held") == (training._keeping is Keeping.HELD)
    assert seen == [(0, 1, 0.05), (1, 2, 0.025)]
    assert loader.epoch == 2 and training.step == 6


@pytest.mark.parametrize("second", ["there", "next"])
def test_a_second_loss_after_an_epochs_end_was_completed_does_not_skip_it(runs: Any, second: str) -> None:
    run = runs()
    optimizer, loader, seen, losses = SGD(run.model.parameters(), 0.1), run.loader(), [], [Once(), Once()]

    def train(training: Any) -> None:
        for epoch in training.epochs(2):
            for (x,) in loader:
                if epoch == 1 and second == "next":
                    losses[1]()  # when those lines have been committed
                run.step(optimizer, x)
            if epoch == 0:
                losses[0]()
                if second == "there":
                    losses[1]()
            seen.append(epoch)

    run.prepare(optimizer, loader=loader).run(train)
    assert all(one.has_happened for one in losses) and seen == [0, 1]


def test_an_epoch_whose_loop_is_left_early_counts_as_one(runs: Any) -> None:
    run, seen = runs(), []
    optimizer, loader = SGD(run.model.parameters(), 0.1), run.loader()
    training = run.prepare(optimizer, loader=loader)

    def train(training: Any) -> None:
        for epoch in training.epochs(2):
            for (x,) in loader:
                run.step(optimizer, x)
                seen.append((epoch, loader.epoch))
                break

    training.run(train)
    assert seen == [(0, 0), (1, 1)] and training.step == 2 and loader.epoch == 2


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("per", ["step", "epoch"])
def test_a_completed_step_steps_the_scheduler_only_where_the_program_does(runs: Any, per: str, at: int) -> None:
    run = runs()
    optimizer, loader, lost = SGD(run.model.parameters(), 0.1), run.loader(), Once()
    scheduler = LambdaLR(optimizer, lambda step: 1.0 / (1 + step))

    def train(training: Any) -> None:
        for epoch in training.epochs(2):
            for number, (x,) in enumerate(loader):
                run.step(optimizer, x)
                if (epoch, number) == (1, at):
                    lost()  # in the first steps after the scheduler has moved
                if per == "step":
                    scheduler.step()
            if per == "epoch":
                scheduler.step()

    training = run.prepare(optimizer, scheduler, loader)
    training.run(train)
    assert lost.has_happened and scheduler.last_epoch == (6 if per == "step" else 2)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 / (1 + scheduler.last_epoch))


@pytest.mark.parametrize("where", ["before", "after"])
def test_a_scheduler_is_stepped_once_per_step_through_two_losses_in_a_row(runs: Any, where: str) -> None:
    run, losses = runs(), [Once(), Once()]
    optimizer = SGD(run.model.parameters(), 0.1)
    scheduler = LambdaLR(optimizer, lambda step: 1.0 / (1 + step))

    def train(training: Any) -> None:
        while training.step < 6:
            lost = losses[training.step - 3] if training.step in (3, 4) else None
            run.step(optimizer, torch.ones(1, 2))
            if lost is not None and where == "before":
                lost()
            scheduler.step()
            if lost is not None and where == "after":
                lost()
            training.commit()

    run.prepare(optimizer, scheduler).run(train)
    assert all(one.has_happened for one in losses) and scheduler.last_epoch == 6


def test_a_loss_in_the_commit_of_the_first_irregular_step_steps_no_scheduler_again(
    runs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, lost = runs(), Once()
    optimizer = SGD(run.model.parameters(), 0.1)
    scheduler = LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    training = run.prepare(optimizer, scheduler)
    barrier = training._worker.barrier

    def meet() -> None:
        if training._keeping is Keeping.HELD:
            lost()
        barrier()

    monkeypatch.setattr(training._worker, "barrier", meet)

    def train(training: Any) -> None:
        while training.step < 6:
            run.step(optimizer, torch.ones(1, 2))
            if training.step % 3 == 2:
                scheduler.step()
            training.commit()

    training.run(train)
    assert lost.has_happened and scheduler.last_epoch == 2


def test_a_scheduler_that_wants_a_number_is_not_stepped_without_it(runs: Any) -> None:
    run = runs()
    optimizer, lost = SGD(run.model.parameters(), 0.1), Once()
    scheduler = ReduceLROnPlateau(optimizer)
    training = run.prepare(optimizer, scheduler)

    def train(training: Any) -> None:
        while training.step < 5:
            run.step(optimizer, torch.ones(1, 2))
            if training.step == 3:
                lost()
            scheduler.step(1.0)
            training.commit()

    training.run(train)
    assert lost.has_happened and scheduler.last_epoch == 5 and training._keeping is Keeping.WRITTEN


def test_no_sample_is_used_twice_where_the_place_in_the_data_is_extra(runs: Any) -> None:
    run, position, lost, before = runs(), Position(), Once(), {}
    optimizer = SGD(run.model.parameters(), 0.1)

    def train(training: Any) -> None:
        while position.used < 6:
            weight = run.model.weight.detach().clone()
            # Each place is used on the parameters that the one before has left, and on no others.
            assert torch.equal(before.setdefault(position.used, weight), weight)
            run.step(optimizer, torch.ones(1, 2))
            if position.used == 4:
                lost()
            position.used += 1
            training.commit()

    run.prepare(optimizer, extra={"position": position}).run(train)
    assert lost.has_happened


def test_a_commit_inside_of_the_loop_deals_what_is_left_to_other_ranks(runs: Any) -> None:
    run, seen = runs(worlds=(2, 1), samples=16), []
    run.member.pauses_at = {2}
    optimizer, loader = SGD(run.model.parameters(), 0.1), run.loader()

    def train(training: Any) -> None:
        for _ in training.epochs(1):
            for (x,) in loader:
                run.step(optimizer, x)
                seen.append(loader.state_dict()["position"])
                training.commit()

    run.prepare(optimizer, loader=loader).run(train)
    # Two ranks use four samples per step, one alone two.
    assert seen == [4, 8, 10, 12, 14, 0]


class Taught(torch.nn.Module):
    """With a teacher that no optimizer steps, and that forward moves."""

    def __init__(self, by_data: bool) -> None:
        super().__init__()
        self.inner, self.teacher = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
        self.frozen = torch.nn.Parameter(torch.ones(3))
        self._by_data = by_data

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for param in self.teacher.parameters():
                (param.data if self._by_data else param).add_(1.0)
        return self.inner(x)


@pytest.mark.parametrize("by_data", [False, True])
def test_a_teacher_that_a_lost_step_has_moved_goes_back(runs: Any, by_data: bool) -> None:
    run, lost = runs(), Once()
    run.model = Taught(by_data)
    before = run.model.teacher.weight.detach().clone()
    optimizer = SGD(run.model.inner.parameters(), 0.1)
    training = run.prepare(optimizer)

    def train(training: Any) -> None:
        while training.step < 5:
            loss = run.model(torch.ones(1, 2)).square().mean()
            if training.step == 3:
                lost()
            loss.backward()
            optimizer.step()
            training.commit()

    training.run(train)
    assert lost.has_happened and training._keeping is Keeping.HELD
    assert torch.allclose(run.model.teacher.weight, before + 5.0)
    kept = training._kept["untrained"]
    assert kept[0] is None and kept[1] is not None, "what is frozen is not copied"


def test_a_teacher_that_the_program_moves_after_its_step_has_copies_written(runs: Any) -> None:
    run, lost = runs(), Once()
    run.model = Taught(False)
    optimizer = SGD(run.model.inner.parameters(), 0.1)
    training = run.prepare(optimizer)

    def train(training: Any) -> None:
        while training.step < 5:
            run.model.inner(torch.ones(1, 2)).square().mean().backward()
            optimizer.step()
            if training.step == 3:
                lost()
            with torch.no_grad():
                run.model.teacher.bias.fill_(training.step + 1)
            training.commit()

    training.run(train)
    assert lost.has_happened and training._keeping is Keeping.WRITTEN
    assert run.model.teacher.bias.item() == 5


class Counting(torch.nn.Module):
    """With a state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.count = torch.nn.Linear(2, 1), 0

    def get_extra_state(self) -> int:
        return self.count

    def set_extra_state(self, state: int) -> None:
        self.count = state

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return self.inner(x)


def test_states_of_modules_that_are_no_tensors_are_those_of_the_last_commit(runs: Any) -> None:
    run, lost = runs(), Once()
    run.model = Counting()
    optimizer = SGD(run.model.parameters(), 0.1)

    def train(training: Any) -> None:
        while training.step < 5:
            loss = run.model(torch.ones(1, 2)).square().mean()
            if training.step == 3:
                lost()
            loss.backward()
            optimizer.step()
            training.commit()

    run.prepare(optimizer).run(train)
    assert lost.has_happened and run.model.count == 5


def test_one_rank_that_is_left_keeps_what_was_written_until_it_has_written_the_next(runs: Any) -> None:
    run, lost, found = runs(worlds=(2, 1)), Once(), []
    optimizer = SGD(run.model.parameters(), 0.1)
    training = run.prepare(optimizer)
    write = training._transaction.write

    def look_and_write(*args: Any) -> None:
        if run.worker.world == 1:
            found.append(run.member.newest())
        write(*args)

    training._transaction.write = look_and_write

    def train(training: Any) -> None:
        while training.step < 5:
            run.step(optimizer, torch.ones(1, 2))
            if training.step == 3:
                lost()
            training.commit()

    training.run(train)
    # Of the meeting, of which nothing outlives anybody yet, and of the one commit that follows.
    assert lost.has_happened and found == [-1, 4]


def test_who_waits_alone_writes_what_it_holds_as_of_its_last_commit(runs: Any) -> None:
    run, lost, found = runs(), Once(), []
    run.model = torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 1))
    optimizer = SGD(run.model.parameters(), 0.1)
    meet = run.member.meet

    def meet_alone(why: str, silent: Any, preserve: Any) -> Any:
        paths, version = run.member.formed.images[0], preserve()
        source = ImageSource([paths], version)
        found.append((version, {name: source.whole(f"model/{name}").clone() for name in run.model.state_dict()}))
        return meet(why, silent)

    def train(training: Any) -> None:
        while training.step < 5:
            before = {name: value.clone() for name, value in run.model.state_dict().items()}
            run.model(torch.randn(4, 2)).square().mean().backward()
            if training.step == 3:
                found.append(before)
                lost()
            optimizer.step()
            optimizer.zero_grad()
            training.commit()

    run.member.meet = meet_alone
    run.prepare(optimizer).run(train)
    expected, (version, written) = found[:2]
    assert version == 3 and all(torch.equal(written[name], value) for name, value in expected.items())


class Residuals:
    """A user's own state of a hook."""


class KeptResiduals(Residuals):
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None: ...


@pytest.mark.parametrize(("state", "is_refused"), [(None, False), (Residuals(), True), (KeptResiduals(), False)])
def test_a_hook_whose_state_cannot_be_kept_is_refused(state: Any, is_refused: bool) -> None:
    subject = Subject(None, None, {}, None)
    subject.wrapper = phalanx.DistributedDataParallel.__new__(phalanx.DistributedDataParallel)
    subject.wrapper.__dict__["_hook"] = (state, lambda state, bucket: None)
    with pytest.raises(ConfigError, match=r"Residuals.*state_dict") if is_refused else contextlib.nullcontext():
        refuse_what_cannot_change(subject)


@pytest.mark.parametrize("at", [0, 3])
def test_a_loss_in_the_closure_of_a_step_undoes_it(runs: Any, at: int) -> None:
    run, lost = runs(), Once()
    optimizer = SGD(run.model.parameters(), 0.1, momentum=0.9)
    seen: dict[int, torch.Tensor] = {}

    def train(training: Any) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = run.model(torch.ones(1, 2)).square().mean()
            if training.step == at:
                lost()
            loss.backward()
            return loss

        while training.step < 5:
            weight = run.model.weight.detach().clone()
            assert torch.equal(seen.setdefault(training.step, weight), weight)
            optimizer.step(closure)
            training.commit()

    run.prepare(optimizer).run(train)
    assert lost.has_happened and len(seen) == 5


GENERATORS = {
    "torch": lambda: torch.Generator().manual_seed(1),
    "python": lambda: random.Random(1),
    "numpy": lambda: np.random.Generator(np.random.MT19937(1)),
    "numpy's old one": lambda: np.random.RandomState(1),
}


@pytest.mark.parametrize("kind", GENERATORS)
@pytest.mark.parametrize("drawn", ["before", "after"])
def test_generators_need_copies_only_if_they_are_drawn_from_after_the_step(runs: Any, kind: str, drawn: str) -> None:
    run, lost, seen = runs(), Once(), dict[int, Any]()
    generator: Any = GENERATORS[kind]()
    optimizer = SGD(run.model.parameters(), 0.1)
    training = run.prepare(optimizer, extra={"generator": generator})

    def draw(step: int) -> None:
        number = torch.rand((), generator=generator).item() if kind == "torch" else generator.uniform(0, 1)
        assert seen.setdefault(step, number) == number, "another number for the same step"

    def train(training: Any) -> None:
        while training.step < 6:
            step = training.step
            if drawn == "before":
                draw(step)
            run.step(optimizer, torch.ones(1, 2))
            if step == 3:
                lost()
            if drawn == "after":
                draw(step)
            training.commit()

    training.run(train)
    assert lost.has_happened and len(seen) == 6
    assert training._keeping is (Keeping.HELD if drawn == "before" else Keeping.WRITTEN)


def test_copies_are_of_parameters_as_they_are_though_they_have_gaps() -> None:
    model = torch.nn.Linear(2, 1)
    model.weight.data = torch.zeros(1, 4)[:, ::2]
    transaction = Transaction(Subject(model, None, {}, None))
    for value in (1.0, 2.0):
        with torch.no_grad():
            model.weight.fill_(value)
        pieces, _, _ = transaction._describe(0, 1)
        assert next(one for one in pieces if one.key == "model/weight").values.tolist() == [value, value]


def test_copies_have_states_of_modules_that_are_no_tensors_as_they_are() -> None:
    model = Counting()
    transaction = Transaction(Subject(model, None, {}, None))
    told = []
    for model.count in (1, 2):
        _, _, texts = transaction._describe(0, 1)
        told.append(repr(texts["model"]["extra"]))
    assert told[0] != told[1]
