"""Where buckets close and where graphs are cut, decided from graphs alone."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from phalanx.compile.operators import Obstacles, is_heavy, operators_of, repeated_layers
from phalanx.compile.parameters import find_parameters, give_examples
from phalanx.compile.split import Closing, Group, completions, fill, place_cuts, spans
from phalanx.plan import BucketCaps, ParamSpec

pytestmark = pytest.mark.timeout(60)


def spec(name: str, num_bytes: int, dtype: torch.dtype = torch.float32, sparse: bool = False) -> ParamSpec:
    return ParamSpec(name, (num_bytes // dtype.itemsize,), (1,), dtype, "cpu", sparse)


def filled(sizes: dict[str, int], caps: Sequence[int], layers: dict[str, str] | None = None, light: str = "") -> list[str]:
    """Buckets, as words, for groups of one parameter each in ready order."""
    groups = [[Group(0, (name,), (layers or {}).get(name, ""), name in light)] for name in sizes]
    specs = {name: spec(name, size) for name, size in sizes.items()}
    return ["".join(closing.params) for closing in fill(groups, specs, BucketCaps(tuple(caps)))]


def test_a_bucket_closes_before_what_would_take_it_past_its_cap() -> None:
    assert filled({"a": 8, "b": 8, "c": 8, "d": 8}, [16]) == ["ab", "cd"]
    assert filled({"a": 8, "b": 12, "c": 8}, [16]) == ["a", "b", "c"]


def test_the_first_bucket_obeys_the_first_cap() -> None:
    assert filled({"a": 8, "b": 8, "c": 8, "d": 8}, [8, 100]) == ["a", "bcd"]


def test_a_bucket_that_is_not_half_full_passes_its_cap() -> None:
    assert filled({"a": 4, "b": 16, "c": 16}, [16]) == ["ab", "c"]
    assert filled({"a": 4, "b": 400, "c": 16}, [16]) == ["ab", "c"]


def test_what_hides_nothing_joins_the_bucket_before_it_if_it_is_small() -> None:
    assert filled({"a": 12, "b": 8}, [16]) == ["a", "b"]
    assert filled({"a": 12, "b": 8}, [16], light="b") == ["ab"]
    assert filled({"a": 12, "b": 20}, [16], light="b") == ["a", "b"]


def test_a_bucket_rather_closes_before_a_whole_layer() -> None:
    sizes = {"a": 8, "b": 8, "c": 8, "d": 8}
    assert filled(sizes, [24], {"a": "0", "b": "1", "c": "2", "d": "2"}) == ["ab", "cd"]
    assert filled(sizes, [24], {"a": "0", "b": "1", "c": "1", "d": "1"}) == ["abc", "d"], "it would be too empty"


def test_kinds_fill_buckets_of_their_own_and_sparse_gradients_travel_alone() -> None:
    specs = {s.name: s for s in (spec("a", 8), spec("b", 8, torch.float64), spec("c", 8), spec("s", 8, sparse=True))}
    groups = [[Group(0, (name,))] for name in ("a", "b", "s", "c")]
    closings = fill(groups, specs, BucketCaps((16,)))
    assert [closing.params for closing in closings] == [("b",), ("s",), ("a", "c")]


@given(
    st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=4), min_size=1, max_size=12),
    st.lists(st.integers(8, 160), min_size=1, max_size=3),
    st.integers(0, 2),
)
def test_pieces_made_of_closings_give_the_same_buckets_again(
    sizes: list[list[int]], caps: list[int], num_before: int
) -> None:
    """Reducer and splitter agree: the buckets by which a graph is cut are those made of its pieces afterwards."""
    specs, groups = {}, []
    for i, each in enumerate(sizes):
        names = tuple(f"{i}.{j}" for j in range(len(each)))
        specs.update({name: spec(name, 4 * size) for name, size in zip(names, each, strict=True)})
        groups.append(Group(len(sizes) - i, names))
    limits = BucketCaps(tuple(sorted(4 * cap for cap in caps)))
    closings = fill([[group] for group in groups], specs, limits, num_before)
    assert [name for closing in closings for name in closing.params] == list(specs)
    for closing in closings:
        held = sum(specs[name].num_bytes for name in closing.params)
        largest = max(sum(specs[name].num_bytes for name in group.params) for group in groups)
        assert held <= max(limits.caps_bytes[-1], limits.caps_bytes[-1] / 2 + largest)
    of = {name: i for i, closing in enumerate(closings) for name in closing.params}
    pieces: list[list[Group]] = [[] for _ in closings]
    for group in groups:
        assert len({of[name] for name in group.params}) == 1, "what comes at once travels together"
        pieces[of[group.params[0]]].append(group)
    again = fill(pieces, specs, limits, num_before)
    assert [closing.params for closing in again] == [closing.params for closing in closings]


class Tied(nn.Module):
    """The example of split.py."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.a = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2))
        self.b, self.c = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu((x * self.w) @ self.a) @ self.b @ self.c @ self.w


def captured(model: nn.Module, *inputs: torch.Tensor) -> tuple[torch.fx.GraphModule, list[torch.fx.Node], list[Group]]:
    gm = torch.fx.symbolic_trace(model)
    give_examples(gm, inputs)
    operators = operators_of(gm.graph)
    owners = find_parameters(gm, inputs, lambda _, name: name)
    return gm, operators, completions(operators, owners, [name for name, _ in model.named_parameters()])


def test_parameters_complete_in_reverse_and_tied_ones_at_their_first_use() -> None:
    _, operators, groups = captured(Tied(), torch.ones(2, 2))
    assert [group.params for group in groups] == [("c",), ("b",), ("a",), ("w",)]
    assert [operators[group.position].op for group in groups] == ["call_function"] * 4
    assert [group.hides_nothing for group in groups] == [False, False, False, True]


def test_cuts_stand_before_the_operators_that_complete_buckets() -> None:
    _, operators, groups = captured(Tied(), torch.ones(2, 2))
    closings = [Closing(("c", "b"), "first"), Closing(("a", "w"), "second")]
    cuts = place_cuts(operators, groups, closings, Obstacles(operators))
    assert [(cut.position, cut.reason) for cut in cuts] == [(groups[1].position, "first")]
    pieces = spans(len(operators), groups, cuts)
    assert [piece.params for piece in pieces] == [("a", "w"), ("c", "b")]


def test_no_cut_leaves_a_piece_without_a_result() -> None:
    class Aside(nn.Module):
        """Its second operator is used by nobody."""

        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * self.a
            _ = y * self.b
            return y

    _, operators, groups = captured(Aside(), torch.ones(2))
    cuts = place_cuts(operators, groups, [Closing(("b",), ""), Closing(("a",), "")], Obstacles(operators))
    assert cuts == []


def test_layers_begin_at_their_last_heavy_operator() -> None:
    graph = torch.fx.Graph()
    node = graph.placeholder("x")
    functions = (torch.relu, torch.mm, torch.relu, torch.mm, torch.relu)
    for layer in ("0", "1", ""):
        for function in functions:
            node = graph.call_function(function, (node,))
            stack = {"": ("", "Model"), layer: (layer, "Layer")} if layer else {"": ("", "Model")}
            node.meta["nn_module_stack"] = stack
    operators = operators_of(graph)
    assert [is_heavy(node) for node in operators[:5]] == [False, True, False, True, False]
    assert repeated_layers(operators) == ["", "", "", "0", "0", "0", "0", "0", "1", "1", "", "", "", "", ""]
