"""A backward that raises leaves the rest of its graph with autograd, which is let go of when the program goes on."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from phalanx.comm.memory.left_over import backward_raised, drop_left_over


def _raise_in_backward() -> list[weakref.ref[nn.Parameter]]:
    """Three layers, of which the hook of the last one raises; what is left of them."""
    layers = [nn.Parameter(torch.randn(4, 4)) for _ in range(3)]

    def fail(_: torch.Tensor) -> None:
        raise ZeroDivisionError("in a hook")

    layers[2].register_post_accumulate_grad_hook(fail)
    x = torch.ones(2, 4)
    for layer in layers:
        x = (x @ layer).relu()
    with pytest.raises(ZeroDivisionError):
        x.sum().backward()
    return [weakref.ref(layer) for layer in layers]


def _alive(left: list[weakref.ref[nn.Parameter]]) -> int:
    gc.collect()
    return sum(one() is not None for one in left)


def test_what_a_raised_backward_leaves_is_let_go_of() -> None:
    drop_left_over()  # of a backward that another test of this process has made raise
    left = _raise_in_backward()
    # Should this fail one day, torch lets go by itself, and `left_over` may go too.
    assert _alive(left) == 2
    drop_left_over()  # nobody has said that a backward raised
    assert _alive(left) == 2
    backward_raised()
    with torch.no_grad():
        drop_left_over()
    assert _alive(left) == 0


def test_inside_of_a_backward_nothing_is_done_yet() -> None:
    seen: list[str] = []
    backward_raised()
    outer = torch.zeros((), requires_grad=True)
    outer.register_hook(lambda _: seen.append(str(drop_left_over())))
    outer.clone().backward()
    left = _raise_in_backward()
    drop_left_over()
    assert seen == ["None"] and _alive(left) == 0
