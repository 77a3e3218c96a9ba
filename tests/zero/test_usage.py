"""Used as any torch optimizer is used, alone and overlapped, it does what the plain optimizer does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import phalanx
from phalanx.zero import ZeroRedundancyOptimizer, elementwise
from tests.cluster import run_ranks
from tests.zero.cases import Given, differing, mean_gradients, own_gradients, sample, set_gradients

pytestmark = [pytest.mark.timeout(60), pytest.mark.covering(1)]

both = pytest.mark.parametrize("overlapped", [False, True], ids=["alone", "overlapped"])
everyone = pytest.mark.parametrize("backend", ["gloo", "phalanx"])


class Pair:
    """The same model trained plainly and sharded; `step` does both and says which parameters differ."""

    def __init__(
        self,
        overlapped: bool,
        make: Callable[..., optim.Optimizer],
        groups: Callable[[nn.Module], Any] = lambda model: list(model.parameters()),
        build: Callable[[], nn.Module] = Given,
        zero_options: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.plain_model, self.model = build(), build()
        self.wrapped: Any = None
        if overlapped:
            self.wrapped = phalanx.DistributedDataParallel(self.model, bucket_cap_mb=0.0025, on_unused="ignore")
        self.plain = make(groups(self.plain_model), **options)
        self.zero = ZeroRedundancyOptimizer(
            groups(self.model), make, overlap_with_ddp=overlapped, **(zero_options or {}), **options
        )
        self.optimizers = (self.plain, self.zero)

    def set_plain(self, step: int) -> None:
        params = list(self.plain_model.parameters())
        set_gradients(params, mean_gradients(self.plain_model, step))
        for param in params:
            if not param.requires_grad:
                param.grad = None

    def backward(self, step: int) -> None:
        """Leave (alone) or use (overlapped) the mean gradients of a step."""
        if self.wrapped is None:
            set_gradients(list(self.model.parameters()), mean_gradients(self.model, step))
            for param in self.model.parameters():
                if not param.requires_grad:
                    param.grad = None
        else:
            given = own_gradients(self.model, step, dist.get_rank(), dist.get_world_size())
            self.wrapped(given).backward()

    def step(self, step: int, **arguments: Any) -> list[int]:
        self.set_plain(step)
        self.plain.step(**arguments)
        self.zero.zero_grad()
        self.backward(step)
        self.zero.step(**arguments)
        return differing(self.model, sample(self.plain_model))


def in_groups(model: nn.Module) -> list[dict[str, Any]]:
    params = list(model.parameters())
    return [
        {"params": params[:3], "weight_decay": 0.1},
        {"params": params[3:5], "lr": 0.003, "betas": (0.8, 0.9)},
        {"params": params[5:]},
    ]


def groups_and_edits(rank: int, world: int, overlapped: bool, partition: str) -> list[Any]:
    pair = Pair(overlapped, optim.AdamW, in_groups, lr=0.01, zero_options={"partition": partition})
    schedulers = [optim.lr_scheduler.OneCycleLR(one, max_lr=0.05, total_steps=20) for one in pair.optimizers]
    found = []
    for step in range(8):
        if step == 4:
            for one in pair.optimizers:
                one.param_groups[1]["weight_decay"] = 0.3
                one.param_groups[2]["eps"] = 1e-3
        found.append(pair.step(step))
        for scheduler in schedulers:
            scheduler.step()
    shown = [[{k: v for k, v in g.items() if k != "params"} for g in one.param_groups] for one in pair.optimizers]
    return [found, shown[0] == shown[1]]


@both
@pytest.mark.parametrize("partition", ["element", "parameter"])
def test_groups_with_schedulers_and_edits_between_steps(overlapped: bool, partition: str) -> None:
    assert run_ranks(2, groups_and_edits, overlapped, partition) == [[[[]] * 8, True]] * 2


def add_groups(rank: int, world: int, partition: str) -> list[Any]:
    pair = Pair(
        False, optim.Adam, lambda model: list(model.parameters())[:4], zero_options={"partition": partition}, lr=0.01
    )
    found = []
    for step in range(9):
        if step in (0, 3, 6):
            more = slice(4 + step // 3, 5 + step // 3) if step < 6 else slice(6, None)
            for one, model in zip(pair.optimizers, (pair.plain_model, pair.model), strict=True):
                one.add_param_group({"params": list(model.parameters())[more], "lr": 0.02 + step / 100})
        found.append(pair.step(step))
    pair.zero.consolidate_state_dict()
    if rank == 0:
        whole = pair.zero.state_dict()
        plain = pair.plain.state_dict()
        assert whole["param_groups"] == plain["param_groups"]
        for index, state in plain["state"].items():
            assert all(torch.equal(whole["state"][index][key], value) for key, value in state.items())
    return found


@pytest.mark.parametrize("partition", ["element", "parameter"])
def test_groups_added_before_and_after_training_started(partition: str) -> None:
    assert run_ranks(3, add_groups, partition) == [[[]] * 9] * 3


class Growing(nn.Module):
    """A model to which a layer is added while it is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.old, self.new = Given(((70,), (6,))), Given(((33, 9),))

    def forward(self, gradients: list[Any]) -> torch.Tensor:
        out = self.old(gradients[:2])
        return out if len(gradients) == 2 else out + self.new(gradients[2:])


