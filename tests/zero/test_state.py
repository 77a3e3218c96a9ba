"""The whole state: what the plain optimizer would save, loadable by it and from it, on any partition."""

from __future__ import annotations

import copy
import pickle
from collections import defaultdict
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import optim

import phalanx
from phalanx.errors import StateError
from phalanx.zero import ZeroRedundancyOptimizer, elementwise
from phalanx.zero.state import transfer
from phalanx.zero.state.tree import describe, leaves_of, rebuild
from tests.cluster import run_ranks
from tests.zero.cases import Given, differing, mean_gradients, own_gradients, sample, set_gradients

pytestmark = [pytest.mark.timeout(60), pytest.mark.covering(1)]


def trained(steps: int = 4, make: Any = optim.AdamW, **options: Any) -> tuple[Given, ZeroRedundancyOptimizer]:
    model = Given()
    zero = ZeroRedundancyOptimizer(list(model.named_parameters()), make, lr=0.01, **options)
    for step in range(steps):
        set_gradients(list(model.parameters()), mean_gradients(model, step))
        zero.step()
    return model, zero


def plainly(steps: int = 4, make: Any = optim.AdamW) -> tuple[Given, optim.Optimizer]:
    model = Given()
    plain = make(list(model.named_parameters()), lr=0.01)
    for step in range(steps):
        set_gradients(list(model.parameters()), mean_gradients(model, step))
        plain.step()
    return model, plain


