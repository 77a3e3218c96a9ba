"""What stands against a cut: mutation, values that cannot be passed, open regions, disabled gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from phalanx.compile.operators import Obstacles, mutated_by, operators_of, without_gradient

pytestmark = pytest.mark.timeout(60)


def capture(function: Callable[..., Any], *inputs: Any) -> list[torch.fx.Node]:
    """The operators of the graph that dynamo captures for `function`."""
    graphs: list[torch.fx.GraphModule] = []

    def keep(gm: torch.fx.GraphModule, _: list[Any]) -> Any:
        graphs.append(gm)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(function, backend=keep)(*inputs)
    return operators_of(graphs[0].graph)


def reasons(function: Callable[..., Any], *inputs: Any) -> list[str]:
    operators = capture(function, *inputs)
    obstacles = Obstacles(operators)
    return [obstacles.at(position) for position in range(len(operators))]


X = torch.ones(3, 3)


def test_a_chain_may_be_cut_anywhere() -> None:
    assert reasons(lambda x: x.sin().cos().tan(), X) == ["", "", ""]


def test_what_is_changed_in_place_stays_with_all_who_touched_it() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        z = y.cos()
        y.add_(1)
        return y * z

    first, second, third, fourth = reasons(function, X)
    assert first == fourth == "" and "changes in place" in second and second == third


def test_a_change_through_a_view_counts_for_its_base() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        row = y[0]
        row += 1
        return y.cos()

    found = reasons(function, X)
    assert found[0] == "" and all("changes in place" in reason for reason in found[1:-1]) and found[-1] == ""


@pytest.mark.parametrize(
    "function",
    [
        lambda y, z: y.add_(z),
        lambda y, z: torch.add(y, z, out=y),
        lambda y, z: y.__setitem__(0, z[0]),
        lambda y, z: F.relu(y, inplace=True),
        lambda y, z: F.relu(y, True),
        lambda y, z: F.dropout(y, 0.5, True, True),
        lambda y, z: torch.ops.aten.add_.Tensor(y, z),
        lambda y, z: y.mul_(z),
    ],
    ids=["method", "out", "item", "inplace", "positional", "dropout", "overload", "multiply"],
)
def test_every_way_of_changing_in_place_is_seen(function: Callable[..., Any]) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        function(y, x)
        return y.cos()

    operators = capture(model, X)
    changed = [node for each in operators for node in mutated_by(each)]
    assert operators[0] in changed


def test_what_an_operator_of_a_library_changes_is_known_by_its_schema() -> None:
    with torch.library._scoped_library("phalanx_test", "DEF") as library:
        library.define("count(Tensor x, Tensor(a!) seen) -> ()")
        library.impl("count", lambda x, seen: None, "CompositeExplicitAutograd")
        torch.library.register_fake("phalanx_test::count", lambda x, seen: None, lib=library)

        def model(x: torch.Tensor) -> torch.Tensor:
            y = x.sin()
            torch.ops.phalanx_test.count(x, y)
            return y.cos()

        first, second, third = reasons(model, X)
    assert first == third == "" and "changes in place" in second


def test_a_function_that_only_looks_like_it_changes_nothing() -> None:
    operators = capture(lambda x: F.relu(x) + F.dropout(x, 0.5) + x.__add__(x), X)
    assert not any(mutated_by(node) for node in operators)


def test_values_that_are_no_tensors_do_not_pass_between_pieces() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        parts = x.sin().split([1, 2])
        return parts[0].sum() + parts[1].cos().sum()

    found = reasons(function, X)
    assert found[:2] == ["", ""]
    assert any("not a tensor" in reason for reason in found[2:])


def test_regions_without_gradient_are_not_cut_and_known() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        with torch.no_grad():
            z = y.cos().tan()
        return y * z

    operators = capture(function, X.clone().requires_grad_())
    disabled = without_gradient(operators)
    called = [node.target for node, each in zip(operators, disabled, strict=True) if each and node.op == "call_method"]
    assert called == ["cos", "tan"]
    obstacles = Obstacles(operators)
    assert all(obstacles.at(i + 1) for i, each in enumerate(disabled) if each)


def test_a_hook_stays_with_what_made_its_tensor_and_with_who_uses_its_view() -> None:
    def hooked(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        z = y.cos()
        y.register_hook(torch.sign)
        return y.tan() * z

    def hooked_view(x: torch.Tensor) -> torch.Tensor:
        y = x.sin().t()
        y.register_hook(torch.sign)
        z = x.cos()
        return (y.t() * z).exp()

    # The operators are sin, cos, the hook, tan, mul; and sin, t, the hook, cos, t, mul, exp.
    for function, held in ((hooked, {1, 2}), (hooked_view, {2, 3, 4, 5})):
        found = reasons(function, X.clone().requires_grad_())
        assert {i for i, reason in enumerate(found) if "is called with the whole gradient of" in reason} == held
        assert all(found[i] == "" for i in range(len(found)) if i not in held)


def test_a_vmap_is_in_one_piece() -> None:
    found = reasons(lambda x: torch.vmap(lambda row: row * row.sum())(x.sin()).cos(), X)
    assert found[0] == "" and any("opens a region" in reason for reason in found)
    assert found[-1] == ""
