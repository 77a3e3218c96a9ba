"""Buffers that modules make, replace and let grow, and that scripts change after a step (see `mirrored`)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim import SGD

from phalanx.checkpoint.capture import Subject
from phalanx.elastic.image import ImageSource, RankImage
from phalanx.elastic.keeping import Keeping
from phalanx.elastic.transaction import Buffers, Transaction
from phalanx.launch.elastic.heads import Files, Paths
from tests.elastic.mirrored import Once
from tests.elastic.program import Position


class Averaged(torch.nn.Module):
    """With an average of its weights in a buffer, which the script brings up to date after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(2, 1)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.inner(x)
        return result

    def average(self, is_replaced: bool) -> None:
        if is_replaced:
            self.count = self.count + 1
        else:
            self.count.add_(1)


@pytest.mark.parametrize("is_replaced", [False, True])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_buffer_that_the_script_changes_after_the_step_is_changed_once(runs: Any, moment: str, is_replaced: bool) -> None:
    run, lost = runs(), Once()
    run.model = Averaged()
    optimizer = SGD(run.model.parameters(), 0.1)
    training = run.prepare(optimizer)

    def train(training: Any) -> None:
        while training.step < 5:
            run.step(optimizer, torch.ones(1, 2))
            if (training.step, moment) == (3, "before"):
                lost()
            run.model.average(is_replaced)
            if (training.step, moment) == (3, "after"):
                lost()
            training.commit()

    training.run(train)
    assert lost.has_happened and training._keeping is Keeping.WRITTEN
    assert run.model.count.item() == 5


@pytest.mark.parametrize("moment", ["before the step", "after it", "after the loop"])
@pytest.mark.parametrize("is_written", [False, True])
def test_a_loss_in_an_evaluation_leaves_no_module_in_its_mode(runs: Any, moment: str, is_written: bool) -> None:
    run, lost, seen = runs(samples=40), Once(), []
    run.model = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Dropout())
    optimizer, loader = SGD(run.model.parameters(), 0.1), run.loader()

    def evaluate(now: str) -> None:
        if now != moment or lost.has_happened:
            return
        run.model.eval()
        if training.step == (9 if moment == "after the loop" else 3):
            lost()
        run.model.train()
        run.model[0].eval()

    def train(training: Any) -> None:
        for _ in training.epochs(2):
            for (x,) in loader:
                evaluate("before the step")
                seen.append([one.training for one in run.model.modules()])
                run.step(optimizer, x)
                evaluate("after it")
            evaluate("after the loop")

    training = run.prepare(optimizer, loader=loader, extra={"place": Position()} if is_written else None)
    run.model[0].eval()
    training.run(train)
    assert lost.has_happened and all(modes == [True, False, True] for modes in seen)


class Caching(torch.nn.Module):
    """Makes buffers in forward: a statistic at the first one, and a cache that grows and whose size it remembers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.size = torch.nn.Linear(2, 1), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "seen"):
            self.register_buffer("seen", torch.zeros(1))
        self.seen = torch.cat([self.seen, torch.ones(1)])
        if len(x) > self.size:
            self.size = len(x)
            self.register_buffer("cache", torch.ones(self.size), persistent=False)
        result: torch.Tensor = self.inner(x) * self.cache[: len(x), None]
        return result


@pytest.mark.parametrize("at", [0, 3])
def test_a_step_that_made_buffers_or_let_them_grow_is_undone(runs: Any, at: int) -> None:
    run, lost = runs(), Once()
    run.model = Caching()
    optimizer = SGD(run.model.inner.parameters(), 0.1)
    training = run.prepare(optimizer)

    def train(training: Any) -> None:
        while training.step < 5:
            loss = run.model(torch.ones(1 + training.step, 2)).square().mean()
            if training.step == at:
                lost()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            training.commit()

    training.run(train)
    assert lost.has_happened and training.step == 5
    assert run.model.seen.tolist() == [0.0, *[1.0] * 5], "a forward that never was has left its mark"


def test_a_buffer_that_was_made_in_an_evaluation_is_put_back() -> None:
    module = torch.nn.Module()
    with torch.inference_mode():
        module.register_buffer("cache", torch.ones(2))
    buffers = Buffers(module)
    kept, before = buffers.keep(), buffers.marks()
    with torch.inference_mode():
        module.cache.fill_(3.0)
    buffers.give(kept)
    assert module.cache.tolist() == [1.0, 1.0] and buffers.marks() != before


def test_a_buffer_that_a_lost_step_has_emptied_is_put_back() -> None:
    module = torch.nn.Module()
    module.register_buffer("seen", torch.ones(2))
    buffers = Buffers(module)
    kept = buffers.keep()
    module.seen = None
    buffers.give(kept)
    assert module.seen is not None and module.seen.tolist() == [1.0, 1.0]
    module.seen.add_(1)
    assert kept["seen"].tolist() == [1.0, 1.0]


def test_who_comes_takes_buffers_that_are_in_no_state_dict() -> None:
    first, second = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    for model, value in ((first, 5.0), (second, 0.0)):
        model.register_buffer("passed", torch.tensor([value]), persistent=False)
    passing = Transaction(Subject(first, None, {}, None)).keep()
    Transaction(Subject(second, None, {}, None)).give(passing, None)
    assert second.passed.item() == 5.0


def _with_teacher() -> tuple[torch.nn.ModuleList, Transaction]:
    torch.manual_seed(0)
    model = torch.nn.ModuleList([torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)])
    optimizer = SGD(model[0].parameters(), 0.1)
    return model, Transaction(Subject(model, optimizer, {}, None))


def _move(model: torch.nn.ModuleList) -> None:
    with torch.no_grad():
        model[1].weight.add_(1.0)


def test_who_comes_takes_a_teacher_as_it_was_before_the_step_that_was_undone() -> None:
    (first, there), (second, comes) = _with_teacher(), _with_teacher()
    there.keep()
    _move(first)
    passing = there.keep()
    expected = first[1].weight.detach().clone()
    _move(first)  # in the forward of a step that is undone
    files = Files("written")
    image = RankImage(Paths.of(files.paths), 0, 1)
    there.write(image, 1, 0, 1, passing)
    source = ImageSource([Paths.of(files.paths)], 1)
    comes.read(source, 0, 1, None)
    comes.give(source.rest[0], None)
    assert torch.equal(second[1].weight, expected)
    kept = comes.keep()
    _move(second)
    comes.put_back(kept)
    assert torch.equal(second[1].weight, expected), "the first step of who has come was not undone"
    image.close()
    files.close()
