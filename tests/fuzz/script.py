"""Prints a failing program as one short file that needs torch and phalanx and nothing of the tests.

Model and inputs are the very classes that ran; events become the lines that a user would have written; what the reference
expects after the last event is given as numbers. tests/fuzz/test_fuzz.py runs a script with every kind of event.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from tests.fuzz import events, models
from tests.fuzz.program import OPTIMIZERS, Program
from tests.fuzz.reference import Alone, advance
from tests.fuzz.runner import Failure

HEAD = '''"""{title}

{where} Run it with `python FILE`."""

import os
import socket
import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.utils.checkpoint import checkpoint

import phalanx
from phalanx.comm import hooks

COLUMNS, SAMPLES = {columns}, {samples}
'''
NET = '''
class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([{parts}])

'''
MAIN = '''
# After the last event, by hand: norm and sum of each gradient, then of each parameter; None where there is none.
GRADIENTS = {gradients}
PARAMETERS = {parameters}


def describe(tensor):
    if type(tensor) not in (torch.Tensor, nn.Parameter):
        return None
    flat = tensor.detach().to_dense().to(torch.complex128).reshape(-1)
    return flat.abs().square().sum().sqrt().item(), (flat.real + flat.imag).sum().item()


def is_close(got, want):
    if got is None or want is None:
        return got is want
    return all(abs(a - b) <= 1e-3 * want[0] + 1e-9 for a, b in zip(got, want))


def main(rank, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("{backend}", rank=rank, world_size={ranks})
    torch.manual_seed({seed})
    model = Net()
    start = {{name: value.clone() for name, value in model.state_dict().items()}}
    kept = []
{setting}

    def forward(data, routes, sync=True, **how):
        """The inputs and outputs of one forward: routes are (part, how it is recomputed), for each rank or for all."""
        usual = {{"returns": "tensor", "boom": None, "inner": False}}
        model.call = SimpleNamespace(route=routes[rank % len(routes)], **(usual | how))
        x, tokens = make_batch(data, rank)
        with nullcontext() if sync else ddp.no_sync():
            return x, run(x, tokens)

{events}
    wrong = 0
{checking}    for (name, param), grad, value in zip(model.named_parameters(), GRADIENTS, PARAMETERS):
        for what, got, want in (("gradient", describe(param.grad), grad), ("parameter", describe(param), value)):
            if want != ... and not is_close(got, want):
                wrong += 1
                print(f"rank {{rank}} {{name}}: norm and sum of the {{what}} are {{got}}, expected {{want}}", flush=True)
    print(f"rank {{rank}}: {{wrong}} of {{2 * len(PARAMETERS)}} tensors are not as expected", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(1 if wrong else 0)


if __name__ == "__main__":
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = [mp.get_context("spawn").Process(target=main, args=(rank, port)) for rank in range({ranks})]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    sys.exit(max(abs(process.exitcode) for process in ranks))
'''

# Only for a failure of this kind: elsewhere the program itself may have changed what was kept.
KEPT = '''    for name, grad, value in kept:
        if not torch.equal(grad, value):
            wrong += 1
            print(f"rank {rank} {name}: the gradient that was kept has changed")
'''


def script_of(failure: Failure) -> str:
    """The failing program, up to the event after which it showed, as a file."""
    program = failure.program
    if failure.at is not None and failure.at >= 0:
        program = program.but(events=program.events[: failure.at + 1])
    gradients, parameters = _expected(program)
    first = f"{failure.what}: " + failure.text.split("\n")[0].replace("\\", "")
    where = f"Seed {program.seed}, {program.ranks} ranks, {program.backend}."
    columns, samples = models.COLUMNS, models.SAMPLES
    parts = ", ".join(f"{part.kind}({part.width}, torch.{part.dtype})" for part in program.parts)
    pieces = [models.fold, *_classes_of(program), models.Boom, models.make_batch, events.loss_of]
    if not any(isinstance(event, events.Fail) for event in program.events):
        pieces.remove(models.Boom)
    sources = [inspect.getsource(piece).rstrip() for piece in pieces]
    net = NET.format(parts=parts) + inspect.getsource(models.Net.forward) + "\n" + inspect.getsource(models.Net.run_part)
    main = MAIN.format(
        checking=KEPT if failure.what == "kept" else "",
        gradients=gradients,
        parameters=parameters,
        backend=program.backend,
        ranks=program.ranks,
        seed=program.seed,
        setting=_indented(_setting(program)),
        events=_indented([line for event in program.events for line in (*_lines(program, event), "")]),
    )
    head = HEAD.format(title=first[:200], where=where, columns=columns, samples=samples)
    return "\n\n".join([head, *sources, net.strip("\n"), main.lstrip("\n")])


def _classes_of(program: Program) -> list[Any]:
    """The classes of the program's parts, behind those that they derive from."""
    found: dict[Any, None] = {}
    for part in program.parts:
        for ancestor in reversed(getattr(models, part.kind).__mro__):
            if ancestor.__module__ == models.__name__:
                found[ancestor] = None
    return list(found)


