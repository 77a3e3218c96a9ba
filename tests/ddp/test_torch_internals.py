"""What the reducer relies on in torch beyond its documentation. If torch moves it, this says so first."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch.autograd import Variable
from torch.utils.checkpoint import checkpoint

from phalanx.ddp.buckets.dense import is_unshared, references
from phalanx.errors import ReductionError
from phalanx.optim.engine import (
    BackwardEnd,
    accumulates,
    call_in_enclosing,
    enclosing_function,
    node_number,
    running_graph,
)
from tests.ddp.by_hand import Breaks, BrokenLayer


def test_the_running_backward_has_an_id_and_a_nested_one_another() -> None:
    current = torch._C._current_graph_task_id
    assert current() == -1
    layer, seen = torch.nn.Linear(2, 2), []
    layer.weight.register_post_accumulate_grad_hook(lambda _: seen.append(current()))
    x = torch.ones(1, 2, requires_grad=True)
    hidden = checkpoint(layer, layer(x), use_reentrant=True)
    hidden.register_hook(lambda _: seen.append(current()))
    hidden.sum().backward()
    outer, nested, outer_again = seen
    assert outer == outer_again != nested and min(seen) >= 0


def test_the_graph_of_a_backward_is_known_while_it_runs_and_when_it_has_raised() -> None:
    layer, other, seen = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2), []

    class End(BackwardEnd):
        def raised(self) -> None:
            seen.append(running_graph())

    def look(_grad: torch.Tensor) -> None:
        seen.append(running_graph())
        End(lambda: None).queue()

    hidden = layer(torch.ones(1, 2))
    broken = Breaks.apply(hidden)
    broken.register_hook(look)
    elsewhere = other(torch.ones(1, 2))
    with pytest.raises(BrokenLayer):
        torch.autograd.backward([broken.sum(), layer(torch.ones(1, 2)).sum()])
    assert running_graph() is None and len(seen) == 2
    for graph in seen:
        assert graph is not None and not graph.nests
        assert graph.leaves == {id(layer.weight), id(layer.bias)}
        assert {node_number(hidden.grad_fn), node_number(broken.grad_fn)} <= graph.numbers
        assert node_number(elsewhere.grad_fn) not in graph.numbers


def test_callbacks_queued_in_backward_run_in_order_when_the_outermost_backward_ends() -> None:
    layer, log = torch.nn.Linear(2, 2), []

    def start(_: torch.Tensor) -> None:
        Variable._execution_engine.queue_callback(lambda: log.append("first"))
        Variable._execution_engine.queue_callback(lambda: log.append("second"))

    layer.weight.register_post_accumulate_grad_hook(lambda _: log.append("gradient"))
    output = checkpoint(layer, torch.ones(1, 2, requires_grad=True), use_reentrant=True)
    output.register_hook(start)
    output.sum().backward()
    assert log == ["gradient", "first", "second"]


def test_hooks_on_parameters_are_invisible_to_the_garbage_collector() -> None:
    """The reason for the reducer's weak references; harmless should it ever change."""
    import gc
    import weakref

    class Holder:
        pass

    def make() -> weakref.ref[Holder]:
        param, holder = torch.nn.Parameter(torch.ones(1)), Holder()
        holder.param = param  # type: ignore[attr-defined]
        reference = weakref.ref(holder)
        param.register_post_accumulate_grad_hook(lambda _: reference() and None)
        return reference

    held = make()
    gc.collect()
    assert held() is None, "a weak reference from the hook lets the cycle go"


# -- optim/engine.py: how a pass ends ----------------------------------------------------------------


class _End(BackwardEnd):
    """Writes down how the pass ended."""

    __slots__ = ("_log",)

    def __init__(self, log: list[Any]) -> None:
        super().__init__(lambda: log.append("ended"))
        self._log = log

    def raised(self) -> None:
        self._log.append("raised")


class _Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("on purpose")


def _raise_in_hook(_: torch.Tensor) -> None:
    raise ArithmeticError("on purpose")


