"""One model of a program as a user of phalanx would set it up: the wrapper around it, and its optimizer."""

from __future__ import annotations

from typing import Any

import torch

import phalanx
from phalanx.comm import hooks
from tests.fuzz.models import Net, given_params
from tests.fuzz.program import Program


class Member:
    """A wrapped model with its optimizer, unless that is not its own. `program` is that of this model alone."""

    def __init__(self, program: Program, net: Net, shares: bool) -> None:
        self.program, self.net = program, net
        self.start = {name: value.clone() for name, value in net.state_dict().items()}
        self.optimizer: Any = None
        if not shares and (program.optimizer_first or program.mode == "in_backward"):
            self.optimizer = make_optimizer(program, net)
        self.ddp = wrap(program, net)
        if not shares and self.optimizer is None:
            self.optimizer = make_optimizer(program, net)
        self.forwards = self.ddp
        if program.mode == "compiled":
            self.forwards = torch.compile(self.ddp, backend="phalanx", options={"compiler": "aot_eager"})


def wrap(program: Program, net: Net) -> Any:
    options: dict[str, Any] = {}
    if program.mixed is not None:
        low, reduced = (None if name is None else getattr(torch, name) for name in program.mixed)
        options["mixed_precision"] = phalanx.MixedPrecision(param_dtype=low, reduce_dtype=reduced)
    if program.delayed is not None:
        part, trigger = (f"parts.{number}." for number in program.delayed)
        named = list(net.named_parameters())
        options["delay_all_reduce_named_params"] = [(name, p) for name, p in named if name.startswith(part)]
        options["param_to_hook_all_reduce"] = next(p for name, p in named if name.startswith(trigger))
    ddp = phalanx.DistributedDataParallel(
        net,
        bucket_cap_mb=program.cap_mb,
        gradient_as_bucket_view=program.views,
        static_graph=program.static,
        find_unused_parameters=program.find_unused,
        skip_all_reduce_unused_params=program.skip_unused,
        batched_grad_copy=program.batched,
        on_nonfinite=program.nonfinite,
        check_drift_every=program.drift,
        on_unused="ignore",
        **options,
    )
    if program.hook is not None:
        ddp.register_comm_hook(None, getattr(hooks, program.hook))
    return ddp


def make_optimizer(program: Program, net: Net) -> Any:
    name, options = program.optimizer_options
    kind, params = getattr(torch.optim, name), given_params(program, net)
    if program.mode == "in_backward":
        trained = [p for p in params if p.requires_grad]
        return phalanx.optim.apply_in_backward(kind, trained, **options)
    if not program.has_sharded_state:
        return kind(params, **options)
    extra: dict[str, Any] = dict(program.zero)
    if program.is_overlapped:
        extra |= {"overlap_with_ddp": True, "step_in_backward": program.mode == "overlapped"}
    return phalanx.ZeroRedundancyOptimizer(params, kind, **extra, **options)