def _indented(lines: list[str]) -> str:
    return "\n".join(f"    {line}".rstrip() for line in lines)


def _setting(program: Program) -> list[str]:
    """Wrapper and optimizer."""
    wrapping = ["model", 'on_unused="ignore"']
    given = {
        "bucket_cap_mb": program.cap_mb,
        "gradient_as_bucket_view": program.views,
        "static_graph": program.static,
        "find_unused_parameters": program.find_unused,
        "skip_all_reduce_unused_params": program.skip_unused,
        "batched_grad_copy": program.batched,
        "on_nonfinite": program.nonfinite,
        "check_drift_every": program.drift,
    }
    wrapping += [f"{name}={value!r}" for name, value in given.items() if value not in (None, False)]
    if program.mixed is not None:
        low, reduced = (name and f"torch.{name}" for name in program.mixed)
        wrapping.append(f"mixed_precision=phalanx.MixedPrecision(param_dtype={low}, reduce_dtype={reduced})")
    if program.delayed is not None:
        part, trigger = program.delayed
        named = f'[(n, p) for n, p in model.named_parameters() if n.startswith("parts.{part}.")]'
        wrapping.append(f"delay_all_reduce_named_params={named}")
        wrapping.append(f"param_to_hook_all_reduce=next(model.parts[{trigger}].parameters())")
    wrap = [f"ddp = phalanx.DistributedDataParallel({', '.join(wrapping)})"]
    if program.hook is not None:
        wrap.append(f"ddp.register_comm_hook(None, hooks.{program.hook})")
    compiled = 'torch.compile(ddp, backend="phalanx", options={"compiler": "aot_eager"})'
    wrap.append(f"run = {compiled if program.mode == 'compiled' else 'ddp'}")
    first = program.optimizer_first or program.mode == "in_backward"
    return [_optimizer(program), *wrap] if first else [*wrap, _optimizer(program)]


def _optimizer(program: Program) -> str:
    name, options = OPTIMIZERS[program.optimizer]
    given = ", ".join(f"{key}={value!r}" for key, value in options.items())
    if program.mode == "in_backward":
        trained = "[p for p in model.parameters() if p.requires_grad]"
        return f"optimizer = phalanx.optim.apply_in_backward(torch.optim.{name}, {trained}, {given})"
    if not program.has_sharded_state:
        return f"optimizer = torch.optim.{name}(model.parameters(), {given})"
    extra = dict(program.zero)
    if program.is_overlapped:
        extra |= {"overlap_with_ddp": True, "step_in_backward": program.mode == "overlapped"}
    given = ", ".join([f"torch.optim.{name}", *(f"{key}={value!r}" for key, value in extra.items()), given])
    return f"optimizer = phalanx.ZeroRedundancyOptimizer(model.parameters(), {given})"


# -- events ------------------------------------------------------------------------------------------


def _lines(program: Program, event: Any) -> list[str]:
    if isinstance(event, events.Join):
        return _join_lines(program, event)
    if isinstance(event, events.Pass):
        return _pass_lines(event)
    return _other_lines(program, event)


class Expression(str):
    """Stands in the script as it is, to be computed there."""

    def __repr__(self) -> str:
        return str(self)


def _forward(event: Any, data: int | None = None, **how: Any) -> str:
    given = [repr(event.data if data is None else data), repr(event.routes)]
    given += ["sync=False"] if not getattr(event, "sync", True) else []
    given += [f"{name}={value!r}" for name, value in how.items()]
    return f"forward({', '.join(given)})"


