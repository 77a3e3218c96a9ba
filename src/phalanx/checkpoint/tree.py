"""Anybody's `state_dict()` as JSON, with its tensors pulled out: what it takes to save it without pickle.

Numbers, strings, None, lists and dicts with string keys are JSON's own. Everything else is an object with one key:

    {"@tensor": path}  {"@array": path}      pulled out; `path` names it
    {"@number": [dtype, value]}              a tensor without dimensions, as it is
    {"@tuple": […]}  {"@set": […]}  {"@frozenset": […]}  {"@deque": […]}  {"@window": [maxlen, […]]}, a deque that has one
    {"@items": [[key, value], …]}  {"@counter": [[key, value], …]}
    {"@bytes": hex}  {"@complex": [re, im]}  {"@scalar": [dtype, value]}  {"@dtype": name}  {"@device": name}

What has no such form is refused by its path: a checkpoint that leaves out a part of the state in silence is worse than none.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from ..errors import StateError
from ..zero.state.tree import dtype_named

Leaf = Callable[[str], torch.Tensor]


def encode(value: Any, what: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """`value` as JSON, and its tensors by path. `what` names it in a refusal."""
    leaves: dict[str, torch.Tensor] = {}
    return _encode(value, "", what, leaves), leaves


def _encode(value: Any, path: str, what: str, leaves: dict[str, torch.Tensor]) -> Any:
    # Before numbers: numpy's float64 is also a float, and would come back as one.
    if isinstance(value, np.generic) and _is_of_numpy(value.dtype, _SCALARS):
        # A moment as numpy keeps it: Python's have no nanoseconds, and a number alone no unit.
        number = int(value.view(np.int64)) if value.dtype.kind in _TIMES else value.item()
        return {"@scalar": [value.dtype.str, _encode(number, path, what, leaves)]}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.Tensor):
        data = _plain(value, path, what)
        if not data.dim():
            return {"@number": [str(data.dtype).removeprefix("torch."), _encode(data.item(), path, what, leaves)]}
        return {"@tensor": _put(data, path, leaves)}
    if isinstance(value, np.ndarray) and _is_of_numpy(value.dtype, _NUMBERS):
        # Its memory may be read-only, or in the other order of bytes, which torch refuses.
        array = np.array(value, dtype=value.dtype.newbyteorder("="), order="C")
        return {"@array": _put(torch.from_numpy(array), path, leaves)}
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        # Sets in an order of their own, so that equal states are equal texts.
        items = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value
        encoded = [_encode(item, f"{path}.{i}" if path else str(i), what, leaves) for i, item in enumerate(items)]
        if isinstance(value, deque) and value.maxlen is not None:
            return {"@window": [value.maxlen, encoded]}
        form = next((name for kind, name in _SEQUENCES.items() if isinstance(value, kind)), None)
        return encoded if form is None else {form: encoded}
    if isinstance(value, Mapping) and type(value) in _MAPPINGS:
        return _encode_mapping(value, path, what, leaves)
    return _encode_rare(value, path, what)


def _put(leaf: torch.Tensor, path: str, leaves: dict[str, torch.Tensor]) -> str:
    """Keep a tensor under its path, or one like it: {"a.b": t} and {"a": {"b": t}} would have the same."""
    while path in leaves:
        path += "'"
    leaves[path] = leaf
    return path


# By numpy's letters for kinds: what an array may have in it, and what may stand alone.
_NUMBERS, _TIMES = "biufc", "mM"
_SCALARS = f"{_NUMBERS}SU{_TIMES}"


def _is_of_numpy(dtype: Any, kinds: str) -> bool:
    """Whether values of `dtype` can be saved. Not long doubles, which neither Python nor torch can hold."""
    return dtype.kind in kinds and dtype.char not in "gG"


_SEQUENCES: dict[type, str] = {tuple: "@tuple", set: "@set", frozenset: "@frozenset", deque: "@deque"}
_MAKERS: dict[str, type] = {form: kind for kind, form in _SEQUENCES.items()}
_MAPPINGS = (dict, OrderedDict, defaultdict, Counter)


def _encode_mapping(value: Mapping[Any, Any], path: str, what: str, leaves: dict[str, torch.Tensor]) -> Any:
    pairs = [(key, _encode(item, f"{path}.{key}" if path else str(key), what, leaves)) for key, item in value.items()]
    if isinstance(value, Counter):
        return {"@counter": [[_encode(key, path, what, leaves), item] for key, item in pairs]}
    # JSON's keys are strings; numbers would come back as such. One that begins with @ could be taken for a form.
    if all(type(key) is str and not key.startswith("@") for key in value):
        return dict(pairs)
    return {"@items": [[_encode(key, path, what, leaves), item] for key, item in pairs]}


def _encode_rare(value: Any, path: str, what: str) -> Any:
    if isinstance(value, (bytes, bytearray)):
        return {"@bytes": bytes(value).hex()}
    if isinstance(value, complex):
        return {"@complex": [value.real, value.imag]}
    if isinstance(value, torch.dtype):
        return {"@dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"@device": str(value)}
    raise StateError(
        f"{what} has a {type(value).__module__}.{type(value).__qualname__} at '{path}', which cannot be saved. States are "
        "made of tensors, arrays, numbers, strings, bytes, None, lists, tuples, sets and dicts. Leave it out of "
        "state_dict(), or turn it into these."
    )


def _plain(value: torch.Tensor, path: str, what: str) -> torch.Tensor:
    if value.layout != torch.strided or value.is_quantized or type(value) not in (torch.Tensor, torch.nn.Parameter):
        raise StateError(
            f"{what} has a {type(value).__name__} of layout {value.layout} at '{path}'; only dense tensors can be saved."
        )
    return value.detach()


def decode(tree: Any, leaf: Leaf) -> Any:
    """What `encode` was given, with each tensor as `leaf` gives it for its path."""
    if isinstance(tree, list):
        return [decode(item, leaf) for item in tree]
    if not isinstance(tree, dict):
        return tree
    form = next(iter(tree), "")
    if len(tree) != 1 or not form.startswith("@"):
        return {key: decode(item, leaf) for key, item in tree.items()}
    content = tree[form]
    if form in ("@tensor", "@array"):
        found = leaf(content)
        return found if form == "@tensor" else found.numpy()
    if form in _MAKERS:
        return _MAKERS[form](decode(item, leaf) for item in content)
    if form == "@window":
        return deque((decode(item, leaf) for item in content[1]), maxlen=content[0])
    if form in ("@items", "@counter"):
        pairs = {decode(key, leaf): decode(item, leaf) for key, item in content}
        return Counter(pairs) if form == "@counter" else pairs
    return _decode_rare(form, content, leaf)


def _decode_rare(form: str, content: Any, leaf: Leaf) -> Any:
    if form == "@bytes":
        return bytes.fromhex(content)
    if form == "@complex":
        return complex(*content)
    if form == "@number":
        return torch.tensor(decode(content[1], leaf), dtype=dtype_named(content[0]))
    if form == "@scalar":
        return _scalar_type(content[0])(decode(content[1], leaf))
    if form == "@dtype":
        return dtype_named(content)
    if form == "@device":
        return torch.device(content)
    raise StateError(f"a saved state has the form {form!r}, which this version does not know.")


def _scalar_type(name: Any) -> Callable[[Any], Any]:
    # Not of any kind: a void of numpy's takes a number for the bytes it is to have, as many as a file says.
    kind = np.dtype(name)
    if not _is_of_numpy(kind, _SCALARS):
        raise StateError(f"a saved state has a number of numpy's dtype {name!r:.60}, which is never saved.")
    if kind.kind in _TIMES:
        return lambda number: np.int64(number).view(kind)
    made: Callable[[Any], Any] = kind.type
    return made
