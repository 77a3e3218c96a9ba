"""A parameter's state as text and flat tensors: what it takes to send or save it without pickle.

The text is JSON. Tensors with dimensions are leaves, named by their path and kept apart; everything else is in
the text itself. A leaf of its tensor's own shape is elementwise (`shape` null), so it can be cut with the
parameter. Adam's state of one slice:

    {"dict": {"step": {"value": 3.0, "dtype": "float32", "at": "cpu"},
              "exp_avg": {"leaf": "exp_avg", "dtype": "float32", "shape": null}, …}}

Pure: no process group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import StateError

Tree = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor of a state. `shape` is None for one that has the shape of the tensor it belongs to."""

    path: str
    dtype: torch.dtype
    shape: tuple[int, ...] | None


def describe(state: Any, like: torch.Tensor, what: str) -> tuple[Tree, dict[str, torch.Tensor]]:
    """The text of `state`, and its leaves by path. `like` is the tensor whose state it is, `what` names it."""
    leaves: dict[str, torch.Tensor] = {}

    def encode(value: Any, path: str) -> Tree:
        if isinstance(value, torch.Tensor):
            return _encode_tensor(value, path, like, leaves)
        if value is None or isinstance(value, (bool, int, float, str)):
            return {"plain": value}
        # Other keys would become texts in JSON, and come back as such.
        if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
            return {"dict": {key: encode(item, _join(path, key)) for key, item in value.items()}}
        if isinstance(value, (list, tuple)):
            items = [encode(item, _join(path, str(i))) for i, item in enumerate(value)]
            return {"tuple" if isinstance(value, tuple) else "list": items}
        raise StateError(
            f"{what}: its state has a {type(value).__name__} at '{path}', which cannot be sent or saved. States are "
            "made of tensors, numbers, strings, None, lists, tuples and dicts with string keys."
        )

    return encode(state, ""), leaves


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _encode_tensor(value: torch.Tensor, path: str, like: torch.Tensor, leaves: dict[str, torch.Tensor]) -> Tree:
    dtype = _name(value.dtype)
    # In the text, exactly: JSON keeps a double as it is, and NaN and infinity as Python writes them. It costs a wait for the
    # device, but only when a state is moved or saved.
    if not value.dim():
        number: Any = value.item()
        if isinstance(number, complex):
            number = [number.real, number.imag]
        # Step counters are often on the CPU whatever the parameter's device; where they were, they must be again.
        return {"value": number, "dtype": dtype, "at": "param" if value.device == like.device != _CPU else "cpu"}
    while path in leaves:  # a key may have dots of its own: {"a.b": …, "a": {"b": …}}
        path += "'"
    leaves[path] = value
    # Relative to the tensor it belongs to, so that one text describes the state of a slice and of the whole parameter.
    return {"leaf": path, "dtype": dtype, "shape": None if value.shape == like.shape else list(value.shape)}


_CPU = torch.device("cpu")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def rebuild(tree: Tree, device: torch.device, leaf: Callable[[Leaf], torch.Tensor]) -> Any:
    """The state that a text describes, on `device`, with each leaf as `leaf` gives it."""
    if "plain" in tree:
        return tree["plain"]
    if "dict" in tree:
        return {key: rebuild(item, device, leaf) for key, item in tree["dict"].items()}
    if "list" in tree:
        return [rebuild(item, device, leaf) for item in tree["list"]]
    if "tuple" in tree:
        return tuple(rebuild(item, device, leaf) for item in tree["tuple"])
    if "leaf" in tree:
        return leaf(_leaf(tree))
    value = complex(*tree["value"]) if isinstance(tree["value"], list) else tree["value"]
    if not isinstance(value, (bool, int, float, complex)):
        raise StateError(f"a saved state has {value!r:.60} where it should have a number.")
    # Not the saved device: a checkpoint may be loaded where there is another one.
    at = device if tree["at"] == "param" else _CPU
    return torch.tensor(value, dtype=dtype_named(tree["dtype"]), device=at)


def dtype_named(name: Any) -> torch.dtype:
    """By name only, and of this kind only: a file from elsewhere must not choose any attribute of torch."""
    found = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(found, torch.dtype):
        raise StateError(f"a saved state has the dtype {name!r:.60}, which this torch does not know.")
    return found


def _leaf(tree: Tree) -> Leaf:
    shape = tree["shape"]
    return Leaf(tree["leaf"], dtype_named(tree["dtype"]), None if shape is None else tuple(shape))


def leaves_of(tree: Tree) -> Iterator[Leaf]:
    """Every leaf that a text mentions, in its order."""
    if "leaf" in tree:
        yield _leaf(tree)
        return
    for form in ("dict", "list", "tuple"):
        if form in tree:
            items = tree[form].values() if form == "dict" else tree[form]
            for item in items:
                yield from leaves_of(item)


def numbers_of(tree: Tree, state: Any) -> Iterator[tuple[Tree, torch.Tensor]]:
    """The tensors of `state` whose values are in its text, each with its place there, to be kept up to date."""
    if "value" in tree:
        yield tree, state
    for form in ("dict", "list", "tuple"):
        if form in tree:
            pairs = tree[form].items() if form == "dict" else enumerate(tree[form])
            for key, item in pairs:
                yield from numbers_of(item, state[key])
