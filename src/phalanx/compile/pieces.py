"""A captured graph divided where `split` says, and each piece compiled by the inner compiler.

Owns the way from a graph module to compiled pieces. Decides nothing about where to cut.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import fx

# Private, as everything about the context that dynamo compiles in. Each piece gets a context of its own, because
# AOTAutograd leaves in it what the piece's backward reads later. tests/compile/test_torch_internals.py.
from torch._guards import TracingContext, tracing
from torch.fx.passes.split_module import split_module

from .operators import operators_of, value_of, without_gradient
from .split import Span
from .stitch import Piece, Stitched

Inner = Callable[..., Callable[..., Any]]
Owners = Mapping[fx.Node, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Captured:
    """A graph as dynamo hands it over, and which of its nodes are parameters, by name."""

    gm: fx.GraphModule
    example_inputs: Sequence[Any]
    owners: Owners

    @property
    def name(self) -> str:
        """Dynamo's number of the captured frame and of its compilation, as in its logs."""
        identity = self.gm.meta.get("dynamo_compile_id")
        return "graph" if identity is None else f"graph {identity}"

    @property
    def inputs_of(self) -> dict[str, int]:
        """Which inputs of the graph the parameters are; others belong to the graph module."""
        placeholders = self.gm.graph.find_nodes(op="placeholder")
        return {name: slot for slot, node in enumerate(placeholders) for name in self.owners.get(node, ())}


def compile_whole(captured: Captured, inner: Inner, span: Span, note: str) -> Stitched:
    """The graph as one piece. An error of the compiler is the caller's, as it would be without us."""
    stitched = Stitched(captured.name, captured.inputs_of, note)
    run = inner(captured.gm, list(captured.example_inputs))
    stitched.pieces.append(Piece(span, captured.gm, run))
    return stitched


def compile_pieces(captured: Captured, inner: Inner, spans: Sequence[Span]) -> Stitched:
    """The graph cut into `spans`, each compiled once by `inner`; one that fails runs as it is."""
    gm = captured.gm
    operators = operators_of(gm.graph)
    number = {node: i for i, span in enumerate(spans) for node in operators[span.start : span.stop]}
    # In the original order: pieces that do not depend on each other may still share a random state or a buffer.
    outer = split_module(gm, gm, number.__getitem__, keep_original_order=True, tuple_return=True)
    inputs = {n.name: v for n, v in zip(gm.graph.find_nodes(op="placeholder"), captured.example_inputs, strict=True)}
    stitched = Stitched(captured.name, captured.inputs_of)
    by_name: dict[str, Piece] = {}
    for i in _order(len(spans)):
        span = spans[i]
        part = outer.get_submodule(f"submod_{i}")
        assert isinstance(part, fx.GraphModule), "split_module makes graph modules"
        _inherit(part, gm)
        piece = Piece(span, part, part, detached=_detached(part, span, operators, captured.owners))
        _compile_piece(piece, inner, inputs)
        by_name[f"submod_{i}"] = piece
    stitched.lay_out(outer, by_name)
    for i, piece in enumerate(stitched.pieces):
        if piece.error:
            _warn_eager(f"{captured.name}, piece {i}", piece)
    return stitched


def _order(num_pieces: int) -> list[int]:
    """The ranks of a host share the inner compiler's cache: each begins elsewhere, and finds the others' work done."""
    first = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    return [(first + i) % num_pieces for i in range(num_pieces)]


def _inherit(part: fx.GraphModule, gm: fx.GraphModule) -> None:
    """What AOTAutograd expects of a graph that comes from dynamo."""
    part.meta = dict(gm.meta)
    for name in ("_param_name_to_source", "compile_subgraph_reason"):
        if hasattr(gm, name):
            setattr(part, name, getattr(gm, name))
    sources = {node.name: getattr(node, "_dynamo_source", None) for node in gm.graph.find_nodes(op="placeholder")}
    for node in part.graph.find_nodes(op="placeholder"):
        # A value that another piece computes has no source in the user's frame.
        node._dynamo_source = sources.get(node.name)


def _detached(part: fx.GraphModule, span: Span, operators: Sequence[fx.Node], owners: Owners) -> frozenset[int]:
    """The inputs of a piece that are parameters which it uses under `torch.no_grad` only.

    Autograd sees a piece as one function of all its inputs: such a parameter's gradient would otherwise have to
    wait for the piece, which gives it none.
    """
    disabled = without_gradient(operators)
    used = {
        source.name
        for position in range(span.start, span.stop)
        if not disabled[position]
        for source in operators[position].all_input_nodes
    }
    params = {node.name for node in owners} - used
    placeholders = part.graph.find_nodes(op="placeholder")
    return frozenset(i for i, node in enumerate(placeholders) if node.name in params)


def _compile_piece(piece: Piece, inner: Inner, inputs: Mapping[str, Any]) -> None:
    """Compile one piece, or note why it stays as it is. `inputs` are the examples that dynamo gave, by name."""
    from torch._dynamo.exc import RestartAnalysis

    nodes = piece.graph.graph.find_nodes(op="placeholder")
    examples = [inputs[node.name] if node.name in inputs else value_of(node) for node in nodes]
    for i in piece.detached:
        examples[i] = examples[i].detach()
    try:
        with tracing(copy.copy(TracingContext.try_get())):
            piece.run = inner(piece.graph, examples)
    except RestartAnalysis:
        raise  # no failure: dynamo captures the frame again, on other assumptions
    except Exception as error:
        lines = f"{type(error).__name__}: {error}".strip().splitlines()
        piece.error = lines[0]


def _warn_eager(name: str, piece: Piece) -> None:
    operators = piece.span.stop - piece.span.start
    warnings.warn(
        f"{name} ({operators} operators, {len(piece.span.params)} parameters) could not be compiled and runs eagerly; "
        f"the other pieces stay compiled. {piece.error}",
        stacklevel=2,
    )