def grow_overlapped(rank: int, world: int) -> list[Any]:
    plain_model, model = Growing(), Growing()
    plain = optim.Adam(plain_model.old.parameters(), lr=0.01)
    wrapped: Any = phalanx.DistributedDataParallel(model.old)
    zero = ZeroRedundancyOptimizer(model.old.parameters(), optim.Adam, overlap_with_ddp=True, lr=0.01)
    found = []
    for step in range(6):
        if step == 3:
            with pytest.raises(ValueError, match="not reduced by DistributedDataParallel"):
                zero.add_param_group({"params": list(model.new.parameters()), "lr": 0.1})
            assert len(zero.param_groups) == len(zero.optim.param_groups) == 1
            wrapped = phalanx.DistributedDataParallel(model)
            zero.add_param_group({"params": list(model.new.parameters()), "lr": 0.1})
            plain.add_param_group({"params": list(plain_model.new.parameters()), "lr": 0.1})
        trained = model.old if step < 3 else model
        params = list((plain_model.old if step < 3 else plain_model).parameters())
        means = mean_gradients(trained, 3 * step)
        set_gradients(params, means)
        plain.step()
        zero.zero_grad()
        wrapped(own_gradients(trained, 3 * step, rank, world)).backward()
        found.append(differing(model, sample(plain_model)))
    return found


def test_a_group_is_added_when_the_wrapper_is_another() -> None:
    assert run_ranks(2, grow_overlapped) == [[[]] * 6] * 2


def switch_gradients(rank: int, world: int, overlapped: bool, partition: str) -> list[Any]:
    pair = Pair(overlapped, optim.AdamW, zero_options={"partition": partition}, lr=0.01)
    found = []
    for step in range(9):
        for model in (pair.plain_model, pair.model):
            params = list(model.parameters())
            params[1].requires_grad = not 3 <= step < 6
            params[4].requires_grad = step != 7
        found.append(pair.step(step))
    return found


@both
@pytest.mark.parametrize("partition", ["element", "parameter"])
def test_parameters_are_frozen_and_thawed_between_steps(overlapped: bool, partition: str) -> None:
    assert run_ranks(2, switch_gradients, overlapped, partition) == [[[]] * 9] * 2


class HalfFrozen(Given):
    def __init__(self) -> None:
        super().__init__(((500,), (70,), (30,), (401,)))
        self.weights[0].requires_grad = False