def equal(left: Any, right: Any) -> bool:
    """The same keys in the same order, the same types, the same bits."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        same = left.dtype == right.dtype and left.device == right.device and left.stride() == right.stride()
        return same and torch.equal(left, right)
    if isinstance(left, dict):
        return list(left) == list(right) and all(equal(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(equal, left, right))
    return bool(left == right)


NEVER_USED = ((70,), (20000,), (5,), (20000,))  # a small and a large one (more than 64 KiB) of each sort


def from_construction(rank: int, world: int, steps: int, options: dict[str, Any]) -> bool:
    """Adagrad has state for every parameter as soon as it is made; here the last two never get a gradient."""
    plain_model, model = Given(NEVER_USED), Given(NEVER_USED)
    plain = optim.Adagrad(plain_model.parameters(), lr=0.01, initial_accumulator_value=0.5)
    wrapped = phalanx.DistributedDataParallel(model, bucket_cap_mb=0.05, on_unused="ignore")
    zero = ZeroRedundancyOptimizer(
        model.parameters(), optim.Adagrad, overlap_with_ddp=True, lr=0.01, initial_accumulator_value=0.5, **options
    )
    for step in range(steps):
        set_gradients(list(plain_model.parameters()), [*mean_gradients(plain_model, step)[:2], None, None])
        plain.step()
        zero.zero_grad()
        wrapped([*own_gradients(model, step, rank, world)[:2], None, None]).backward()
        zero.step()
    zero.add_param_group({"params": [torch.nn.Parameter(torch.ones(3), requires_grad=False)]})
    plain.add_param_group({"params": [torch.nn.Parameter(torch.ones(3), requires_grad=False)]})
    zero.consolidate_state_dict(to=0)
    return differing(model, sample(plain_model)) == [] and (
        rank != 0 or equal(zero.state_dict()["state"], plain.state_dict()["state"])
    )


@pytest.mark.parametrize("backend", ["gloo", "phalanx"])
@pytest.mark.parametrize("options", [{}, {"stage": 2}, {"step_in_backward": False}, {"partition": "parameter"}], ids=str)
def test_state_that_is_there_from_construction_is_kept(options: dict[str, Any], backend: str) -> None:
    for steps in (0, 1, 3):
        assert run_ranks(2, from_construction, steps, options, backend=backend) == [True, True]


def collect(rank: int, world: int, partition: str) -> Any:
    _, zero = trained(partition=partition)
    with mock.patch("torch.distributed.distributed_c10d._object_to_tensor", side_effect=AssertionError("pickled")):
        zero.consolidate_state_dict(to=1)
    return zero.state_dict() if rank == 1 else None


@pytest.mark.parametrize("partition", ["element", "parameter"])
def test_a_consolidated_state_is_exactly_the_plain_one(partition: str) -> None:
    _, plain = plainly()
    state = run_ranks(3, collect, partition)[1]
    assert equal(state, plain.state_dict())


def collect_slowly(rank: int, world: int, message_numel: int) -> Any:
    """With messages much smaller than the state; what was received at once is written down."""
    _, zero = trained()
    sizes = []
    collectives = zero._sharded.collectives
    gather = collectives.all_gather

    def watch(output: torch.Tensor, input: torch.Tensor) -> Any:
        if output.dtype == torch.float32:
            sizes.append(output.numel())
        return gather(output, input)

    with mock.patch.object(transfer, "_MESSAGE_NUMEL", message_numel), mock.patch.object(collectives, "all_gather", watch):
        zero.consolidate_state_dict()
    return sizes, zero.state_dict() if rank == 0 else None


@pytest.mark.parametrize("backend", ["gloo", "phalanx"])
def test_the_memory_of_a_consolidation_is_bounded(backend: str) -> None:
    _, plain = plainly()
    (sizes, state), *_ = run_ranks(3, collect_slowly, 50, backend=backend)
    assert equal(state, plain.state_dict())
    assert len(sizes) > 10 and max(sizes) <= 3 * 50


def both_ways(rank: int, world: int, partition: str) -> Any:
    expected, _ = plainly(8)
    # From the plain optimizer to the sharded one.
    model, halfway = plainly(4)
    zero = ZeroRedundancyOptimizer(list(model.named_parameters()), optim.AdamW, lr=0.5, partition=partition)
    zero.load_state_dict(halfway.state_dict())
    for step in range(4, 8):
        set_gradients(list(model.parameters()), mean_gradients(model, step))
        zero.step()
    found = [differing(model, sample(expected))]
    # From the sharded one to the plain one, and to the other partition.
    model, zero = trained(4, partition=partition)
    zero.consolidate_state_dict()
    box = [zero.state_dict() if rank == 0 else None]
    dist.broadcast_object_list(box)
    other = {"element": "parameter", "parameter": "element"}[partition]
    for make in (
        lambda params: optim.AdamW(params, lr=0.5),
        lambda params: ZeroRedundancyOptimizer(params, optim.AdamW, lr=0.5, partition=other),
    ):
        again = copy.deepcopy(model)
        one = make(list(again.named_parameters()))
        one.load_state_dict(copy.deepcopy(box[0]))
        for step in range(4, 8):
            set_gradients(list(again.parameters()), mean_gradients(again, step))
            one.step()
        found.append(differing(again, sample(expected)))
    return found


@pytest.mark.parametrize("partition", ["element", "parameter"])
def test_states_go_from_and_to_the_plain_optimizer_and_the_other_partition(partition: str) -> None:
    assert run_ranks(2, both_ways, partition) == [[[]] * 3] * 2


def ask_too_early(rank: int, world: int) -> None:
    model, zero = trained(2)
    with pytest.raises(RuntimeError, match=r"consolidate_state_dict\(to="):
        zero.state_dict()
    zero.consolidate_state_dict(to=0)
    if rank == 0:
        zero.state_dict()
    else:
        with pytest.raises(RuntimeError, match=f"rank {rank}: Optimizer state has not been consolidated"):
            zero.state_dict()
    set_gradients(list(model.parameters()), mean_gradients(model, 2))
    zero.step()
    with pytest.raises(RuntimeError, match="since the last step"):
        zero.state_dict()
    with pytest.raises(ValueError, match="to must be a rank"):
        zero.consolidate_state_dict(to=world)
    with pytest.raises(StateError, match="cannot be pickled"):
        pickle.dumps(zero)
    with pytest.raises(StateError, match="cannot be pickled or copied"):
        copy.deepcopy(zero)


def test_a_state_that_is_not_here_is_not_given() -> None:
    run_ranks(2, ask_too_early)


def alone_needs_no_consolidation(rank: int, world: int) -> Any:
    return trained(3)[1].state_dict()


def test_one_rank_has_the_whole_state() -> None:
    assert equal(run_ranks(1, alone_needs_no_consolidation)[0], plainly(3)[1].state_dict())


def _without(state: dict[str, Any], index: int, key: str) -> None:
    del state["state"][index][key]


def _foreign(state: dict[str, Any]) -> None:
    for one in state["state"].values():
        one["momentum_buffer"] = one.pop("exp_avg")


BROKEN: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a key is missing": (lambda s: _without(s, 1, "exp_avg_sq"), r"weights\.1: not a state of AdamW"),
    "another optimizer's": (_foreign, r"weights\.0: not a state of AdamW"),
    "a tensor is truncated": (
        lambda s: s["state"][4].update(exp_avg=s["state"][4]["exp_avg"][:100]),
        r"weights\.4: its state 'exp_avg' has shape \(100,\)",
    ),
    "a tensor is another shape": (
        lambda s: s["state"][1].update(exp_avg=torch.zeros(10, 13)),
        r"weights\.1: its state 'exp_avg' has shape",
    ),
    "not a dict": (lambda s: s["state"].update({0: 5}), r"weights\.0: its state must be a dict, got int"),
    "half of amsgrad": (
        lambda s: s["state"][2].update(max_exp_avg_sq=torch.zeros(6)),
        r"weights\.2: its state has .*truncated or mixed up",
    ),
    "a parameter too many": (lambda s: s["state"].update({99: s["state"][0]}), "entry for parameter 99"),
    "a parameter too few": (lambda s: s["param_groups"][0]["params"].pop(), "group 0 has 8 parameters"),
    "a group too many": (lambda s: s["param_groups"].append(s["param_groups"][0]), "2 parameter groups"),
    "no groups": (lambda s: s.pop("param_groups"), "expected the keys 'state' and 'param_groups'"),
    "nothing": (lambda s: s.clear(), "expected the keys 'state' and 'param_groups'"),
}


def load_broken(rank: int, world: int, partition: str) -> list[Any]:
    expected, plain = plainly(6)
    _, saved = plainly(3)
    model, zero = trained(4, partition=partition)
    found: list[Any] = []
    for name, (spoil, words) in BROKEN.items():
        state = copy.deepcopy(saved.state_dict())
        spoil(state)
        with pytest.raises(StateError, match=words):
            zero.load_state_dict(state)
        found.append(name)
    with pytest.raises(StateError):
        zero.load_state_dict(5)  # type: ignore[arg-type]
    for step in range(4, 6):
        set_gradients(list(model.parameters()), mean_gradients(model, step))
        zero.step()
    zero.consolidate_state_dict()
    same = rank != 0 or equal(zero.state_dict(), plain.state_dict())
    return [len(found), differing(model, sample(expected)), same]


@pytest.mark.parametrize("partition", ["element", "parameter"])
def test_a_broken_state_is_refused_by_name_and_changes_nothing(partition: str) -> None:
    assert run_ranks(2, load_broken, partition) == [[len(BROKEN), [], True]] * 2


def load_into_overlapped(rank: int, world: int) -> Any:
    """Loaded before the first backward, after it, and while the plan is about to be replaced."""
    found = []
    expected, _ = plainly(8)
    for before in (0, 1, 2):
        start, saved = plainly(4)
        model = Given()
        wrapped = phalanx.DistributedDataParallel(model, bucket_cap_mb=0.0025, on_unused="ignore")
        zero = ZeroRedundancyOptimizer(list(model.named_parameters()), optim.AdamW, overlap_with_ddp=True, lr=0.01)
        for step in range(before):
            wrapped(mean_gradients(model, step)).backward()
            zero.step()
            zero.zero_grad()
        with torch.no_grad():
            for param, value in zip(model.parameters(), start.parameters(), strict=True):
                param.copy_(value)
        zero.load_state_dict(saved.state_dict())
        for step in range(4, 8):
            zero.zero_grad()
            wrapped(mean_gradients(model, step)).backward()
        found.append(differing(model, sample(expected)))
    return found


def test_loading_at_any_time_of_an_overlapped_training() -> None:
    assert run_ranks(2, load_into_overlapped) == [[[]] * 3] * 2


def load_before_the_weights(rank: int, world: int) -> list[float]:
    values = torch.tensor([0.1, 0.2])
    params = [torch.nn.Parameter(value.clone()) for value in (values if rank == 0 else 1 + values.flip(0))]
    zero = ZeroRedundancyOptimizer(params, optim.AdamW, lr=0.1)
    moments = [
        {"step": torch.tensor(3.0), "exp_avg": torch.tensor(mean), "exp_avg_sq": torch.tensor(1.0)} for mean in (0.5, 1.5)
    ]
    zero.load_state_dict(optim.AdamW(params, lr=0.1).state_dict() | {"state": dict(enumerate(moments))})
    for param, value in zip(params, values, strict=True):
        param.data.copy_(value)
        param.grad = torch.ones(())
    zero.step()
    return [param.item() for param in params]


def test_the_state_may_be_loaded_before_ranks_have_the_same_weights() -> None:
    first, second = run_ranks(2, load_before_the_weights)
    assert first == second


def with_hooks(rank: int, world: int) -> list[str]:
    _, saved = plainly(2)
    _, zero = trained(2)
    calls: list[str] = []
    zero.register_load_state_dict_pre_hook(lambda one, state: calls.append("before"))
    zero.register_load_state_dict_post_hook(lambda one: calls.append("after"))
    zero.register_state_dict_post_hook(lambda one, state: calls.append("saved"))
    zero.load_state_dict(saved.state_dict())
    zero.consolidate_state_dict(to=rank if world == 1 else 0)
    if rank == 0:
        zero.state_dict()
    return calls


def test_hooks_around_saving_and_loading() -> None:
    assert run_ranks(2, with_hooks) == [["before", "after", "saved"], ["before", "after"]]


def begin_anew(rank: int, world: int, overlapped: bool) -> list[list[int]]:
    """As users of any optimizer do, in two ways; what would have no effect is refused."""
    plain_model, model = Given(), Given()
    plain = optim.Adam(plain_model.parameters(), lr=0.01)
    wrapped = phalanx.DistributedDataParallel(model, on_unused="ignore") if overlapped else None
    zero = ZeroRedundancyOptimizer(model.parameters(), optim.Adam, overlap_with_ddp=overlapped, lr=0.01)
    found = []
    for step in range(6):
        for one in (plain, zero):
            if step == 2:
                one.state = defaultdict(dict)
            if step == 4:
                one.state.clear()
        set_gradients(list(plain_model.parameters()), mean_gradients(plain_model, step))
        plain.step()
        zero.zero_grad()
        if wrapped is None:
            set_gradients(list(model.parameters()), mean_gradients(model, step))
        else:
            wrapped(own_gradients(model, step, rank, world)).backward()
        zero.step()
        found.append(differing(model, sample(plain_model)))
    param = model.weights[0]
    assert not zero.state and zero.state[param] == {} and zero.state.get(param) is None
    writes = (lambda: zero.state.update({param: {}}), lambda: zero.state.pop(param), lambda: setattr(zero, "state", {1: 2}))
    for write in writes:
        with pytest.raises(StateError, match=r"not in `optimizer\.state`"):
            write()
    return found


@pytest.mark.parametrize("overlapped", [False, True], ids=["alone", "overlapped"])
def test_a_state_that_is_emptied_begins_anew(overlapped: bool) -> None:
    assert run_ranks(2, begin_anew, overlapped) == [[[]] * 6] * 2


class Counting(optim.SGD):
    """Counts steps in a state that belongs to no parameter."""

    def step(self, closure: Any = None) -> Any:
        self.state["count"] = self.state["count"] + 1 if "count" in self.state else 1  # type: ignore[index, operator]
        return super().step(closure)


def keep_state_of_no_parameter(rank: int, world: int) -> None:
    _, zero = trained(2, Counting)
    for use in (zero.consolidate_state_dict, zero.sharded_state_dict):
        with pytest.raises(StateError, match="keeps 'count' in its state, which belongs to no parameter"):
            use()


def test_a_state_of_no_parameter_is_not_lost_in_silence() -> None:
    run_ranks(2, keep_state_of_no_parameter)


@elementwise
class Late(optim.SGD):
    """Remembers gradients from the second step of a parameter on."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                state = self.state[param]
                if "steps" in state:
                    state["last"] = param.grad.clone()
                state["steps"] = 1
                param.sub_(param.grad, alpha=self.param_groups[0]["lr"])


