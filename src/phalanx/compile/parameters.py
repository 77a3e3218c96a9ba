"""Which nodes of a captured graph are parameters, and example values where the capture left none.

Parameters come as inputs (dynamo lifts them), as attributes of the graph module, or inside submodules that the
graph calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

# From a parameter and the name under which the graph knows it; None for one that does not count.
Namer = Callable[[torch.nn.Parameter, str], str | None]


def find_parameters(
    gm: fx.GraphModule, example_inputs: Sequence[Any], name_of: Namer
) -> dict[fx.Node, tuple[str, ...]]:
    """The names of the parameters behind each node."""
    values: dict[fx.Node, list[tuple[Any, str]]] = {}
    placeholders = gm.graph.find_nodes(op="placeholder")
    for node, value in zip(placeholders, example_inputs, strict=True):
        values[node] = [(value, str(node.target))]
    for node in gm.graph.nodes:
        if node.op == "get_attr":
            values[node] = [(attrgetter(node.target)(gm), node.target)]
        elif node.op == "call_module":
            inside = gm.get_submodule(node.target).named_parameters()
            values[node] = [(param, f"{node.target}.{name}") for name, param in inside]
    found = {}
    for node, candidates in values.items():
        params = [(v, name) for v, name in candidates if isinstance(v, torch.nn.Parameter) and v.requires_grad]
        names = tuple(chosen for param, name in params if (chosen := name_of(param, name)) is not None)
        if names:
            found[node] = names
    return found


def give_examples(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
    """Leave an example value on every node of a graph that does not come from dynamo."""
    if all("example_value" in node.meta for node in gm.graph.nodes if node.op == "placeholder"):
        return
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    FakeTensorProp(gm, mode).propagate(*example_inputs)
    for node in gm.graph.nodes:
        if "val" in node.meta:
            node.meta["example_value"] = node.meta["val"]
