"""`explain`: what was cut in a model, or would be.

A model that has not been compiled yet is captured on example inputs without its wrapper's forward, so nothing is
communicated and nothing of the model changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..ddp.module import DistributedDataParallel
from ..ddp.torch_names import TorchNames
from ..errors import ArgumentTypeError
from ..plan import BucketCaps, BucketPlan, build_plan, specs_of
from .backend import phalanx_backend
from .capture import Capture
from .explanation import Explanation, describe


def explain(
    model: torch.nn.Module, *inputs: Any, compiler: Any = "inductor", caps: BucketCaps | None = None, **kwargs: Any
) -> Explanation:
    """What backend "phalanx" has made of `model`, or would make of it on these inputs.

    A wrapper that has been compiled and run is described as it is, and `inputs` are not used. Otherwise the
    model is compiled by `compiler` and run forward once; parameters, buffers and random state stay as they are.
    Without a wrapper, `caps` take the place of the wrapper's.
    """
    if not isinstance(model, torch.nn.Module):
        raise ArgumentTypeError(f"explain describes a torch.nn.Module, wrapped or not, got {model!r:.80}.")
    if caps is not None and not isinstance(caps, BucketCaps):
        raise ArgumentTypeError(f"caps must be BucketCaps or None, got {caps!r:.80}.")
    model = _original(model)
    if isinstance(model, DistributedDataParallel):
        capture = model.reducer.choose_buckets
        if isinstance(capture, Capture) and capture.runs:
            return describe(model.reducer)
        pretended = _Pretended(list(model.reducer.params), model.reducer.plan)
        model = model.module
    else:
        named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
        plan = build_plan(specs_of(named), caps)
        pretended = _Pretended([param for _, param in named], plan)
    module = _original(model)
    compiled = torch.compile(module, backend=phalanx_backend, options={"compiler": compiler})
    with _unchanged(module), torch.enable_grad(), _active(pretended):
        compiled(*inputs, **kwargs)
    return describe(pretended)


def _original(model: torch.nn.Module) -> torch.nn.Module:
    # Not by getattr: a wrapper looks for attributes in the model that it wraps, which may be the compiled one.
    return model._modules.get("_orig_mod") or model


class _Pretended:
    """Stands for wrapper and reducer while a model is captured only to be looked at."""

    settled = False

    def __init__(self, params: list[torch.nn.Parameter], plan: BucketPlan) -> None:
        self.params = params
        self.plan = plan
        # One of its own, so that dynamo never takes what is compiled here for training; but the same for the same cuts.
        # Dynamo keeps a few graphs per function: explaining often would leave no room for those that train.
        self.cut_key = f"explain {plan.hash}"
        self.choose_buckets: Any = None

    @property
    def reducer(self) -> _Pretended:
        return self


@contextmanager
def _active(pretended: _Pretended) -> Iterator[None]:
    before = TorchNames._active_ddp_module, TorchNames._active_cut_key
    TorchNames._active_ddp_module, TorchNames._active_cut_key = pretended, pretended.cut_key
    try:
        yield
    finally:
        TorchNames._active_ddp_module, TorchNames._active_cut_key = before


@contextmanager
def _unchanged(module: torch.nn.Module) -> Iterator[None]:
    """Buffers and random state are afterwards what they were."""
    # By their place as well: a forward may put another tensor there, as `self.count = self.count + 1` does.
    places_of = [(owner._buffers, dict(owner._buffers)) for owner in module.modules()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    places = {p.device for p in module.parameters() if p.device.index is not None and p.device.type not in ("cpu", "meta")}
    kind = next((place.type for place in places), "cuda")  # any will do where there is no place to look at
    with torch.random.fork_rng(devices=[place.index for place in places], device_type=kind):
        try:
            yield
        finally:
            for held, before in places_of:
                held.update(before)
            with torch.no_grad():
                for buffer, saved in buffers:
                    buffer.copy_(saved)
