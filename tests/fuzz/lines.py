"""The lines that a user would have written for an event of a program; `script.py` makes a file of them.

One model is `model` in `ddp` with `optimizer`; several are `nets`, `ddps` and `optimizers`, and `model` has all their parts.
"""

from __future__ import annotations

from typing import Any

from tests.fuzz import events
from tests.fuzz.program import Program


def lines_of(program: Program, event: Any) -> list[str]:
    """The lines of one event."""
    if isinstance(event, events.Join):
        return _join_lines(program, event)
    if isinstance(event, events.Pass):
        return _pass_lines(program, event)
    return _other_lines(program, event)


class Expression(str):
    """Stands in the script as it is, to be computed there."""

    def __repr__(self) -> str:
        return str(self)


def _forward(event: Any, data: int | None = None, **how: Any) -> str:
    given = [repr(event.data if data is None else data), repr(event.routes)]
    given += ["sync=False"] if not getattr(event, "sync", True) else []
    usual = {"models": None, "together": "chain"}
    how |= {name: value for name in usual if (value := getattr(event, name, usual[name])) != usual[name] and name not in how}
    given += [f"{name}={value!r}" for name, value in how.items()]
    return f"forward({', '.join(given)})"


def _backward(program: Program, event: Any, loss: str, retain: bool = False) -> list[str]:
    line = f"{loss}.backward({'retain_graph=True' if retain else ''})"
    if event.weights is None and event.sync:
        return [line]
    context = "no_sync()" if not event.sync else f"weight({event.weights!r}[rank % {len(event.weights)}])"
    if not program.models:
        return [f"with ddp.{context}:", f"    {line}"]
    entering = f"        stack.enter_context(ddp.{context})"
    return ["with ExitStack() as stack:", "    for ddp in ddps:", entering, f"    {line}"]


def _pass_lines(program: Program, event: Any) -> list[str]:
    match event:
        case events.TwoForwards(each=each):
            lines = [f"first = loss_of({_forward(event)}[1])", f"second = loss_of({_forward(event, event.data + 500)}[1])"]
            if each:
                return [*lines, *_backward(program, event, "first"), *_backward(program, event, "second")]
            return [*lines, *_backward(program, event, "(first + second)")]
        case events.Twice():
            lines = [f"loss = loss_of({_forward(event)}[1])"]
            return [*lines, *_backward(program, event, "loss", retain=True), *_backward(program, event, "loss")]
        case events.Partial(rest=rest):
            lines = [f"out = {_forward(event, returns='both')}[1]"]
            lines += _backward(program, event, 'loss_of(out["half"][0])', retain=rest)
            return [*lines, *(_backward(program, event, 'loss_of(out["all"])') if rest else [])]
        case events.Penalty(alone=alone):
            lines = [f"x, out = {_forward(event)}", "(grad,) = torch.autograd.grad(loss_of(out), x, create_graph=True)"]
            lines.append("penalty = (grad.square().sum(1) - 1).square().sum()")
            return [*lines, *_backward(program, event, "penalty" if alone else "(loss_of(out) + penalty)")]
        case events.Hidden(where=where):
            seen = {"object": "out", "beside": "out[0]", "aux": "model.aux"}[where]
            return [f"out = {_forward(event, returns=where)}[1]", *_backward(program, event, f"loss_of({seen})")]
        case events.Fail(at=at, how=how, apart=apart):
            boom = Expression(f"({at} + rank) % {len(event.routes[0])}") if apart else at
            lines = [f"loss = loss_of({_forward(event, boom=boom)}[1])", "try:", "    loss.backward()"]
            lines += ["except ArithmeticError:", "    pass"]
            return [*lines, f"model.zero_grad(set_to_none={how == 'none'})"]
        case events.Poison():
            return _poison_lines(event)
        case events.Apart():
            return _apart_lines(program, event)
        case events.Closure():
            return _closure_lines(program, event)
        case events.Inner(alone=alone):
            return [f"x, out = {_forward(event, inner=True)}", *([] if alone else _backward(program, event, "loss_of(out)"))]
    lines = [f"x, out = {_forward(event)}", "loss = loss_of(out)"]
    if event.peek is not None:
        lines.append(f"if {event.peek} in ({events.EVERY_RANK}, rank):")
        lines.append("    torch.autograd.grad(loss, x, retain_graph=True)")
    return [*lines, *_backward(program, event, "loss")]


def _apart_lines(program: Program, event: Any) -> list[str]:
    order = event.reached(len(program.parts_of))
    lines = []
    for model in order:
        lines.append(f"loss_{model} = loss_of({_forward(event, event.data + 100 * model, models=(model,))}[1])")
    for model in reversed(order) if event.reverse else order:
        lines += _backward(program, event, f"loss_{model}")
    return lines


