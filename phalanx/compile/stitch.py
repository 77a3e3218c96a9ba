"""A graph divided into pieces that are compiled one by one and run one after the other.

Owns the compiled pieces. Decides nothing: where to cut is in `split`.
"""

from __future__ import annotations

import copy
import logging
import operator
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

# Private, as everything about the context that dynamo compiles in. Each piece gets a context of its own, because
# AOTAutograd leaves in it what the piece's backward reads later. tests/compile/test_torch_internals.py.
from torch._guards import TracingContext, tracing
from torch.fx.passes.split_module import split_module
from torch.utils import _pytree as pytree

from ..ddp.torch_names import TorchNames
from ..observe import trace
from .capture import capture_of
from .operators import operators_of, value_of
from .split import Span

log = logging.getLogger("phalanx.compile")

Inner = Callable[..., Callable[..., Any]]

PIECE_BACKWARD = "piece_backward"  # span: backward of one compiled piece; `graph`, `piece`


@dataclass(slots=True)
class Piece:
    """One compiled piece and what is to be said of it. `error` is why it runs uncompiled, if it does."""

    span: Span
    graph: fx.GraphModule
    run: Callable[..., Any]
    error: str = ""
    inputs: tuple[int, ...] = ()
    outputs: tuple[tuple[int, int], ...] = ()  # (slot, index in what the piece returns)
    dead: tuple[int, ...] = ()  # slots that no later piece reads


@dataclass(slots=True)
class _Layout:
    """Where values live while the pieces run: graph inputs first, then attributes, then what pieces return."""

    slots: dict[fx.Node, int] = field(default_factory=dict)
    constants: list[Any] = field(default_factory=list)

    def slot(self, node: fx.Node) -> int:
        return self.slots.setdefault(node, len(self.slots))


class Stitched:
    """What dynamo calls in place of the graph. Runs the pieces in order; safe to run for any wrapper."""

    def __init__(self, name: str, note: str) -> None:
        self.name = name
        self.note = note  # why the graph is not cut, where that is worth a word
        self.pieces: list[Piece] = []
        self._constants: list[Any] = []
        self._num_slots = 0
        self._leaves: list[tuple[int | None, Any]] = []  # (slot, None), or (None, constant)
        self._structure: Any = None
        self._told: weakref.ref[Any] | None = None

    @property
    def spans(self) -> list[Span]:
        return [piece.span for piece in self.pieces]

    def __call__(self, *args: Any) -> Any:
        active = TorchNames._active_ddp_module
        if active is not None and (self._told is None or self._told() is not active):
            self._told = weakref.ref(active)
            capture_of(active.reducer).add(self)
        if len(self.pieces) == 1:
            return self._run(0, args)
        values = [*args, *self._constants]
        values += [None] * (self._num_slots - len(values))
        for i, piece in enumerate(self.pieces):
            results = self._run(i, [values[slot] for slot in piece.inputs])
            for slot, index in piece.outputs:
                values[slot] = results[index]
            for slot in piece.dead:
                values[slot] = None
        leaves = [constant if slot is None else values[slot] for slot, constant in self._leaves]
        return pytree.tree_unflatten(leaves, self._structure)

    def _run(self, index: int, inputs: Sequence[Any]) -> Any:
        results = self.pieces[index].run(*inputs)
        if trace.recorder is not None:
            _record_backward(self.name, index, results)
        return results

    def lay_out(self, outer: fx.GraphModule, by_name: dict[str, Piece]) -> None:
        """Take the order and the wiring of the pieces from `outer`, whose calls are named in `by_name`."""
        layout = _Layout()
        graph = outer.graph
        nodes = [node for node in graph.nodes if node.op == "placeholder"]
        nodes += [node for node in graph.nodes if node.op == "get_attr"]
        for node in nodes:
            layout.slot(node)
        layout.constants = [operator.attrgetter(n.target)(outer) for n in nodes if n.op == "get_attr"]
        last_reader: dict[fx.Node, fx.Node] = {}
        for node in graph.nodes:
            for source in node.all_input_nodes:
                last_reader[source] = node
        calls: dict[fx.Node, Piece] = {}
        for node in graph.nodes:
            if node.op == "call_module":
                calls[node] = piece = by_name[node.target]
                self.pieces.append(piece)
                piece.inputs = tuple(layout.slot(source) for source in node.args)
            elif node.op == "call_function":
                call, index = node.args
                calls[call].outputs += ((layout.slot(node), index),)
            elif node.op == "output":
                leaves, self._structure = pytree.tree_flatten(node.args[0])
                self._leaves = [(layout.slot(n), None) if isinstance(n, fx.Node) else (None, n) for n in leaves]
        for node, reader in last_reader.items():
            if reader in calls and node.op == "call_function":
                calls[reader].dead += (layout.slot(node),)
        self._constants, self._num_slots = layout.constants, len(layout.slots)


