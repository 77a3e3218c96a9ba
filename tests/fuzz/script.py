"""Prints a failing program as one short file that needs torch and phalanx and nothing of the tests.

Model and inputs are the very classes that ran; events become the lines that a user would have written; what the reference
expects after the last event is given as numbers. tests/fuzz/test_fuzz.py runs a script with every kind of event.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from tests.fuzz import events, models
from tests.fuzz.lines import lines_of
from tests.fuzz.meeting import advance
from tests.fuzz.program import Program
from tests.fuzz.reference import Alone
from tests.fuzz.runner import Failure
from tests.fuzz.snapshot import hidden_grads

HEAD = '''"""{title}

{where} Run it with `python FILE`."""

import os
import socket
import sys
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
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
    def __init__(self, parts) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

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
    model = Net([{parts}])
    start = {{name: value.clone() for name, value in model.state_dict().items()}}
    kept = []
{setting}

{forward}
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

FORWARD = '''    def forward(data, routes, sync=True, **how):
        """The inputs and outputs of one forward: routes are (part, how it is recomputed), for each rank or for all."""
        usual = {"returns": "tensor", "boom": None, "inner": False}
        model.call = SimpleNamespace(route=routes[rank % len(routes)], **(usual | how))
        x, tokens = make_batch(data, rank)
        with nullcontext() if sync else ddp.no_sync():
            return x, run(x, tokens)
'''
FORWARD_OF_SEVERAL = '''    def forward(data, routes, sync=True, **how):
        """The inputs and outputs of one forward: routes are (part, how it is recomputed), for each rank or for all."""
        inputs = make_batch(data, rank)
        with ExitStack() as stack:
            for ddp in () if sync else ddps:
                stack.enter_context(ddp.no_sync())
            return inputs[0], run_models(Call(routes[rank % len(routes)], **how), nets, ddps, parts_of, inputs)
'''
CALL = '''class Call(SimpleNamespace):
    def __init__(self, route, returns="tensor", boom=None, inner=False, models=None, together="chain"):
        super().__init__(route=route, returns=returns, boom=boom, inner=inner, models=models, together=together)
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
    if program.models:
        sources += [CALL, *(inspect.getsource(piece).rstrip() for piece in (models.call_of, models.run_models))]
    net = NET + inspect.getsource(models.Net.forward) + "\n" + inspect.getsource(models.Net.run_part)
    main = MAIN.format(
        parts=parts,
        forward=FORWARD_OF_SEVERAL if program.models else FORWARD,
        checking=KEPT if failure.what == "kept" else "",
        gradients=gradients,
        parameters=parameters,
        backend=program.backend,
        ranks=program.ranks,
        seed=program.seed,
        setting=_indented(_setting(program)),
        events=_indented([line for event in program.events for line in (*lines_of(program, event), "")]),
    )
    head = HEAD.format(title=first[:200], where=where, columns=columns, samples=samples)
    return "\n\n".join([head, net.strip("\n"), *sources, main.lstrip("\n")])


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
    wrapping = ["net" if program.models else "model", 'on_unused="ignore"']
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
    if program.models:
        return _setting_of_several(program, f"phalanx.DistributedDataParallel({', '.join(wrapping)})")
    wrap = [f"ddp = phalanx.DistributedDataParallel({', '.join(wrapping)})"]
    if program.hook is not None:
        wrap.append(f"ddp.register_comm_hook(None, hooks.{program.hook})")
    compiled = 'torch.compile(ddp, backend="phalanx", options={"compiler": "aot_eager"})'
    wrap.append(f"run = {compiled if program.mode == 'compiled' else 'ddp'}")
    first = program.optimizer_first or program.mode == "in_backward"
    made = f"optimizer = {_optimizer(program, 'model')}"
    return [made, *wrap] if first else [*wrap, made]


def _setting_of_several(program: Program, wrapping: str) -> list[str]:
    lines = [f"parts_of = {list(program.parts_of)!r}", "nets = [Net(model.parts[n] for n in parts) for parts in parts_of]"]
    lines += ["ddps, optimizers = [], []"]
    common = [f"optimizers.append({_optimizer(program.for_optimizer, 'model')})"] if program.common else []
    lines += common if program.optimizer_first else []
    for number in range(len(program.models)):
        made = [f"optimizers.append({_optimizer(program.of(number), f'nets[{number}]')})"] if not program.common else []
        wrap = [f"net = nets[{number}]", f"ddps.append({wrapping})"]
        if program.hook is not None:
            wrap.append(f"ddps[-1].register_comm_hook(None, hooks.{program.hook})")
        lines += [*made, *wrap] if program.optimizer_first else [*wrap, *made]
    return lines if program.optimizer_first else [*lines, *common]


def _optimizer(program: Program, model: str) -> str:
    name, options = program.optimizer_options
    given = ", ".join(f"{key}={value!r}" for key, value in options.items())
    params = f"{model}.parameters()"
    if program.held:
        params = f"[p for n, part in enumerate({model}.parts) if n not in {program.held!r} for p in part.parameters()]"
    if program.mode == "in_backward":
        trained = f"[p for p in {params} if p.requires_grad]"
        return f"phalanx.optim.apply_in_backward(torch.optim.{name}, {trained}, {given})"
    if not program.has_sharded_state:
        return f"torch.optim.{name}({params}, {given})"
    extra = dict(program.zero)
    if program.is_overlapped:
        extra |= {"overlap_with_ddp": True, "step_in_backward": program.mode == "overlapped"}
    given = ", ".join([f"torch.optim.{name}", *(f"{key}={value!r}" for key, value in extra.items()), given])
    return f"phalanx.ZeroRedundancyOptimizer({params}, {given})"


# -- what is right -----------------------------------------------------------------------------------


def _expected(program: Program) -> tuple[str, str]:
    jobs = [Alone(program, rank) for rank in range(program.ranks)]
    for event in program.events:
        advance(jobs, event, [0.0] * len(jobs[0].params))
    hidden = hidden_grads(program, jobs[0].model)
    gradients = [... if number in hidden else _described(p.grad) for number, p in enumerate(jobs[0].params)]
    return repr(gradients).replace("Ellipsis", "..."), repr([_described(p) for p in jobs[0].params])


def _described(tensor: torch.Tensor | None) -> tuple[float, float] | None:
    if tensor is None:
        return None
    flat = tensor.detach().to_dense().to(torch.complex128).reshape(-1)
    return float(f"{flat.abs().square().sum().sqrt().item():.7g}"), float(f"{(flat.real + flat.imag).sum().item():.7g}")