@pytest.mark.parametrize("where", ["function", "hook", "parameter", "nested", "callback"])
def test_the_engine_drops_a_callback_uncalled_before_the_exception_reaches_the_caller(where: str) -> None:
    layers, log = [torch.nn.Linear(2, 2) for _ in range(3)], []
    x = layers[0](torch.ones(1, 2, requires_grad=True))
    if where == "function":
        x = _Raises.apply(x)
    elif where == "hook":
        x.register_hook(_raise_in_hook)
    elif where == "nested":
        x = checkpoint(lambda y: _Raises.apply(layers[1](y)), x, use_reentrant=True)
    elif where == "parameter":
        layers[2].bias.register_post_accumulate_grad_hook(_raise_in_hook)

    def start(_: torch.Tensor) -> None:
        if where == "callback":
            Variable._execution_engine.queue_callback(lambda: _raise_in_hook(x))
        _End(log).queue()

    output = layers[2](layers[1](x))
    output.register_hook(start)
    with pytest.raises(ArithmeticError):
        try:
            output.sum().backward()
        finally:
            log.append("the caller")
    assert log == ["raised", "the caller"], (
        "optim/engine.py: BackwardEnd learns from its destruction that a backward raised. If the engine keeps callbacks for "
        "longer, the pass is not given up in time, and zero_grad() after the exception does not reach gradients in buckets"
    )
    # Torch keeps the nodes of a backward that a hook has ended until the next one.
    torch.ones(1, requires_grad=True).sum().backward()


def test_a_callback_that_was_called_is_dropped_without_another_word() -> None:
    log: list[str] = []
    x = torch.ones(1, requires_grad=True)
    output = x * 2
    output.register_hook(lambda _: _End(log).queue())
    output.backward()
    assert log == ["ended"]


# -- optim/engine.py: which pass it is ---------------------------------------------------------------


def _codes() -> list[Any]:
    """The code of all frames on the stack, innermost first."""
    found, frame = [], sys._getframe(1)
    while frame is not None:
        found.append(frame.f_code)
        frame = frame.f_back
    return found


def test_a_backward_under_compiled_autograd_is_refused_since_it_drops_callbacks() -> None:
    from torch._dynamo import compiled_autograd, disable

    layer = torch.nn.Linear(2, 2)

    @disable
    def queue(_param: torch.Tensor) -> None:
        BackwardEnd(lambda: None).queue()

    layer.weight.register_post_accumulate_grad_hook(queue)
    loss = layer(torch.ones(1, 2)).sum()
    with (
        compiled_autograd._enable(torch.compile(backend="eager")),
        pytest.raises(ReductionError, match="compiled autograd"),
    ):
        loss.backward()


def test_frames_of_torch_are_on_the_stack_while_the_engine_runs() -> None:
    stacks: list[list[Any]] = []
    x = torch.ones(1, requires_grad=True)
    output = x * 2
    output.register_hook(lambda _: stacks.append(_codes()))
    output.backward(retain_graph=True)
    torch.autograd.backward([output], retain_graph=True)
    torch.autograd.grad(output, x)
    engine = torch.autograd.graph._engine_run_backward.__code__
    backward, grad = torch.autograd.backward.__code__, torch.autograd.grad.__code__
    reason = "optim/engine.py reads from these frames whether a pass accumulates (accumulates) and whether it is nested"
    for stack, entry in zip(stacks, (backward, backward, grad), strict=True):
        assert stack.count(engine) == 1 and stack.count(entry) == 1, reason
        assert stack.index(engine) < stack.index(entry), reason


def test_the_entry_of_backward_has_its_inputs_in_a_local_of_that_name() -> None:
    found: list[bool] = []
    x = torch.ones(2, requires_grad=True)
    output = (x * 2).sum()
    output.register_hook(lambda _: found.append(accumulates()))
    output.backward(retain_graph=True)
    torch.autograd.backward(output, retain_graph=True)
    output.backward(retain_graph=True, inputs=[x])
    torch.autograd.grad(output, x)
    assert found == [True, True, False, False], (
        "optim/engine.py: accumulates() tells a backward for all leaves, which ranks owe each other, from one for chosen "
        "inputs and from autograd.grad, by the frame of torch.autograd.backward and its local `inputs`"
    )