def reload_keys_of_parameters(rank: int, world: int) -> Any:
    model, zero = trained(1, Late)
    params = list(model.parameters())
    set_gradients(params, mean_gradients(model, 1))
    params[0].grad = None
    zero.step()
    saved = []
    for to in range(world):
        zero.consolidate_state_dict(to)
        saved += [zero.state_dict()] if to == rank else []
    zero.load_state_dict(saved[0])
    return ["last" in saved[0]["state"][number] for number in range(2)]


def test_parameters_of_a_class_of_ones_own_may_have_different_states() -> None:
    assert run_ranks(2, reload_keys_of_parameters) == [[False, True]] * 2


def schedule_anew(rank: int, world: int, load: bool) -> Any:
    """Of one optimizer as of the other: a schedule leaves something in the groups, which is gone before the next one."""
    found = []
    for model, optimizer in (plainly(1), trained(1)):
        saved = plainly(1)[1].state_dict()
        optim.lr_scheduler.StepLR(optimizer, 1)
        set_gradients(list(model.parameters()), mean_gradients(model, 1))
        optimizer.step()
        if load:
            optimizer.load_state_dict(saved)
        else:
            del optimizer.param_groups[0]["initial_lr"]
        optimizer.param_groups[0]["lr"] = 0.5
        optimizer.step()
        keys = list(optimizer.param_groups[0])
        found.append((keys, optim.lr_scheduler.StepLR(optimizer, 1).base_lrs))
    return found


@pytest.mark.parametrize("load", [False, True], ids=["deleted", "loaded"])
def test_what_is_taken_out_of_the_groups_does_not_come_back(load: bool) -> None:
    for plain, sharded in run_ranks(2, schedule_anew, load):
        assert sharded == plain and plain[1] == [0.5]


def test_states_whose_keys_have_dots_of_their_own_are_kept_apart() -> None:
    param, state = torch.zeros(3), {"a": {"b": torch.ones(3)}, "a.b": torch.full((3,), 2.0)}
    tree, leaves = describe(state, param, "the optimizer")
    assert sorted(leaf.path for leaf in leaves_of(tree)) == sorted(leaves) and len(leaves) == 2
    again = rebuild(tree, param.device, lambda leaf: leaves[leaf.path])
    assert torch.equal(again["a"]["b"], state["a"]["b"]) and torch.equal(again["a.b"], state["a.b"])
