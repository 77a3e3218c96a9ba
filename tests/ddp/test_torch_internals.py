"""What the reducer relies on in torch beyond its documentation. If torch moves it, this says so first."""

from __future__ import annotations

import torch
from torch.autograd import Variable
from torch.utils.checkpoint import checkpoint


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
