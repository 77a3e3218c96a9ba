"""A step that ended midway: whoever uses the parameters next is told, and what can be refused is refused before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from phalanx.errors import PhalanxError, ReductionError
from phalanx.zero import ZeroRedundancyOptimizer
from tests.cluster import run_ranks
from tests.ddp.by_hand import BrokenLayer
from tests.zero.cases import Given, differing, mean_gradients, sample, set_gradients
from tests.zero.test_failed_backward import Brittle
from tests.zero.test_usage import everyone

pytestmark = [pytest.mark.timeout(60), pytest.mark.covering(1)]

partitions = pytest.mark.parametrize("partition", ["element", "parameter"])


def made(**options: Any) -> tuple[Given, ZeroRedundancyOptimizer]:
    Brittle.num_left = 1000
    model = Given(((300,), (290,), (64, 3), (280,)))
    zero = ZeroRedundancyOptimizer(model.parameters(), Brittle, lr=0.1, **options)
    for step in range(2):
        set_gradients(list(model.parameters()), mean_gradients(model, step))
        zero.step()
    set_gradients(list(model.parameters()), mean_gradients(model, 0))
    return model, zero


def check_told(zero: ZeroRedundancyOptimizer) -> None:
    assert zero.is_torn
    for use in (zero.step, zero.consolidate_state_dict, zero.sharded_state_dict, zero.step):
        with pytest.raises(ReductionError, match=r"between two steps\. Load a checkpoint"):
            use()


def call_another(rank: int, world: int, partition: str, closure: Callable[[], float] | None) -> list[int]:
    """Rank 1 calls something else when rank 0 makes a step. With a closure nobody votes, and it has stepped its part."""
    model, zero = made(partition=partition)
    before = sample(model)
    with pytest.raises((PhalanxError, RuntimeError)):
        zero.step(closure) if rank == 0 else dist.all_reduce(torch.ones(7))
    if rank == 0 and closure is not None:
        check_told(zero)
        return []
    assert not zero.is_torn  # of which the others will hear when they meet
    return differing(model, before)


def test_a_rank_whose_step_met_another_collective_says_so_afterwards() -> None:
    run_ranks(2, call_another, "element", float, backend="phalanx")


@partitions
def test_a_step_that_others_do_not_make_changes_nothing(partition: str) -> None:
    assert run_ranks(2, call_another, partition, None, backend="phalanx") == [[], []]


def raise_midway(rank: int, world: int, partition: str) -> None:
    _, zero = made(partition=partition)
    Brittle.num_left = 1
    with pytest.raises(BrokenLayer):
        zero.step()
    Brittle.num_left = 1000
    check_told(zero)
    # Another one hears nothing of the failure of the first, which all ranks have seen.
    made(partition=partition)


@everyone
@partitions
def test_a_step_that_raised_midway_is_not_gone_on_from(partition: str, backend: str) -> None:
    run_ranks(2, raise_midway, partition, backend=backend)


def raise_on_one(rank: int, world: int, partition: str) -> None:
    """The user of the rank that raised caught it, so that nobody ends: the others must not wait for the time limit."""
    _, zero = made(partition=partition)
    Brittle.num_left = 0 if rank == 1 else 1000
    said = "in the midst of a step" if rank == 1 else r"rank 1 failed first: BrokenLayer in step\(\)"
    with pytest.raises((BrokenLayer, PhalanxError), match=said):
        zero.step()
    Brittle.num_left = 1000
    check_told(zero)


# On shared memory the others wait for the rank to go on, or to end.
@partitions
def test_a_step_that_raises_on_one_rank_is_told_to_the_others(partition: str) -> None:
    run_ranks(2, raise_on_one, partition)


def raise_alone(rank: int, world: int) -> list[int]:
    """As the plain optimizer: what has been stepped stays, and the next step is the next one."""
    plain_model = Given(((300,), (64,)))
    plain = Brittle(plain_model.parameters(), lr=0.1)
    model = Given(((300,), (64,)))
    zero = ZeroRedundancyOptimizer(model.parameters(), Brittle, lr=0.1)
    for step, num_left in enumerate((1000, 1, 1000)):
        for each, one in ((plain_model, plain), (model, zero)):
            Brittle.num_left = num_left
            set_gradients(list(each.parameters()), mean_gradients(each, step))
            if num_left == 1:
                with pytest.raises(BrokenLayer):
                    one.step()
            else:
                one.step()
    return differing(model, sample(plain_model))


def test_one_rank_by_itself_goes_on_as_the_plain_optimizer_does() -> None:
    assert run_ranks(1, raise_alone) == [[]]


def refuse_before(rank: int, world: int, how: str, partition: str) -> list[int]:
    """What is wrong with the last bucket is seen before the first one is stepped."""
    shapes = ((64,), (130, 10))
    model = Given(shapes, torch.float32)
    model.weights.append(torch.nn.Parameter(torch.ones(8, 8, dtype=torch.float64)))  # in a bucket of its own
    zero = ZeroRedundancyOptimizer(model.parameters(), Brittle, lr=0.1, partition=partition)
    last, before = model.weights[2], sample(model)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    if how == "sparse":
        last.grad = torch.ones_like(last).to_sparse()
    else:
        last.data = torch.ones(4, 16, dtype=torch.float64)
        last.grad = torch.ones(4, 16, dtype=torch.float64)
    with pytest.raises(PhalanxError, match=r"sparse=False|when the optimizer was made"):
        zero.step()
    assert not zero.is_torn
    return differing(torch.nn.ParameterList(list(model.weights)[:2]), before[:2])


@pytest.mark.parametrize(("how", "partition"), [("sparse", "element"), ("reshaped", "element"), ("reshaped", "parameter")])
def test_what_cannot_be_stepped_is_refused_before_anything_is(how: str, partition: str) -> None:
    assert run_ranks(2, refuse_before, how, partition) == [[]] * 2
