"""What dynamo runs in place of a captured graph: the compiled pieces, one after the other.

Owns the pieces and the wiring between them. Decides nothing, compiles nothing.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ..ddp.torch_names import TorchNames
from ..observe import trace
from .capture import capture_of, names_of
from .split import Span

CUTS = trace.CUTS
PIECE_BACKWARD = "piece_backward"  # span: backward of one compiled piece; `graph`, `piece`


@dataclass(slots=True)
class Piece:
    """One compiled piece and what is to be said of it. `error` is why it runs uncompiled, if it does."""

    span: Span
    graph: fx.GraphModule
    run: Callable[..., Any]
    error: str = ""
    detached: frozenset[int] = frozenset()  # inputs that are parameters used without gradient only
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

    def __init__(self, name: str, inputs_of: dict[str, int], note: str = "") -> None:
        self.name = name
        self.note = note  # why the graph is not cut, where that is worth a word
        # By name, which graph inputs the parameters are: dynamo runs one graph for all modules of a kind, each with
        # parameters of its own. Those that are no inputs are part of the graph.
        self._inputs_of = inputs_of
        slots = sorted(inputs_of.values())
        self._ends = (slots[0], slots[-1]) if slots else ()  # tells such runs apart
        self.pieces: list[Piece] = []
        self._constants: list[Any] = []
        self._num_slots = 0
        self._leaves: list[tuple[int | None, Any]] = []  # (slot, None), or (None, constant)
        self._structure: Any = None
        self._wrapper: weakref.ref[Any] | None = None
        self._told: set[tuple[int, ...]] = set()
        self._recorded = ""  # the hash of the plan with which the trace was last told of the pieces

    def __call__(self, *args: Any) -> Any:
        active = TorchNames._active_ddp_module
        if active is not None:
            key = tuple(id(args[slot]) for slot in self._ends)
            if key not in self._told or self._wrapper is None or self._wrapper() is not active:
                self._tell(active, key, args)
            if trace.recorder is not None and self._recorded != active.reducer.plan.hash:
                self._record(active.reducer)
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

    def _tell(self, wrapper: Any, key: tuple[int, ...], args: Sequence[Any]) -> None:
        """Tell the wrapper's capture which of its parameters this run's pieces complete."""
        if self._wrapper is None or self._wrapper() is not wrapper:
            self._wrapper = weakref.ref(wrapper)
            self._told.clear()
        self._told.add(key)
        reducer = wrapper.reducer
        names = names_of(reducer)

        def name_now(name: str) -> str | None:
            slot = self._inputs_of.get(name)
            return name if slot is None else names.get(id(args[slot]))

        capture_of(reducer).add(self, [piece.span.renamed(name_now) for piece in self.pieces])
        self._recorded = ""

    def _record(self, reducer: Any) -> None:
        """Tell the trace what has been cut, again once the plan in force is another one."""
        from .explanation import describe  # draws tables, which a training run need not load

        self._recorded = reducer.plan.hash
        trace.fact(CUTS, describe(reducer).to_json())

    def _run(self, index: int, inputs: Sequence[Any]) -> Any:
        piece = self.pieces[index]
        if piece.detached:
            inputs = [value.detach() if i in piece.detached else value for i, value in enumerate(inputs)]
        results = piece.run(*inputs)
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