def _closure_lines(program: Program, event: Any) -> list[str]:
    rate = _rate_lines(program, event.rate)
    lines = ["optimizer.zero_grad()", *([] if event.late else rate), f"loss = loss_of({_forward(event)}[1])"]
    lines += [*_backward(program, event, "loss"), *(rate if event.late else []), "return loss"]
    return ["def closure():", *(f"    {line}" for line in lines), "", "optimizer.step(closure)"]


def _rate_lines(program: Program, factor: float) -> list[str]:
    if program.models:
        return ["for group in [g for one in optimizers for g in one.param_groups]:", f'    group["lr"] *= {factor}']
    return ["for group in optimizer.param_groups:", f'    group["lr"] *= {factor}']


def _each(program: Program, what: str, models: tuple[int, ...] | None = None) -> tuple[list[str], str, str]:
    """A loop over the models that an event names, if there are several: its lines, its indent, its variable."""
    if not program.models:
        return [], "", what
    chosen = f"{what}s" if models is None else "[" + ", ".join(f"{what}s[{number}]" for number in models) + "]"
    return [f"for {what} in {chosen}:"], "    ", what


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
        case events.Zero(how=how, via=via, models=which):
            own = "net" if program.models else "model"
            who = {"module": own, "wrapper": "ddp", "optimizer": own if in_backward else "optimizer"}[via]
            loop, indent, one = _each(program, who, which)
            return [*loop, f"{indent}{one}.zero_grad(set_to_none={how == 'none'})"]
        case events.Step(clip=clip, models=which):
            return _step_lines(program, clip, which)
        case events.Look(mode=mode, rank=rank):
            return _look_lines(event, mode, rank)
        case events.Keep():
            named = "for name, p in model.named_parameters() if type(p.grad) is torch.Tensor and not p.grad.is_sparse"
            return [f"kept += [(name, p.grad, p.grad.clone()) {named}]"]
        case events.Rate(factor=factor):
            return _rate_lines(program, factor)
        case events.Group(part=part, rate=rate):
            return _group_lines(program, part, rate)
        case events.Dtype(dtype=dtype, zeroed=zeroed):
            return [*(["model.zero_grad()"] if zeroed else []), f"model.to(torch.{dtype})"]
        case events.Freeze(part=part, frozen=frozen):
            return [f"model.parts[{part}].requires_grad_({not frozen})"]
        case events.GradDtype(part=part, dtype=dtype):
            return [f"for p in model.parts[{part}].parameters():", f"    p.grad, p.grad_dtype = None, torch.{dtype}"]
        case events.Move():
            return _move_lines(event)
        case events.Retype(how=how):
            return ["model.double().float()" if how == "double" else f"model.to(memory_format=torch.{how})"]
        case events.Reload(what=what):
            return _reload_lines(program, what)
    return _listen_lines(event) if isinstance(event, events.Listen) else _place_lines(event)


def _step_lines(program: Program, clip: float | None, which: tuple[int, ...] | None) -> list[str]:
    lines = []
    for number in range(program.num_optimizers) if which is None else which:
        mine, one = program.of(number), f"optimizers[{number}]" if program.models else "optimizer"
        if clip is not None and mine.has_sharded_state:
            lines.append(f"{one}.clip_grad_norm_({clip})")
        elif clip is not None:
            params = f"[p for group in {one}.param_groups for p in group['params']]"
            lines.append(f"torch.nn.utils.clip_grad_norm_({params}, {clip})")
        lines += [] if mine.mode == "in_backward" else [f"{one}.step()"]
    return lines


def _group_lines(program: Program, part: int, rate: float) -> list[str]:
    owner = 0 if program.common else next((number for number, parts in enumerate(program.parts_of) if part in parts), 0)
    one = f"optimizers[{owner}]" if program.models else "optimizer"
    params = f"list(model.parts[{part}].parameters())"
    if part < 0:
        params = "[nn.Parameter(torch.ones(3), requires_grad=False)]"
    return [f'{one}.add_param_group({{"params": {params}, "lr": {rate}, "weight_decay": 0.02}})']


def _move_lines(event: Any) -> list[str]:
    pairs = f"zip(model.parts[{event.source}].parameters(), model.parts[{event.target}].parameters())"
    if event.how == "swapped":
        return [f"for p, q in {pairs}:", "    p.grad, q.grad = q.grad, p.grad"]
    return [f"for p, q in {pairs}:", "    if p.grad is not None:", "        q.grad, p.grad = p.grad.detach(), None"]


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
        return ["model.load_state_dict(start)" if program.models else "ddp.load_state_dict(start)"]
    lines = []
    for number in range(program.num_optimizers):
        one = f"optimizers[{number}]" if program.models else "optimizer"
        if not program.of(number).has_sharded_state:
            lines.append(f"{one}.load_state_dict({one}.state_dict())")
            continue
        lines += [f"for to in range({program.ranks}):", f"    {one}.consolidate_state_dict(to=to)", "    if rank == to:"]
        lines += [f"        state = {one}.state_dict()", f"{one}.load_state_dict(state)"]
    return lines


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
