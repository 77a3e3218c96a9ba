"""DDPOptimizer: torch's way of asking for cuts, by caps given to the constructor.

With a phalanx wrapper around the model, its parameters count and its plan is made of the pieces, as with the
backend. Without one, every parameter that requires a gradient counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..plan import BucketCaps, ParamSpec, specs_of
from ..plan.buckets import DEFAULT_FIRST_CAP_BYTES
from .backend import active_reducer, compile_for, cut_and_compile
from .guard import guard_on_cuts
from .parameters import find_parameters
from .pieces import Captured, Inner
from .split import Closing, Group, fill
from .stitch import Stitched


@dataclass(frozen=True, slots=True)
class PieceBucket:
    """What one piece of the last compiled graph completes: names, identities and bytes."""

    params: tuple[str, ...]
    param_ids: tuple[int, ...]
    size: int


class DDPOptimizer:
    """Cuts graphs into pieces of at most `bucket_bytes_cap` bytes of gradients, compiled by `backend_compile_fn`.

    The first bucket, the last layers' gradients, is smaller so that communication starts early; by default
    1 MiB, never more than the cap unless it is asked for. A piece whose compilation fails runs eagerly.
    """

    def __init__(
        self, bucket_bytes_cap: int, backend_compile_fn: Inner, first_bucket_cap: int | None = None
    ) -> None:
        BucketCaps((bucket_bytes_cap,))  # refuses what is none
        if first_bucket_cap is None:
            first_bucket_cap = min(DEFAULT_FIRST_CAP_BYTES, bucket_bytes_cap)
        self.bucket_bytes_cap = bucket_bytes_cap
        self.first_bucket_cap = first_bucket_cap
        self.backend_compile_fn = backend_compile_fn
        self.buckets: list[PieceBucket] = []
        self._caps = BucketCaps((first_bucket_cap, bucket_bytes_cap))

    def compile_fn(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any], **compiler_configs: Any
    ) -> Callable[..., Any]:
        """Compile a graph; a backend for torch.compile. Afterwards `buckets` describes its pieces."""
        guard_on_cuts()

        def inner(part: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
            return self.backend_compile_fn(part, examples, **compiler_configs)

        reducer = active_reducer()
        if reducer is not None:
            by_name = {spec.name: param for spec, param in zip(reducer.plan.specs, reducer.params, strict=True)}
            stitched = compile_for(reducer, gm, example_inputs, inner, self._caps)
        else:
            by_name = {}
            stitched = self._compile_alone(gm, example_inputs, inner, by_name)
        self.buckets = [_describe(piece.span.params, by_name) for piece in stitched.pieces]
        return stitched

    def _compile_alone(
        self,
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        inner: Inner,
        by_name: dict[str, torch.nn.Parameter],
    ) -> Stitched:
        names: dict[int, str] = {}

        def name_of(param: torch.nn.Parameter, name: str) -> str | None:
            if getattr(param, "_ddp_ignored", False):
                return None
            chosen = names.setdefault(id(param), name)
            by_name[chosen] = param
            return chosen

        owners = find_parameters(gm, example_inputs, name_of)
        specs: dict[str, ParamSpec] = {spec.name: spec for spec in specs_of(by_name.items())}

        def closings(groups: Sequence[Group]) -> list[Closing]:
            return fill([[group] for group in groups], specs, self._caps)

        return cut_and_compile(Captured(gm, example_inputs, owners), inner, list(specs), closings)


def _describe(names: Sequence[str], by_name: dict[str, torch.nn.Parameter]) -> PieceBucket:
    params = [by_name[name] for name in names]
    size = sum(param.numel() * param.element_size() for param in params)
    return PieceBucket(tuple(names), tuple(id(param) for param in params), size)