def train_half_frozen(rank: int, world: int, overlapped: bool) -> Any:
    pair = Pair(overlapped, optim.Adam, build=HalfFrozen, lr=0.01)
    found = [pair.step(step) for step in (0, 1, 3)]
    return found, pair.zero.memory()


@both
def test_frozen_parameters_stay_and_leave_the_division_even(overlapped: bool) -> None:
    for found, memory in run_ranks(2, train_half_frozen, overlapped):
        assert found == [[]] * 3
        states = [rank.state for rank in memory.ranks]
        assert max(states) < 1.3 * min(states), states


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        kinds = [torch.float32, torch.float64, torch.bfloat16, torch.float32, torch.float64]
        self.parts = nn.ModuleList([Given(((17 + 40 * n,), (3, 5)), dtype) for n, dtype in enumerate(kinds)])

    def forward(self, gradients: list[Any]) -> torch.Tensor:
        return torch.stack([part(gradients[2 * n : 2 * n + 2]) for n, part in enumerate(self.parts)]).sum()


def train_mixed(rank: int, world: int, overlapped: bool, views: bool) -> list[Any]:
    pair = Pair(overlapped, optim.AdamW, build=Mixed, lr=0.01, zero_options={"parameters_as_bucket_view": views})

    def small(model: nn.Module, step: int, *place: int) -> Any:
        # Few enough bits for bfloat16.
        return own_gradients(model, step, *place, most=8) if place else mean_gradients(model, step, most=8)

    found = []
    for step in range(6):
        set_gradients(list(pair.plain_model.parameters()), small(pair.plain_model, step))
        pair.plain.step()
        pair.zero.zero_grad()
        if pair.wrapped is None:
            set_gradients(list(pair.model.parameters()), small(pair.model, step))
        else:
            pair.wrapped(small(pair.model, step, rank, world)).backward()
        pair.zero.step()
        found.append(differing(pair.model, sample(pair.plain_model)))
    return found


@everyone
@both
@pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])
def test_mixed_dtypes(overlapped: bool, views: bool, backend: str) -> None:
    assert run_ranks(2, train_mixed, overlapped, views, backend=backend) == [[[]] * 6] * 2


def train_closure(rank: int, world: int, overlapped: bool) -> list[Any]:
    pair = Pair(overlapped, optim.SGD, lr=0.05, momentum=0.9)
    found = []
    for step in range(4):
        pair.set_plain(step)
        pair.plain.step()

        def closure(step: int = step) -> float:
            assert torch.is_grad_enabled()
            pair.zero.zero_grad()
            pair.backward(step)
            return 10.0 + step

        found.append((pair.zero.step(closure), differing(pair.model, sample(pair.plain_model))))
    return found


@both
def test_a_closure_is_run_once_and_its_loss_returned(overlapped: bool) -> None:
    assert run_ranks(2, train_closure, overlapped) == [[(10.0 + step, []) for step in range(4)]] * 2


def rosenbrock(model: nn.Module) -> torch.Tensor:
    x = torch.cat([param.view(-1) for param in model.parameters()])
    return (100 * (x[1:] - x[:-1].square()).square() + (1 - x[:-1]).square()).sum()


def train_lbfgs(rank: int, world: int, line_search: str | None) -> Any:
    shapes = ((3,), (2, 2), (5,))
    found = []
    models = [Given(shapes), Given(shapes)]
    options: dict[str, Any] = {"lr": 0.5, "max_iter": 8, "line_search_fn": line_search}
    plain = optim.LBFGS(models[0].parameters(), **options)
    zero = ZeroRedundancyOptimizer(models[1].parameters(), optim.LBFGS, **options)
    for _ in range(4):
        losses = []
        for model, one in zip(models, (plain, zero), strict=True):

            def closure(model: nn.Module = model, one: optim.Optimizer = one) -> torch.Tensor:
                one.zero_grad()
                loss = rosenbrock(model)
                loss.backward()
                return loss

            losses.append(one.step(closure))
        found.append((torch.equal(*losses), differing(models[1], sample(models[0]))))
    zero.consolidate_state_dict()
    again = optim.LBFGS(Given(shapes).parameters(), **options)
    if rank == 0:
        again.load_state_dict(zero.state_dict())
    return found, zero.partition


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
def test_lbfgs_is_led_by_one_rank_and_equals_the_plain_one(line_search: str | None) -> None:
    assert run_ranks(3, train_lbfgs, line_search) == [([(True, [])] * 4, "parameter")] * 3


