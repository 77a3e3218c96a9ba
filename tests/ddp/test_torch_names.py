"""Our wrapper passes for torch's: every name of torch's class is ours, or says what to use; none is torch's code."""

from __future__ import annotations

import ast
import inspect
import textwrap
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import phalanx
from phalanx.ddp.like_torch.logger import TorchLogger
from phalanx.ddp.like_torch.steps import REFUSED_ATTRIBUTES, TorchSteps
from phalanx.ddp.reducer import Reducer
from phalanx.errors import ConfigError
from tests.cluster import run_ranks

OURS = phalanx.DistributedDataParallel


def _defined_before_torch(name: str) -> bool:
    for owner in OURS.__mro__:
        if owner is TorchDDP:
            return False
        if name in vars(owner):
            return True
    return False


@pytest.mark.parametrize("name", [name for name in vars(TorchDDP) if not name.startswith("__")])
def test_no_name_of_torchs_class_is_inherited(name: str) -> None:
    if name in ("_abc_impl",):
        return  # of the class itself
    assert _defined_before_torch(name), f"{name} would run torch's code on our wrapper"


def test_special_methods_are_ours_too() -> None:
    special = [name for name in ("__init__", "__getstate__", "__setstate__") if name in vars(TorchDDP)]
    assert special and all(_defined_before_torch(name) for name in special)


def test_a_wrapper_is_one_of_torchs_and_torchs_flag_for_dynamo_stays_torchs() -> None:
    assert issubclass(OURS, TorchDDP)
    assert vars(TorchDDP)["_active_ddp_module"] is None


def _attributes_set_by_torch() -> set[str]:
    found = set()
    for name in ("__init__", "_ddp_init_helper"):
        tree = ast.parse(textwrap.dedent(inspect.getsource(getattr(TorchDDP, name))))
        for node in ast.walk(tree):
            single = [node.target] if isinstance(node, ast.AnnAssign) else []
            for target in node.targets if isinstance(node, ast.Assign) else single:
                if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self":
                    found.add(target.attr)
    return found


def _look_at_everything(rank: int, world: int) -> None:
    ddp = OURS(torch.nn.Linear(3, 2))
    for name in sorted(_attributes_set_by_torch()):
        if name in REFUSED_ATTRIBUTES:
            with pytest.raises(AttributeError, match=name):
                getattr(ddp, name)
        else:
            getattr(ddp, name)
    for name in (name for name in dir(dist.Reducer) if not name.startswith(("__", "_pybind11"))):
        assert callable(getattr(ddp.reducer, name)), name
    for name in (name for name in dir(dist.Logger) if not name.startswith(("__", "_pybind11"))):
        assert callable(getattr(ddp.logger, name)), name
    ddp.logger.set_error_and_log("a word")
    assert ddp.logger._get_ddp_logging_data()["error"] == "a word"
    for name, method in vars(Reducer.__mro__[1]).items():
        if inspect.isfunction(method) and "_refusal" in method.__code__.co_names:
            taken = [0] * (len(inspect.signature(method).parameters) - 1)
            with pytest.raises(ConfigError, match=name):
                getattr(ddp.reducer, name)(*taken)


def test_what_torchs_constructor_sets_is_there_or_says_what_to_read() -> None:
    run_ranks(1, _look_at_everything)


REFUSED = [name for name, each in vars(TorchSteps).items() if str(getattr(each, "__doc__", "")).startswith("Refused.")]


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_says_so_when_called_and_not_before(name: str) -> None:
    assert callable(getattr(OURS, name))
    with pytest.raises(ConfigError, match=name):
        getattr(OURS, name)(None)