def _backward(event: Any, loss: str, retain: bool = False) -> list[str]:
    line = f"{loss}.backward({'retain_graph=True' if retain else ''})"
    if event.weights is not None:
        return [f"with ddp.weight({event.weights!r}[rank % {len(event.weights)}]):", f"    {line}"]
    return ["with ddp.no_sync():", f"    {line}"] if not event.sync else [line]


def _pass_lines(event: Any) -> list[str]:
    match event:
        case events.TwoForwards(each=each):
            lines = [f"first = loss_of({_forward(event)}[1])", f"second = loss_of({_forward(event, event.data + 500)}[1])"]
            if each:
                return [*lines, *_backward(event, "first"), *_backward(event, "second")]
            return [*lines, *_backward(event, "(first + second)")]
        case events.Twice():
            lines = [f"loss = loss_of({_forward(event)}[1])"]
            return [*lines, *_backward(event, "loss", retain=True), *_backward(event, "loss")]
        case events.Partial(rest=rest):
            lines = [f"out = {_forward(event, returns='both')}[1]"]
            lines += _backward(event, 'loss_of(out["half"][0])', retain=rest)
            return [*lines, *(_backward(event, 'loss_of(out["all"])') if rest else [])]
        case events.Penalty(alone=alone):
            lines = [f"x, out = {_forward(event)}", "(grad,) = torch.autograd.grad(loss_of(out), x, create_graph=True)"]
            lines.append("penalty = (grad.square().sum(1) - 1).square().sum()")
            return [*lines, *_backward(event, "penalty" if alone else "(loss_of(out) + penalty)")]
        case events.Hidden(where=where):
            seen = {"object": "out", "beside": "out[0]", "aux": "model.aux"}[where]
            return [f"out = {_forward(event, returns=where)}[1]", *_backward(event, f"loss_of({seen})")]
        case events.Fail(at=at, how=how, apart=apart):
            boom = Expression(f"({at} + rank) % {len(event.routes[0])}") if apart else at
            lines = [f"loss = loss_of({_forward(event, boom=boom)}[1])", "try:", "    loss.backward()"]
            lines += ["except ArithmeticError:", "    pass"]
            return [*lines, f"model.zero_grad(set_to_none={how == 'none'})"]
        case events.Poison():
            return _poison_lines(event)
        case events.Inner(alone=alone):
            return [f"x, out = {_forward(event, inner=True)}", *([] if alone else _backward(event, "loss_of(out)"))]
    lines = [f"x, out = {_forward(event)}", "loss = loss_of(out)"]
    if event.peek is not None:
        lines.append(f"if {event.peek} in ({events.EVERY_RANK}, rank):")
        lines.append("    torch.autograd.grad(loss, x, retain_graph=True)")
    return [*lines, *_backward(event, "loss")]


def _poison_lines(event: Any) -> list[str]:
    lines = [f"loss = loss_of({_forward(event)}[1])", f"mine = rank == {event.victim} % dist.get_world_size()"]
    if event.part < 0:
        lines += [f"loss = loss * float('{event.value}') if mine else loss"]
    else:
        lines += [f"planted = next(model.parts[{event.part}].parameters())"]
        lines += [f"hook = planted.register_hook(lambda g: torch.full_like(g, float('{event.value}')) if mine else g)"]
    lines += ["try:", "    loss.backward()", "except phalanx.errors.ReductionError:", "    pass"]
    return [*lines, *(["hook.remove()"] if event.part >= 0 else []), "model.zero_grad()"]


def _join_lines(program: Program, event: Any) -> list[str]:
    joined = "[ddp, optimizer]" if program.has_sharded_state else "[ddp]"
    kept = f"tuple(use for use in route if not (turn and use[0] in {event.dropped!r}))"
    return [
        f"with Join({joined}, divide_by_initial_world_size={event.initial}):",
        f"    for turn in range({event.counts!r}[rank % {len(event.counts)}]):",
        "        optimizer.zero_grad()",
        f"        routes = [{kept} for route in {event.routes!r}]",
        f"        loss_of(forward({event.data} + turn, routes)[1]).backward()",
        "        optimizer.step()",
        "model.zero_grad()",
    ]


