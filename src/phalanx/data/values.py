"""Python values that all ranks put together: means, gathered results, rank 0's word for everybody.

Owns how such a value travels; what it means is the caller's. Everything here is a collective: every rank calls it, in the
same order. A world of one communicates nothing.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm.torch_backend import collectives_for
from ..ddp.passes.order import recover
from ..errors import ArgumentTypeError, ConfigError, MismatchError, PeerFailure, PhalanxError
from ..observe.live.pulse import waiting

P = ParamSpec("P")
T = TypeVar("T")


@contextlib.contextmanager
def _together(where: str, numel: int = 0) -> Iterator[None]:
    """Around a collective of torch's own: what a rank or a connection did to it is an error that names the rank."""
    with waiting():
        if dist.group.WORLD is not None:
            recover(dist.group.WORLD)
            collectives_for(dist.group.WORLD).comes_to(where, numel)
        try:
            yield
        except RuntimeError as error:
            if dist.group.WORLD is None or isinstance(error, PhalanxError):
                raise
            raise collectives_for(dist.group.WORLD).explain_transport(error, where) from error


class Exchange:
    """What one rank needs in order to put values together with the others."""

    def __init__(self, rank: int, world: int, device: torch.device) -> None:
        self.rank, self.world = rank, world
        self.device = device
        """Where tensors travel that are on no accelerator themselves: the CPU, unless the group serves GPUs only."""
        self.is_joining = False
        """Whether this process is about to join ranks that train already: it is alone, and not the first of them."""
        self.generation = 0
        """Another number whenever the ranks are others than before (an elastic run)."""

    @property
    def is_first(self) -> bool:
        """Whether this rank does what one does for all."""
        return self.rank == 0 and not self.is_joining

    def mean(self, value: Any, weight: float | Tensor = 1.0) -> Any:
        """Σ weight·value / Σ weight over the ranks, for a number, a tensor, or a dict, list or tuple of them.

        One collective, in double precision. NaN where all weights are 0. The keys of a dict may come in any order; ranks
        whose values differ in form raise MismatchError, or get NaN where looking would make the host wait for a device.
        """
        leaves: list[Tensor] = []
        _map_numbers(value, lambda leaf: leaves.append(_dense(leaf, "a mean").detach()))
        if any(leaf.is_complex() for leaf in leaves):
            raise ArgumentTypeError(
                f"rank {self.rank}: a mean is made of real numbers, got complex ones. Pass torch.view_as_real(value)."
            )
        try:
            share = torch.as_tensor(weight, dtype=torch.float64).detach().reshape(1)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise ArgumentTypeError(f"rank {self.rank}: a weight in a mean is one number, got {weight!r:.80}") from error
        if share.device.type == "cpu" and not 0 <= float(share) < math.inf:
            raise ConfigError(f"rank {self.rank}: a weight in a mean must be finite and 0 or more, got {weight}")
        away = [leaf.device for leaf in leaves if leaf.device.type != "cpu"]
        device = away[0] if away else self.device
        flat = [leaf.to(device, _wide(device)).reshape(-1) for leaf in leaves]
        share = share.to(device, _wide(device))
        form = _form(value)
        # A rank that counts nothing must not spoil the others' sum, were its value infinite or no number.
        counted = [torch.where(share > 0, one * share, 0.0) for one in flat]
        mark = _mark(form, device)
        packed = torch.cat([*counted, share, mark])
        self._sum(packed)
        numbers, total, marks = packed[:-3], packed[-3], packed[-2:]
        agreed = self._of_one_form(numbers / total, marks == self.world * mark, form)
        means = iter(agreed.split([leaf.numel() for leaf in leaves]))
        return _map_numbers(value, lambda leaf: _like(leaf, next(means)))

    def _of_one_form(self, means: Tensor, agrees: Tensor, form: str) -> Tensor:
        if means.device.type != "cpu":
            # The host would have to wait in order to look.
            return torch.where(agrees.all(), means, torch.nan)
        if bool(agrees.all()):
            return means
        # Every rank is here: no rank's sums can be those of all, unless all marks are the same.
        forms = self.all_objects(form)
        said = "; ".join(f"{one} from rank {rank}" for rank, one in enumerate(forms) if rank == 0 or one != forms[0])
        raise MismatchError(
            f"rank {self.rank}: the ranks put values of different forms together in a mean: {said}. Pass the same entries, "
            "of the same shapes, on every rank, with weight=0 where a rank has nothing to say."
        )

    def gather(self, value: Any) -> Any:
        """Every rank's value on every rank, in order of ranks.

        Tensors are joined along their first dimension, whose size may differ by rank; a scalar counts as one row. Lists are
        joined too. Dicts and tuples are gathered entry by entry, by their keys. Anything else becomes a list with an entry
        per rank. Raises MismatchError, on every rank, where one has other keys, or another kind of value.
        """
        if isinstance(value, Tensor):
            return self._gather_tensor(value)
        if isinstance(value, Mapping):
            keys = sorted(value, key=repr)
            self._all_of("dict", list(map(repr, keys)))
            gathered = {key: self.gather(value[key]) for key in keys}
            return {key: gathered[key] for key in value}
        if isinstance(value, tuple):
            self._all_of("tuple", len(value))
            items = [self.gather(item) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
        if isinstance(value, list):
            return [item for items in self._all_of("list", value, same=False) for item in items]
        return self._all_of("object", value, same=False)

    def _all_of(self, kind: str, told: Any, same: bool = True) -> list[Any]:
        """What every rank tells of the value it gathers, of one kind everywhere; with `same`, also told alike."""
        found = self.all_objects((kind, told))
        for rank, (other, said) in enumerate(found):
            if other != found[0][0] or (same and said != found[0][1]):
                raise MismatchError(
                    f"rank {self.rank}: gather got {_in_words(other, said)} from rank {rank} and {_in_words(*found[0])} "
                    "from rank 0. Gather values of one form on every rank."
                )
        return [said for _, said in found]

    def all_objects(self, value: Any) -> list[Any]:
        """Every rank's value, pickled, by rank."""
        if self.world == 1:
            return [value]
        found: list[Any] = [None] * self.world
        with _together("gathering values"):
            dist.all_gather_object(found, value)
        return found

    def from_first(self, value: Any) -> Any:
        """Rank 0's value on every rank."""
        if self.world == 1:
            return value
        box = [value]
        with _together("waiting for a value of rank 0"):
            dist.broadcast_object_list(box, src=0, device=self.device)
        return box[0]

    def number_with(self, mine: bool) -> int:
        """How many ranks say yes."""
        said = torch.tensor([int(mine)], device=self.device)
        self._sum(said)
        return int(said.item())

    def barrier(self) -> None:
        """Return when every rank has come here."""
        if self.world > 1:
            with _together("a barrier"):
                dist.barrier()

    def _sum(self, tensor: Tensor) -> None:
        if self.world > 1:
            with _together("adding up values", tensor.numel()):
                dist.all_reduce(tensor)

    def _gather_tensor(self, tensor: Tensor) -> Tensor:
        # What is conjugate, or negative, in name only has other bytes than it shows.
        plain = _dense(tensor, "gather").detach().resolve_conj().resolve_neg()
        mine = plain.reshape(1) if plain.dim() == 0 else plain
        kinds = self._all_of("tensor", (str(mine.dtype), tuple(mine.shape)), same=False)
        for rank, (dtype, shape) in enumerate(kinds):
            if dtype != kinds[0][0] or shape[1:] != kinds[0][1][1:]:
                raise MismatchError(
                    f"rank {self.rank}: gather got {dtype} of shape {shape} from rank {rank} and {kinds[0][0]} of shape "
                    f"{kinds[0][1]} from rank 0. Only the first dimension may differ between ranks."
                )
        # As bytes, of the largest rank's number: every type travels, whatever the transport can add up.
        widths = [math.prod(shape) * mine.element_size() for _, shape in kinds]
        device = mine.device if mine.device.type != "cpu" else self.device
        sent = torch.zeros(max(widths), dtype=torch.uint8, device=device)
        sent[: widths[self.rank]] = mine.contiguous().reshape(-1).view(torch.uint8)
        found = [sent] if self.world == 1 else [torch.empty_like(sent) for _ in kinds]
        if self.world > 1 and max(widths):
            with _together("gathering tensors"):
                dist.all_gather(found, sent)
        parts = [
            one[:width].view(mine.dtype).reshape(shape)
            for one, width, (_, shape) in zip(found, widths, kinds, strict=True)
        ]
        return torch.cat(parts).to(tensor.device)


class FirstOnly:
    """A part of the program that rank 0 does for everybody, while the others wait; `Worker.first_only` makes one.

    If rank 0 raises in it, every other rank raises PeerFailure with its words, instead of waiting for what never comes.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def __enter__(self) -> bool:
        return self._exchange.is_first

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, Exception):
            return  # the process is ending, and waits for nobody
        words = None if error is None else f"{type(error).__name__}: {error}"
        told = self._exchange.from_first(words)
        if error is None and told is not None:
            raise PeerFailure(
                f"rank {self._exchange.rank}: rank 0 failed in a part that it does for everybody: {told}", [0]
            )

    def __call__(self, function: Callable[P, T]) -> Callable[P, T | None]:
        """As a decorator: the function runs on rank 0 only and returns None elsewhere; all return together."""
        if not callable(function):
            raise ArgumentTypeError(f"first_only() decorates a function, got {function!r:.80}.")
        exchange = self._exchange

        # A functools.partial has no name, and an object that is called may have none.
        @functools.wraps(function)
        def on_first(*args: P.args, **kwargs: P.kwargs) -> T | None:
            with FirstOnly(exchange) as mine:
                return function(*args, **kwargs) if mine else None

        return on_first


def _wide(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64  # which has no double precision


def _dense(leaf: Any, what: str) -> Tensor:
    """A number or a tensor as a tensor whose elements lie in memory one by one."""
    try:
        tensor = torch.as_tensor(leaf)
    except (ValueError, OverflowError, RuntimeError) as error:
        raise ArgumentTypeError(f"{what} takes numbers of at most 64 bits, got {leaf!r:.80}.") from error
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        kind = "quantized" if tensor.is_quantized else "without values" if tensor.is_meta else str(tensor.layout)
        raise ArgumentTypeError(
            f"{what} takes ordinary tensors, got one of shape {tuple(tensor.shape)} that is {kind.removeprefix('torch.')}. "
            "Pass to_dense() or dequantize() of it."
        )
    return tensor


def _map_numbers(value: Any, change: Callable[[Any], Any]) -> Any:
    """`value` with every number and tensor in it changed."""
    if isinstance(value, Tensor | int | float):
        return change(value)
    if isinstance(value, Mapping):
        # In one order everywhere: a dict that was filled as its data came has another one on every rank.
        changed = {key: _map_numbers(value[key], change) for key in sorted(value, key=repr)}
        return {key: changed[key] for key in value}
    if isinstance(value, list | tuple):
        items = [_map_numbers(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    raise ArgumentTypeError(
        f"a mean is made of numbers and tensors, or of dicts, lists and tuples of them, got {type(value).__name__}"
    )


def _mark(form: str, device: torch.device) -> Tensor:
    """Two numbers whose sums over the ranks are `world` times one's own only if all have the same: m and m².

    Small enough that their sums are exact.
    """
    bits = 20 if _wide(device) is torch.float64 else 8
    mark = int.from_bytes(hashlib.blake2b(form.encode(), digest_size=4).digest(), "little") % 2**bits
    return torch.tensor([mark, mark * mark], dtype=_wide(device), device=device)


def _form(value: Any) -> str:
    """Keys, lengths and shapes of what a mean is made of, in words."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {_form(value[key])}" for key in sorted(value, key=repr)) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_form, value)) + "]"
    return str(list(value.shape)) if isinstance(value, Tensor) and value.dim() else "number"


def _in_words(kind: str, told: Any) -> str:
    """What a rank gathers, for a message."""
    if kind == "dict":
        return f"a dict with the keys {', '.join(told[:8])}{' …' if len(told) > 8 else ''}"
    return f"a tuple of {told}" if kind == "tuple" else f"a {kind}".replace("a object", "an object")


def _like(leaf: Any, mean: Tensor) -> Any:
    if not isinstance(leaf, Tensor):
        return mean.item()
    dtype = leaf.dtype if leaf.dtype.is_floating_point else torch.get_default_dtype()
    return mean.to(leaf.device, dtype).reshape(leaf.shape)
