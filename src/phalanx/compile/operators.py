"""What a node of a captured graph does, as far as it decides where the graph can be cut.

Pure: reads nodes and the example values that the capture left on them, and computes nothing with them.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.fx import Node
from torch.utils import _pytree as pytree

# `split_module` repeats these at the borders of every piece inside their region.
_AUTOCAST = (torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast)
_IN_PLACE = {getattr(operator, f"i{name}") for name in "add sub mul matmul truediv floordiv mod pow and or xor".split()}
_IN_PLACE |= {operator.ilshift, operator.irshift, operator.setitem}
# Nodes without a result that may stand in any piece: they only check or load something.
_HARMLESS = ("assert", "check", "sym_constrain", "lazy_load")
# Nodes without a result that open or close a region, as vmap does: it has to be in one piece.
_OPENING, _CLOSING = ("increment_nesting", "_enter_"), ("decrement_nesting", "_exit_")


# What computes for long, and reads and writes memory at its ends in any case. A cut before such a node breaks nothing
# that a compiler would fuse; what stands before the first one in a graph hides no communication.
_HEAVY = ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "bilinear", "scaled_dot_product_attention")
_HEAVY_PARTS = ("conv", "rnn", "lstm", "gru", "attention")


def operators_of(graph: torch.fx.Graph) -> list[Node]:
    """The nodes that compute, in order; the others are available to every piece."""
    return [node for node in graph.nodes if node.op in ("call_function", "call_method", "call_module")]


def value_of(node: Node) -> Any:
    """The example value that the capture recorded for the node, or None."""
    return node.meta.get("example_value")


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _name(node: Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


def without_gradient(operators: Sequence[Node]) -> list[bool]:
    """For each operator, whether it runs under `torch.no_grad`."""
    disabled, found = False, []
    for node in operators:
        if node.target is torch._C._set_grad_enabled:
            disabled = not node.args[0]
        found.append(disabled)
    return found


def is_heavy(node: Node) -> bool:
    """Whether the node computes for long: a matrix product, a convolution, or a graph within the graph."""
    if isinstance(node.target, torch._ops.HigherOrderOperator) or node.op == "call_module":
        return True
    name = _name(node)
    return name in _HEAVY or any(part in name for part in _HEAVY_PARTS)


def repeated_layers(operators: Sequence[Node]) -> list[str]:
    """For each operator, the layer that it belongs to: a module of a kind that the model has several of; "" if none.

    A layer reaches from its last heavy operator to the one of the next layer. A cut there, before the last matrix
    product of a transformer's block, separates nothing that would be fused: less code is generated, and less that differs.
    """
    labels = _repeated_modules(operators)
    last = {label: node for node, label in zip(operators, labels, strict=True) if label and is_heavy(node)}
    shifted: list[str] = []
    current = ""
    for node, label in zip(operators, labels, strict=True):
        if last.get(label) is node:
            current = label
        shifted.append(current if label else "")
    return shifted


def _repeated_modules(operators: Sequence[Node]) -> list[str]:
    """For each operator, the outermost module around it of a kind that the model has several of; "" if none.

    Modules as the capture recorded them: from the outermost in, each a path and a class.
    """
    stacks: list[list[tuple[str, Any]]] = [list((n.meta.get("nn_module_stack") or {}).values()) for n in operators]
    paths: dict[tuple[int, Any], set[str]] = {}
    for stack in stacks:
        for depth, (path, kind) in enumerate(stack):
            paths.setdefault((depth, kind), set()).add(path)
    return [
        next((path for depth, (path, kind) in enumerate(stack) if len(paths[depth, kind]) > 1), "") for stack in stacks
    ]


def mutated_by(node: Node) -> list[Node]:
    """The nodes whose values the node changes in place."""
    target = node.target
    if isinstance(target, torch._ops.HigherOrderOperator):
        # One that returns nothing is there for what it does to its inputs.
        return [] if node.users else list(node.all_input_nodes)
    if isinstance(target, torch._ops.OpOverload):
        return _mutated_by_schema(node, target)
    if isinstance(target, torch._ops.OpOverloadPacket):
        # Which one is called is decided when it is: what any of them would change.
        overloads = (getattr(target, name) for name in target.overloads())
        return [changed for overload in overloads for changed in _mutated_by_schema(node, overload)]
    changed: list[Any] = [node.kwargs.get("out")]
    name = _name(node)
    in_place = name.endswith("_") and not name.endswith("__")
    if node.op == "call_method":
        in_place = in_place or name in ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__")
    elif node.op == "call_function":
        in_place = in_place or target in _IN_PLACE or _asks_for_in_place(node)
    if in_place:
        changed.append(node.args[0] if node.args else None)
    return [leaf for leaf in pytree.tree_leaves(changed) if isinstance(leaf, Node)]


def _mutated_by_schema(node: Node, target: torch._ops.OpOverload) -> list[Node]:
    changed = []
    for i, argument in enumerate(target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
            changed += [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Node)]
    return changed


def _asks_for_in_place(node: Node) -> bool:
    if node.kwargs.get("inplace") is True:
        return True
    if getattr(node.target, "__module__", "") != "torch.nn.functional" or True not in node.args:
        return False
    try:
        bound = inspect.signature(node.target).bind(*node.args, **node.kwargs)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False
    return bound.arguments.get("inplace") is True


def _passes_between_pieces(node: Node) -> bool:
    return isinstance(value_of(node), (torch.Tensor, torch.SymInt, int))


class Obstacles:
    """Why the graph must not be cut before a given operator."""

    def __init__(self, operators: Sequence[Node]) -> None:
        self._reasons = [""] * (len(operators) + 1)
        self._operators = operators
        self._index = {node: i for i, node in enumerate(operators)}
        self._forbid_inside_values()
        self._forbid_before_mutations()
        self._forbid_around_hooks()
        self._forbid_inside_effects()
        self._forbid_without_gradient()

    def at(self, position: int) -> str:
        """The reason against a cut before operator `position`; "" if there is none."""
        return self._reasons[position]

    def _forbid(self, first: int, last: int, reason: str) -> None:
        """Operators `first` to `last` must be in one piece."""
        for position in range(first + 1, last + 1):
            if not self._reasons[position]:
                self._reasons[position] = reason

    def _forbid_inside_values(self) -> None:
        end = len(self._operators) - 1
        for i, node in enumerate(self._operators):
            if node.users and node.target not in _AUTOCAST and not _passes_between_pieces(node):
                last = max(self._index.get(user, end) for user in node.users)
                self._forbid(i, last, f"'{node.name}' is not a tensor that a piece could return")

    def _forbid_before_mutations(self) -> None:
        """A piece may have saved, for its backward, a value that a later piece changes in place."""
        touched: dict[Any, int] = {}
        for i, node in enumerate(self._operators):
            for changed in mutated_by(node):
                first = min((touched[key] for key in _memory(changed) if key in touched), default=i)
                self._forbid(first, i, f"'{node.name}' changes in place what came before it")
            for each in (node, *node.all_input_nodes):
                for key in _memory(each):
                    touched.setdefault(key, i)

    def _forbid_around_hooks(self) -> None:
        """A hook gets the whole gradient of its tensor, of which a later piece would know only its own part."""
        for i, node in enumerate(self._operators):
            if _name(node) == "register_hook" and isinstance(node.args[0], Node):
                first, last = self._index.get(node.args[0], i), i
                # A view that a piece returns, or a view of it, is made anew outside of the piece, where the hook is not.
                if any(tensor._is_view() for tensor in _tensors(value_of(node))):
                    last = max(j for j, other in enumerate(self._operators) if _shares_memory(node, other))
                self._forbid(first, last, f"'{node.name}' is called with the whole gradient of '{node.args[0].name}'")

    def _forbid_inside_effects(self) -> None:
        """Global state is switched by nodes without a result. Of some nobody knows which belong together."""
        opened: list[int] = []
        others: list[int] = []
        for i, node in enumerate(self._operators):
            name = _name(node)
            if any(word in name for word in _OPENING) and node.target not in _AUTOCAST:
                opened.append(i)
            elif any(word in name for word in _CLOSING) and node.target not in _AUTOCAST and opened:
                first = opened.pop()
                self._forbid(first, i, f"'{self._operators[first].name}' opens a region that '{node.name}' closes")
            elif _is_effect(node):
                others.append(i)
        if others:
            name = self._operators[others[0]].name
            self._forbid(others[0], others[-1], f"'{name}' changes global state")
        if opened:
            name = self._operators[opened[0]].name
            self._forbid(opened[0], len(self._operators) - 1, f"'{name}' opens a region that nothing closes")

    def _forbid_without_gradient(self) -> None:
        for i, disabled in enumerate(without_gradient(self._operators)[:-1]):
            if disabled:
                self._forbid(i, i + 1, "gradients are disabled there")


def _memory(node: Node) -> Iterator[Any]:
    """Keys that are equal for values that share memory."""
    tensors = _tensors(value_of(node))
    if not tensors:
        yield node
    for tensor in tensors:
        try:
            yield tensor.untyped_storage()._cdata
        except RuntimeError:
            # Tensor subclasses need not have one storage.
            yield node


def _shares_memory(node: Node, user: Node) -> bool:
    keys = set(_memory(node))
    return any(not keys.isdisjoint(_memory(each)) for each in (user, *user.all_input_nodes))


def _is_effect(node: Node) -> bool:
    if node.users or node.target in _AUTOCAST or node.target is torch._C._set_grad_enabled or mutated_by(node):
        return False
    if any(word in _name(node) for word in _HARMLESS):
        return False
    # An unused result is no effect.
    return not _tensors(value_of(node)) and not isinstance(value_of(node), (torch.SymInt, int))