def _other_lines(program: Program, event: Any) -> list[str]:
    in_backward = program.mode == "in_backward"
    match event:
        case events.Zero(how=how, via=via):
            who = {"module": "model", "wrapper": "ddp", "optimizer": "model" if in_backward else "optimizer"}[via]
            return [f"{who}.zero_grad(set_to_none={how == 'none'})"]
        case events.Step(clip=clip):
            line = f"optimizer.clip_grad_norm_({clip})"
            if not program.has_sharded_state:
                line = f"torch.nn.utils.clip_grad_norm_(model.parameters(), {clip})"
            return [*([line] if clip is not None else []), *([] if in_backward else ["optimizer.step()"])]
        case events.Look(mode=mode, rank=rank):
            return _look_lines(event, mode, rank)
        case events.Keep():
            named = "for name, p in model.named_parameters() if type(p.grad) is torch.Tensor and not p.grad.is_sparse"
            return [f"kept += [(name, p.grad, p.grad.clone()) {named}]"]
        case events.Rate(factor=factor):
            return ["for group in optimizer.param_groups:", f'    group["lr"] *= {factor}']
        case events.Freeze(part=part, frozen=frozen):
            return [f"model.parts[{part}].requires_grad_({not frozen})"]
        case events.Retype(how=how):
            return ["model.double().float()" if how == "double" else f"model.to(memory_format=torch.{how})"]
        case events.Reload(what=what):
            return _reload_lines(program, what)
    return _listen_lines(event) if isinstance(event, events.Listen) else _place_lines(event)


def _look_lines(event: Any, mode: str, rank: int) -> list[str]:
    mine = "True" if rank == events.EVERY_RANK else f"rank == {rank}"
    if mode == "grad":
        return [_forward(event)]
    if mode == "saliency":
        return [f"x, out = {_forward(event)}", f"if {mine}:", "    torch.autograd.grad(loss_of(out), x)"]
    lines = ["with torch.no_grad():", f"    model.train({mode != 'eval'})", f"    if {mine}:", f"        {_forward(event)}"]
    return [*lines, "    model.train()"]


def _reload_lines(program: Program, what: str) -> list[str]:
    if what == "module":
        return ["ddp.load_state_dict(start)"]
    if not program.has_sharded_state:
        return ["optimizer.load_state_dict(optimizer.state_dict())"]
    lines = [f"for to in range({program.ranks}):", "    optimizer.consolidate_state_dict(to=to)"]
    return [*lines, "    if rank == to:", "        state = optimizer.state_dict()", "optimizer.load_state_dict(state)"]


def _listen_lines(event: Any) -> list[str]:
    return [
        "def listen(p):",
        "    p.grad.mul_(0.5)" if event.scale else "    assert p.grad is not None",
        "",
        f"for p in list(model.parameters())[:: {event.every}]:",
        "    if p.requires_grad:",
        "        p.register_post_accumulate_grad_hook(listen)",
    ]


def _place_lines(event: Any) -> list[str]:
    assert isinstance(event, events.Place), f"no lines for {event!r}"
    value = "flat[p.dtype][at : at + p.numel()].view(p.shape)"
    if event.how != "flat":
        value = "torch.randn(p.shape, generator=chance).to(p.dtype)"
    return [
        "trained = [p for p in model.parameters() if p.requires_grad]",
        f"chance = torch.Generator().manual_seed(77 + {'rank' if event.how == 'own' else 0})",
        "flat, at = {p.dtype: torch.zeros(sum(q.numel() for q in trained), dtype=p.dtype) for p in trained}, 0",
        "for p in trained:",
        f"    p.grad, at = {value}, at + p.numel()",
        "placed = [p.grad for p in trained]",
    ]


# -- what is right -----------------------------------------------------------------------------------


def _expected(program: Program) -> tuple[str, str]:
    jobs = [Alone(program, rank) for rank in range(program.ranks)]
    for event in program.events:
        advance(jobs, event, [0.0] * len(jobs[0].params))
    gradients = [... if program.is_overlapped else _described(p.grad) for p in jobs[0].params]
    return repr(gradients).replace("Ellipsis", "..."), repr([_described(p) for p in jobs[0].params])


def _described(tensor: torch.Tensor | None) -> tuple[float, float] | None:
    if tensor is None:
        return None
    flat = tensor.detach().to_dense().to(torch.complex128).reshape(-1)
    return float(f"{flat.abs().square().sum().sqrt().item():.7g}"), float(f"{(flat.real + flat.imag).sum().item():.7g}")
