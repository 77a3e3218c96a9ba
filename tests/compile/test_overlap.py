"""From recorded moments: buckets of a cut model leave while backward still computes, those of an uncut one after it."""

from __future__ import annotations

import pytest
import torch

from tests.cluster import run_ranks
from tests.compile.training import check_one_plan, cut, eager, train, train_both, uncut, wrap

pytestmark = pytest.mark.timeout(60)



def count_early(rank: int, world: int, names: tuple[str, ...]) -> dict[str, tuple[int, int, int]]:
    found = {}
    for name in names:
        plain, compiled = train_both(rank, name, cut)
        assert compiled.equals(plain), name
        whole = wrap(name)
        check_one_plan(compiled.wrapper)
        num_buckets = len(compiled.wrapper.plan.buckets)
        found[name] = (num_buckets, compiled.launched_early, train(rank, whole, uncut(whole)).launched_early)
    return found


# That those of every other model leave early, over gloo, is in test_models.py.
@pytest.mark.parametrize(
    ("backend", "names"),
    [
        ("phalanx", ("mlp",)),
        pytest.param("gloo", ("mlp", "sequential", "gpt", "cnn"), marks=pytest.mark.thorough),
        pytest.param("phalanx", ("sequential", "cnn", "gpt"), marks=pytest.mark.thorough),
    ],
)
def test_all_but_the_last_bucket_leave_before_backward_ends_and_none_without_cuts(
    backend: str, names: tuple[str, ...]
) -> None:
    for found in run_ranks(2, count_early, names, backend=backend):
        for name, (num_buckets, early, early_uncut) in found.items():
            assert num_buckets >= 3, name
            assert early >= num_buckets - 1, name
            assert early_uncut == 0, name


def later(rank: int, world: int) -> tuple[str, str, str, int, int]:
    """Trained eagerly first: the plan is settled when the model is compiled, and cannot change any more."""
    torch._dynamo.reset()
    wrapper = wrap("mlp")
    train(rank, wrapper, eager(wrapper))
    before = wrapper.plan.hash
    compiled = train(rank, wrapper, cut(wrapper))
    explanation = check_one_plan(wrapper, made_of_pieces=False)
    return before, wrapper.plan.hash, explanation.plan.hash, compiled.launched_early, len(wrapper.plan.buckets)


def test_a_model_compiled_in_the_middle_of_training_is_cut_by_the_plan_in_force() -> None:
    for before, after, explained, early, num_buckets in run_ranks(2, later):
        assert before == after == explained
        # The eager plan may end a bucket between the weight and the bias of one layer, which come at once.
        assert early >= num_buckets - 2 > 1
