"""Prints a failing program as one file that needs torch and phalanx and nothing of the tests.

The file is put together from the very classes that ran: the parts and events that the program uses, the job, and what the
reference expects after the last event, as numbers.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from tests.fuzz import events, job, models, program
from tests.fuzz.program import Program
from tests.fuzz.reference import Alone, advance
from tests.fuzz.runner import Failure

HEAD = '''"""{title}

{text}
Run it with: python FILE"""
import dataclasses
import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.utils.checkpoint import checkpoint

import phalanx
from phalanx.comm import hooks

Route = tuple
Run = Iterator
'''

TAIL = '''
PROGRAM = {program}

# (norm, sum) of each gradient and of each parameter after the last event, by hand; None where nothing is expected.
GRADIENTS = {gradients}
PARAMETERS = {parameters}


def describe(tensor):
    if type(tensor) not in (torch.Tensor, nn.Parameter):
        return None
    wide = tensor.detach().to_dense().to(torch.complex128).reshape(-1)
    return (round(wide.abs().square().sum().sqrt().item(), 7), round((wide.real + wide.imag).sum().item(), 7))


def main(rank, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group(PROGRAM.backend, rank=rank, world_size=PROGRAM.ranks)
    torch.manual_seed(PROGRAM.seed)
    job = Wrapped(PROGRAM, rank)
    for event in PROGRAM.events:
        for _ in event.run(job):
            pass
        job.check_kept()
    for number, (name, param) in enumerate(job.model.named_parameters()):
        print(f"rank {{rank}} {{name}}: gradient {{describe(param.grad)}}, expected {{GRADIENTS[number]}}; "
              f"parameter {{describe(param)}}, expected {{PARAMETERS[number]}}", flush=True)
    print(f"rank {{rank}} {{job.broken or 'kept nothing that changed'}}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(main, (port,), PROGRAM.ranks)
'''


def script_of(failure: Failure) -> str:
    """The failing program as a file."""
    failing = failure.program
    if failure.at is not None and failure.at >= 0:
        failing = failing.but(events=failing.events[: failure.at + 1])
    pieces = [program.Value, program.Part, program.Call, program.Program, *_parts_of(failing), models.Boom, models.Net]
    pieces += [events.loss_of, *_events_of(failing), job.Wrapped]
    constants = [f"OPTIMIZERS = {program.OPTIMIZERS!r}", f"COLUMNS = {models.COLUMNS}", f"SAMPLES = {models.SAMPLES}"]
    constants.append(f"EVERY_RANK = {events.EVERY_RANK}")
    sources = [inspect.getsource(piece) for piece in (models.fold, models.make_model, models.make_batch, *pieces)]
    gradients, parameters = _expected(failing)
    first = failure.text.split("\n")[0]
    where = f"Seed {failing.seed}, {failing.ranks} ranks, {failing.backend}."
    head = HEAD.format(title=f"{failure.what}: {first}"[:200], text=where)
    tail = TAIL.format(program=_laid_out(failing), gradients=gradients, parameters=parameters)
    # Annotations that name other classes of the file would be looked up before those exist.
    body = "\n\n".join([*constants, *sources])
    return "from __future__ import annotations\n".join(["", head.lstrip()]) if not body else _joined(head, body, tail)


def _joined(head: str, body: str, tail: str) -> str:
    docstring, rest = head.split('FILE"""\n', 1)
    return f'{docstring}FILE"""\nfrom __future__ import annotations\n\n{rest}\n{body}\n{tail}'


def _parts_of(failing: Program) -> list[Any]:
    """The classes of the program's parts, behind the classes that they are made from."""
    found: dict[Any, None] = {}
    for part in failing.parts:
        for ancestor in reversed(getattr(models, part.kind).__mro__):
            if ancestor.__module__ == models.__name__:
                found[ancestor] = None
    return list(found)


def _events_of(failing: Program) -> list[Any]:
    found: dict[Any, None] = {}
    for event in failing.events:
        for ancestor in reversed(type(event).__mro__):
            if ancestor.__module__ == events.__name__:
                found[ancestor] = None
    return list(found)


def _laid_out(failing: Program) -> str:
    """The program's `repr` with one event a line."""
    events = "(\n" + "".join(f"        {event!r},\n" for event in failing.events) + "    )"
    return repr(failing).replace(f"events={failing.events!r}", f"events={events}")


def _expected(failing: Program) -> tuple[list[Any], list[Any]]:
    jobs = [Alone(failing, rank) for rank in range(failing.ranks)]
    for event in failing.events:
        advance(jobs, event, [0.0] * len(jobs[0].params))
    gradients = [None if failing.is_overlapped else _described(p.grad) for p in jobs[0].params]
    return gradients, [_described(p) for p in jobs[0].params]


def _described(tensor: torch.Tensor | None) -> tuple[float, float] | None:
    if tensor is None:
        return None
    wide = tensor.detach().to_dense().to(torch.complex128).reshape(-1)
    return round(wide.abs().square().sum().sqrt().item(), 7), round((wide.real + wide.imag).sum().item(), 7)