MATRIX = {"Adafactor": {"lr": 0.01}, "Muon": {"lr": 0.01}}


def train_matrix(rank: int, world: int, name: str, overlapped: bool) -> Any:
    def build() -> nn.Module:
        return Given(((13, 10), (33, 9), (8, 8)))

    pair = Pair(overlapped, getattr(optim, name), build=build, **MATRIX[name])
    found = [pair.step(step) for step in range(0, 12, 3)]
    pair.zero.consolidate_state_dict()
    if rank == 0:
        pair.plain.load_state_dict(pair.zero.state_dict())
    return found, pair.zero.partition, pair.zero.partition_reason


@both
@pytest.mark.parametrize("name", MATRIX)
def test_matrix_optimizers_get_whole_parameters(name: str, overlapped: bool) -> None:
    for found, partition, reason in run_ranks(2, train_matrix, name, overlapped):
        assert found == [[]] * 4 and partition == "parameter" and name in reason


class Doubling(optim.Optimizer):
    """Takes an extra argument to `step`, and keeps a number and a tensor."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None, *, factor: float = 1.0) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["seen"] = factor
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    state["count"] = state.get("count", 0) + 1
                    state["sum"] = state.get("sum", torch.zeros_like(param)) + param.grad
                    param.sub_(state["sum"], alpha=group["lr"] * factor)


@elementwise
class Declared(Doubling):
    pass


def train_custom(rank: int, world: int, name: str) -> Any:
    pair = Pair(False, {"Doubling": Doubling, "Declared": Declared}[name], lr=0.01)
    found = [pair.step(step, factor=1.0 + step) for step in range(4)]
    pair.zero.consolidate_state_dict()
    counts = [state["count"] for state in pair.zero.state_dict()["state"].values()] if rank == 0 else []
    return found, pair.zero.partition, pair.zero.param_groups[0]["seen"], counts[:3]


@pytest.mark.parametrize(("name", "partition"), [("Doubling", "parameter"), ("Declared", "element")])
def test_a_class_of_the_user_and_its_step_arguments(name: str, partition: str) -> None:
    first, second = run_ranks(2, train_custom, name)
    assert first == ([[]] * 4, partition, 4.0, [4, 4, 3]) and second[:3] == first[:3]


def step_arguments_overlapped(rank: int, world: int) -> Any:
    pair = Pair(True, Declared, lr=0.01)
    pair.backward(0)
    with pytest.raises(ValueError, match="step_in_backward=False"):
        pair.zero.step(factor=2.0)
    later = Pair(True, Declared, lr=0.01, zero_options={"step_in_backward": False})
    return [later.step(step, factor=1.0 + step) for step in range(3)]


def test_step_arguments_of_an_overlapped_step() -> None:
    assert run_ranks(2, step_arguments_overlapped) == [[[]] * 3] * 2


def count_hooks(rank: int, world: int, overlapped: bool) -> Any:
    pair = Pair(overlapped, optim.SGD, lr=0.05)
    calls: list[str] = []

    def note(what: str) -> Callable[..., None]:
        # Not of the part that each rank runs either: a hook for all optimizers may change gradients.
        return lambda optimizer, args, kwargs: calls.append(what) if optimizer is not pair.plain else None

    handles = [
        pair.zero.register_step_pre_hook(note("before")),
        pair.zero.register_step_post_hook(note("after")),
        register_optimizer_step_pre_hook(note("global before")),
        register_optimizer_step_post_hook(note("global after")),
    ]
    for step in range(3):
        pair.step(step)
    for handle in handles:
        handle.remove()
    pair.step(3)
    return calls


@both
def test_step_hooks_run_once_a_step(overlapped: bool) -> None:
    expected = ["global before", "before", "after", "global after"] * 3
    assert run_ranks(2, count_hooks, overlapped) == [expected] * 2


def zero_in_place(rank: int, world: int, overlapped: bool) -> Any:
    pair = Pair(overlapped, optim.Adam, lr=0.01)
    found = []
    for step in (0, 1, 3, 4):
        pair.set_plain(step)
        pair.plain.step()
        pair.zero.zero_grad(set_to_none=False)
        pair.backward(step)
        pair.zero.step()
        found.append(differing(pair.model, sample(pair.plain_model)))
    pair.zero.zero_grad(set_to_none=True)
    return found, [param.grad is None for param in pair.model.parameters()]


@both
def test_gradients_zeroed_in_place(overlapped: bool) -> None:
    assert run_ranks(2, zero_in_place, overlapped) == [([[]] * 4, [True] * 9)] * 2


def train_tiny(rank: int, world: int, partition: str, overlapped: bool) -> Any:
    pair = Pair(overlapped, optim.Adam, build=lambda: Given(((1,),)), lr=0.01, zero_options={"partition": partition})
    found = [pair.step(step) for step in range(4)]
    pair.zero.consolidate_state_dict(to=world - 1)
    return found, len(pair.zero.optim.state)


@everyone
@both
@pytest.mark.parametrize("partition", ["element", "parameter"])
def test_ranks_that_own_nothing(partition: str, overlapped: bool, backend: str) -> None:
    results = run_ranks(3, train_tiny, partition, overlapped, backend=backend)
    assert [found for found, _ in results] == [[[]] * 4] * 3
    assert sorted(count for _, count in results) == [0, 0, 1]


def replace_memory(rank: int, world: int, views: bool) -> Any:
    pair = Pair(False, optim.Adam, lr=0.01, zero_options={"parameters_as_bucket_view": views})
    found = [pair.step(0)]
    for param in pair.model.parameters():
        param.data = param.data.clone()
    found.append(pair.step(1))
    with torch.no_grad():
        for model in (pair.plain_model, pair.model):
            next(model.parameters()).fill_(0.5)
    found.append(pair.step(3))
    return found


@pytest.mark.parametrize("views", [False, True], ids=["own memory", "bucket views"])
def test_parameters_given_other_memory_or_values_by_the_user(views: bool) -> None:
    assert run_ranks(2, replace_memory, views) == [[[]] * 3] * 2


def train_large(rank: int, world: int, overlapped: bool) -> Any:
    """Pieces of several chunks, and a bucket for each of two parameters."""
    pair = Pair(overlapped, optim.AdamW, build=lambda: Given(((700_003,), (251, 1003))), lr=0.01)
    return [pair.step(step) for step in range(3)]


@everyone
@both
def test_large_parameters_are_cut_into_chunks(overlapped: bool, backend: str) -> None:
    assert run_ranks(2, train_large, overlapped, backend=backend) == [[[]] * 3] * 2


def look_at_it(rank: int, world: int) -> Any:
    model = Given()
    zero = ZeroRedundancyOptimizer(list(model.named_parameters()), optim.Adam, lr=0.01)
    assert isinstance(zero, optim.Optimizer)
    assert zero.param_groups[0]["param_names"][0] == "weights.0"
    return repr(zero), zero.partition, zero.partition_reason


def test_it_says_which_partition_it_uses() -> None:
    for text, partition, reason in run_ranks(2, look_at_it):
        assert partition == "element" and reason in text and "Adam" in reason


def test_our_class_passes_for_torchs() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZeRO

    assert issubclass(phalanx.ZeroRedundancyOptimizer, TorchZeRO)
    assert not issubclass(torch.optim.Adam, TorchZeRO)