def _forward_in_parts(rank: int, world: int) -> None:
    """As libraries do that run torch's forward piece by piece."""
    torch.manual_seed(0)
    ddp = OURS(torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)))
    batch = torch.randn(4, 3, generator=torch.Generator().manual_seed(rank))
    inputs, kwargs = ddp._pre_forward(batch)
    output = ddp._post_forward(ddp._run_ddp_forward(*inputs, **kwargs))
    output.pow(2).sum().backward()
    grad = ddp.module[0].weight.grad.clone()
    gathered = [torch.empty_like(grad) for _ in range(world)]
    dist.all_gather(gathered, grad)
    assert all(torch.equal(gathered[0], each) for each in gathered)
    with pytest.raises(ConfigError, match="_pre_forward"):
        ddp._post_forward(output)
    moved, _ = ddp.to_kwargs((batch,), {}, 0) if torch.cuda.is_available() else (((batch,),), None)
    assert torch.equal(moved[0][0].cpu(), batch)
    assert ddp._build_params_for_reducer()[1] == [False] * 4
    assert ddp._build_debug_param_to_name_mapping(list(ddp.parameters()))[0] == "0.weight"
    assert ddp._find_common_rank(rank, True) == world - 1
    assert ddp._check_sync_bufs_pre_fwd() and not ddp._check_sync_bufs_post_fwd()
    ddp._sync_buffers()
    ddp._lazy_init()
    assert ddp._check_global_requires_backward_grad_sync(False)
    ddp._set_sparse_metadata({"0.weight": torch.zeros(1)})
    with pytest.raises(ConfigError, match="nothing"):
        ddp._set_sparse_metadata({"nothing": torch.zeros(1)})


def test_torchs_forward_in_parts_reduces() -> None:
    run_ranks(2, _forward_in_parts)


def _fused(rank: int, world: int, cls: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    ddp = cls(torch.nn.Linear(3, 2))
    ddp._register_fused_optim(torch.optim.SGD, 0.1, momentum=0.5)
    for step in range(3):
        batch = torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + rank))
        ddp(batch).pow(2).sum().backward()
        ddp.zero_grad(set_to_none=True)
    return [param.detach().clone() for param in ddp.parameters()]


def test_a_fused_optimizer_steps_as_torchs_does() -> None:
    ours = run_ranks(2, _fused, OURS)
    theirs = run_ranks(2, _fused, TorchDDP, allow_leaks=("groups", "threads"))
    assert all(map(torch.equal, ours[0], theirs[0])) and all(map(torch.equal, *ours))


# -- who arms a backward -----------------------------------------------------------------------


def _grad_of(ddp: Any, rank: int) -> torch.Tensor:
    grad = ddp.module.weight.grad
    assert grad is not None
    return grad.clone()


def _same_everywhere(tensor: torch.Tensor) -> bool:
    everyone = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, tensor)
    return all(torch.equal(everyone[0], each) for each in everyone)


class _Manual(torch.nn.Linear):
    """A module whose forward runs its own backward, as Lightning's training_step does with manual optimisation."""

    before_backward: Any = None

    def forward(self, batch: torch.Tensor, times: int = 1) -> None:
        for _ in range(times):
            loss = super().forward(batch).pow(2).sum()
            if self.before_backward is not None:
                self.before_backward(loss)
            self.zero_grad()
            loss.backward()