def compile_whole(gm: fx.GraphModule, example_inputs: Sequence[Any], inner: Inner, span: Span, note: str) -> Stitched:
    """The graph as one piece. An error of the compiler is the caller's, as it would be without us."""
    stitched = Stitched(graph_name(gm), note)
    stitched.pieces.append(Piece(span, gm, inner(gm, list(example_inputs))))
    return stitched


def compile_pieces(gm: fx.GraphModule, inner: Inner, spans: Sequence[Span]) -> Stitched:
    """The graph cut into `spans`, each compiled once by `inner`; one that fails runs as it is."""
    number = {}
    operators = operators_of(gm.graph)
    for i, span in enumerate(spans):
        for node in operators[span.start : span.stop]:
            number[node] = i
    # In the original order: pieces that do not depend on each other may still share a random state or a buffer.
    outer = split_module(gm, gm, number.__getitem__, keep_original_order=True, tuple_return=True)
    sources = {node.name: getattr(node, "_dynamo_source", None) for node in gm.graph.find_nodes(op="placeholder")}
    stitched = Stitched(graph_name(gm), "")
    by_name = {}
    for i, span in enumerate(spans):
        part = outer.get_submodule(f"submod_{i}")
        assert isinstance(part, fx.GraphModule), "split_module makes graph modules"
        _inherit(part, gm, sources)
        by_name[f"submod_{i}"] = _compile_piece(part, inner, span, f"{stitched.name}, piece {i}")
    stitched.lay_out(outer, by_name)
    return stitched


def _inherit(part: fx.GraphModule, gm: fx.GraphModule, sources: dict[str, Any]) -> None:
    """What AOTAutograd expects of a graph that comes from dynamo."""
    part.meta = dict(gm.meta)
    for name in ("_param_name_to_source", "compile_subgraph_reason"):
        if hasattr(gm, name):
            setattr(part, name, getattr(gm, name))
    for node in part.graph.find_nodes(op="placeholder"):
        # A value that another piece computes has no source in the user's frame.
        node._dynamo_source = sources.get(node.name)


def _compile_piece(part: fx.GraphModule, inner: Inner, span: Span, name: str) -> Piece:
    examples = [value_of(node) for node in part.graph.find_nodes(op="placeholder")]
    try:
        with tracing(copy.copy(TracingContext.try_get())):
            return Piece(span, part, inner(part, examples))
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        warnings.warn(
            f"{name} ({span.stop - span.start} operators, {len(span.params)} parameters) could not be compiled and "
            f"runs eagerly; the other pieces stay compiled. {reason}",
            stacklevel=2,
        )
        return Piece(span, part, part, error=reason)


def graph_name(gm: fx.GraphModule) -> str:
    """"graph" and dynamo's number of the captured frame and of its compilation, as in its logs."""
    identity = gm.meta.get("dynamo_compile_id")
    return "graph" if identity is None else f"graph {identity}"


def _record_backward(graph: str, index: int, results: Any) -> None:
    """Record when the backward of what has just run begins and ends."""
    results = results if isinstance(results, (tuple, list)) else [results]
    nodes = {r.grad_fn for r in results if isinstance(r, torch.Tensor) and r.grad_fn is not None}
    for node in nodes:
        started: list[int] = []
        node.register_prehook(lambda _grads, started=started: started.append(trace.now_ns()))
        node.register_hook(lambda *_, started=started: _end_span(graph, index, started))


def _end_span(graph: str, index: int, started: list[int]) -> None:
    if trace.recorder is not None and started:
        trace.recorder.span(PIECE_BACKWARD, started.pop(), trace.now_ns(), graph=graph, piece=index)
