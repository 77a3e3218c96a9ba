"""What is put into programs after they were drawn, by chances of its own: all else of a seed stays what it was."""

from __future__ import annotations

import random

from tests.fuzz import events as ev
from tests.fuzz.ledger import Ledger
from tests.fuzz.program import HAVE_FUSED, LINEAR_OPTIMIZERS, Program

# Gradients with more digits than their parameters have. With fewer, a judge would have to know where they were rounded.
WIDER_DTYPE = {"bfloat16": "float32", "float16": "float32", "float32": "float64"}
DENSE = ("Wide", "Biased", "Words", "Tied")


def with_additions(program: Program) -> Program:
    """The program, or the same one with dtypes of gradients chosen apart, gradients that are moved, a fused optimizer."""
    program = _with_grad_dtypes(program, random.Random(f"grad_dtype {program.seed}"))
    program = _with_moves(program, random.Random(f"move {program.seed}"))
    return _with_fused_optimizer(program, random.Random(f"fused {program.seed}"))


def _is_usual(program: Program) -> bool:
    """Every rank holds whole gradients, in dtypes that nobody else has chosen, and no promise of later ones was made."""
    asked = program.mixed or program.delayed or program.static or program.skip_unused
    return set(program.modes) <= {"plain", "zero"} and not asked and program.hook in (None, "allreduce_hook")


def _has(program: Program, *kinds: type) -> bool:
    return any(isinstance(event, kinds) for event in program.events)


def _gaps(program: Program) -> list[int]:
    """Between which events every rank has the same gradients, and no step is under way."""
    ledgers = [Ledger(program, model) for model in range(len(program.parts_of))]
    found = []
    for place, event in enumerate(program.events):
        for ledger in ledgers:
            ledger.see(event)
        if isinstance(event, ev.Pass | ev.Step) and not any(ledger.is_local for ledger in ledgers):
            found.append(place + 1)
    return found


def _after_steps(program: Program) -> list[int]:
    return [place for place in _gaps(program) if isinstance(program.events[place - 1], ev.Step)]


def _inserted(program: Program, place: int, event: object) -> Program:
    return program.but(events=(*program.events[:place], event, *program.events[place:]))


def _with_grad_dtypes(program: Program, chance: random.Random) -> Program:
    fit = [number for number, part in enumerate(program.parts) if part.dtype in WIDER_DTYPE and part.kind in DENSE]
    # A state that is loaded is cast to the dtype of its parameter, and gradients that are placed have it.
    others = _has(program, ev.Dtype, ev.Retype, ev.Place, ev.Reload, ev.Keep, ev.Poison)
    if chance.random() > 0.4 or not fit or others or not _is_usual(program) or program.optimizer not in LINEAR_OPTIMIZERS:
        return program
    for part in chance.sample(fit, chance.randint(1, len(fit))):
        own = program.parts[part].dtype
        at = chance.choice([0, *_after_steps(program)])
        program = _inserted(program, at, ev.GradDtype(part, WIDER_DTYPE[own]))
        later = [place for place in _after_steps(program) if place > at]
        if later and chance.random() < 0.3:
            program = _inserted(program, chance.choice(later), ev.GradDtype(part, own))
    return program


def _with_moves(program: Program, chance: random.Random) -> Program:
    fit = [number for number, part in enumerate(program.parts) if part.kind in DENSE]
    frees = any(dict(zero).get("stage") == 2 for zero in (program.zero, *(model.zero for model in program.models)))
    # What is kept, or lies where the user put it, is added to by whoever the gradient was moved to.
    others = _has(program, ev.Dtype, ev.Retype, ev.Place, ev.Keep, ev.Freeze, ev.Join, ev.GradDtype)
    places = _gaps(program)
    if chance.random() > 0.4 or len(fit) < 2 or others or frees or not places or not _is_usual(program):
        return program
    source, target = chance.sample(fit, 2)
    # Of the same shapes, as the layers of most models are.
    parts = [program.parts[source] if number == target else part for number, part in enumerate(program.parts)]
    program = program.but(parts=tuple(parts))
    for _ in range(chance.choice((1, 1, 2))):
        move = ev.Move(source, target, chance.choice(("detached", "detached", "swapped")))
        program = _inserted(program, chance.choice(_gaps(program)), move)
    return program


def _with_fused_optimizer(program: Program, chance: random.Random) -> Program:
    # These kernels take dense gradients of the parameters' dtype; what users place lies as they like.
    refused = any(part.kind in ("SparseWords", "Unannounced") or part.dtype == "complex64" for part in program.parts)
    refused = refused or program.optimizer not in HAVE_FUSED or _has(program, ev.Place, ev.GradDtype, ev.Dtype)
    # Torch's SGD reads momentum that it has not written yet.
    narrow = any(part.dtype in ("bfloat16", "float16") for part in program.parts)
    refused = refused or (program.optimizer == "momentum" and narrow)
    return program if refused or chance.random() > 0.3 else program.but(fused=True)