def _backward_inside(rank: int, world: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ddp = OURS(_Manual(3, 2))
        batch = torch.full((1, 3), rank + 1.0)
        for _ in range(3):  # the first forward included
            ddp(batch)
            assert _same_everywhere(_grad_of(ddp, rank))
        # Several in one forward, each armed by name: torch's way, used by Lightning and Accelerate.
        ddp.module.before_backward = lambda _: (ddp.reducer._rebuild_buckets(), ddp.reducer.prepare_for_backward([]))
        for _ in range(2):
            ddp(batch, 2)
            assert _same_everywhere(_grad_of(ddp, rank))


def test_a_backward_inside_forward_is_reduced() -> None:
    run_ranks(2, _backward_inside)


def _armed_by_name(rank: int, world: int) -> None:
    """Torch's pipelining: forwards in no_sync, then a backward that is to be reduced."""
    ddp = OURS(torch.nn.Linear(3, 2))
    for _ in range(2):
        with ddp.no_sync():
            outputs = [ddp(torch.full((1, 3), rank + 1.0)).sum() for _ in range(2)]
            outputs[0].backward()
        assert not _same_everywhere(_grad_of(ddp, rank))
        ddp.reducer.prepare_for_backward([outputs[1]])
        outputs[1].backward()
        assert _same_everywhere(_grad_of(ddp, rank))
        ddp.zero_grad()
    # A demand that no backward has met does not outlive the next forward.
    ddp.reducer.prepare_for_backward([])
    with ddp.no_sync():
        ddp(torch.full((1, 3), rank + 1.0)).sum().backward()
    assert not _same_everywhere(_grad_of(ddp, rank))


def test_a_backward_armed_by_name_is_reduced_whatever_its_forward_said() -> None:
    run_ranks(2, _armed_by_name)


def _around(rank: int, world: int) -> list[str]:
    ddp = OURS(torch.nn.Linear(3, 2))
    batch = torch.full((1, 3), rank + 1.0)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with ddp.no_sync():
            ddp.module(batch).sum().backward()  # on purpose
        assert not said
        for _ in range(2):
            ddp.module(batch).sum().backward()
        ddp(batch).sum().backward()
        ddp.module(batch).sum().backward()
    return [str(each.message) for each in said]


def test_a_forward_around_the_wrapper_is_said_once_on_every_rank() -> None:
    for rank, said in enumerate(run_ranks(2, _around)):
        assert len(said) == 1 and f"rank {rank}:" in said[0] and "model(x)" in said[0] and "no_sync()" in said[0]


def _no_false_alarm(rank: int, world: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ddp = OURS(torch.nn.Linear(3, 2))
        batch = torch.full((1, 3), rank + 1.0, requires_grad=True)
        for _ in range(2):
            output = ddp(batch)
            (slope,) = torch.autograd.grad(output.sum(), batch, create_graph=True)
            (output.sum() + slope.pow(2).sum()).backward()
        first, second = ddp(batch), ddp(batch)
        first.sum().backward()
        second.sum().backward()
        output = ddp(batch).sum()
        output.backward(retain_graph=True)
        output.backward()


def test_ordinary_backwards_are_not_said_to_go_around() -> None:
    run_ranks(2, _no_false_alarm)


def _changed_after_wrapping(rank: int, world: int) -> list[tuple[str, str]]:
    ddp = OURS(torch.nn.Sequential(torch.nn.Linear(3, 2)))
    batch = torch.full((1, 3), rank + 1.0)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        ddp.module.register_parameter("for_later", torch.nn.Parameter(torch.zeros(1)))
        for _ in range(3):
            ddp(batch).sum().backward()
        assert not said, "what has no gradient is nobody's business"
        ddp.module.append(torch.nn.Linear(2, 2))
        for _ in range(6):
            ddp(batch).sum().backward()
    return [(str(each.message), each.filename) for each in said]


def test_a_layer_added_after_wrapping_is_said_once_at_the_users_line() -> None:
    for rank, ((words, file),) in enumerate(run_ranks(2, _changed_after_wrapping)):
        assert f"rank {rank}: step 3: parameter '1.weight' and 1 more came into the model after it was wrapped" in words
        assert file == __file__


def test_the_logger_names_are_torchs() -> None:
    missing = [n for n in dir(dist.Logger) if not n.startswith(("__", "_pybind11")) and not hasattr(TorchLogger, n)]
    assert not missing


def _compiled_by_others(rank: int, world: int) -> bool:
    """A compiler that knows nothing of us: the graph is not to be cut by torch's splitter, which asks torch's class."""
    import torch._dynamo.backends.distributed as splitter

    seen = []

    def look(graph: Any, _inputs: Any) -> Any:
        seen.append(graph)
        return graph.forward

    with mock.patch.object(splitter, "DDPOptimizer", side_effect=AssertionError("torch's splitter was used on our wrapper")):
        ddp = OURS(torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)))
        compiled = torch.compile(ddp, backend=look)
        for _ in range(2):
            compiled(torch.full((2, 3), rank + 1.0)).sum().backward()
    assert seen, "nothing was compiled"
    return _same_everywhere(ddp.module[0].weight.grad)


def test_dynamo_does_not_take_ours_for_torchs() -> None:
    assert run_ranks(2, _compiled_by_others) == [True, True]


def _wrapped_twice(rank: int, world: int) -> str:
    with pytest.warns(UserWarning, match="wrapped already") as said:
        OURS(OURS(torch.nn.Linear(2, 2)))
    return str(said[0].message)


def test_a_wrapper_that_is_wrapped_again_is_told_of() -> None:
    for words in run_ranks(2, _wrapped_twice):
        assert "wrapped already" in words and "DistributedDataParallel(model.module)" in words