class _Nests(torch.autograd.Function):
    """Runs a backward inside its own, as reentrant checkpointing does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, look: Any) -> torch.Tensor:
        ctx.look = look
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        with torch.enable_grad():
            output = torch.ones(1, requires_grad=True) * 3
        output.register_hook(lambda _: ctx.look())
        output.backward()
        return grads[0], None


def test_the_node_that_runs_a_nested_backward_is_found_on_the_stack() -> None:
    found: list[Any] = []
    x = torch.ones(1, requires_grad=True) * 1
    inside = _Nests.apply(x, lambda: found.append(enclosing_function()))
    outside = inside * 2
    outside.register_hook(lambda _: found.append(enclosing_function()))
    outside.backward()
    assert found == [None, inside.grad_fn], (
        "optim/engine.py: enclosing_function() finds the outermost pass of a nested one by the frame of "
        "BackwardCFunction.apply, whose local `self` is the node"
    )


def test_the_outer_pass_goes_on_to_a_node_whose_prehook_was_registered_meanwhile() -> None:
    log: list[Any] = []
    current = torch._C._current_graph_task_id
    x = torch.ones(1, requires_grad=True) * 1

    def look() -> None:
        log.append(current())
        call_in_enclosing(enclosing_function(), lambda: log.append(current()))
        call_in_enclosing(enclosing_function(), queue)

    def queue() -> None:
        _End(log).queue()

    outside = _Nests.apply(x, look) * 2
    outside.register_hook(lambda _: log.append(current()))
    outside.backward()
    outer, nested, outer_again, last = log
    assert outer == outer_again != nested and last == "ended", (
        "optim/engine.py: call_in_enclosing() reaches the outer pass from a nested one by a prehook on the nodes that "
        "follow, and queue_callback() there belongs to the outer pass"
    )


# -- ddp/buckets/bucket.py: who holds a gradient ---------------------------------------------------

_MEMORY = "ddp/buckets/bucket.py frees a gradient that nobody else holds, as these counts say"


def test_a_tensor_that_only_its_list_holds_is_told_from_one_that_is_shared() -> None:
    held: list[torch.Tensor | None] = [torch.zeros(4)]
    assert is_unshared(held, 0), _MEMORY

    another = held[0]
    assert not is_unshared(held, 0), f"{_MEMORY}: a reference in Python"
    del another
    view = held[0][1:]  # type: ignore[index]
    assert not is_unshared(held, 0), f"{_MEMORY}: a view of its memory"
    del view
    storage = held[0].untyped_storage()  # type: ignore[union-attr]
    assert references(held[0]) >= 2 and not is_unshared(held, 0), f"{_MEMORY}: its storage"  # type: ignore[arg-type]
    del storage
    assert is_unshared(held, 0), _MEMORY


def test_a_tensor_that_a_graph_has_saved_counts_as_held() -> None:
    held: list[torch.Tensor | None] = [torch.ones(4)]
    graph = torch.ones(4, requires_grad=True) * held[0]
    assert not is_unshared(held, 0), f"{_MEMORY}: Tensor._use_count() counts holders in C++"
    del graph
    assert is_unshared(held, 0), _MEMORY


def test_a_tensor_that_is_a_gradient_counts_as_held() -> None:
    held: list[torch.Tensor | None] = [torch.ones(4)]
    param = torch.nn.Parameter(torch.ones(4))
    param.grad = held[0]
    assert not is_unshared(held, 0), f"{_MEMORY}: it is asked only once `.grad` is None"
    param.grad = None
    assert is_unshared(held, 0), _MEMORY


def test_subclasses_and_parts_of_a_graph_are_never_ours() -> None:
    class Special(torch.Tensor):
        pass

    assert not is_unshared([torch.ones(2).as_subclass(Special)], 0)
    assert not is_unshared([torch.ones(2, requires_grad=True)], 0)
    assert not is_unshared([torch.ones(2, requires_grad=True) * 2], 0)
