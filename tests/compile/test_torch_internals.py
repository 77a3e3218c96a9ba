"""What the backend relies on in dynamo beyond its documentation. If torch moves it, this says so first."""

from __future__ import annotations

import tomllib
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch._C._dynamo import eval_frame

from phalanx.compile import phalanx_backend, register
from phalanx.compile.guard import guard_on_cuts
from phalanx.ddp import frames
from phalanx.ddp.torch_names import TorchNames

pytestmark = pytest.mark.timeout(60)

PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"


def test_the_backend_is_found_by_its_name_through_the_entry_point() -> None:
    from torch._dynamo.backends import registry

    entries = tomllib.loads(PYPROJECT.read_text())["project"]["entry-points"]
    ((name, value),) = entries["torch_dynamo_backends"].items()
    point = EntryPoint(name, value, "torch_dynamo_backends")
    registry._lazy_import()
    with (
        mock.patch.dict(registry._BACKENDS),
        mock.patch.dict(registry._COMPILER_FNS),
        mock.patch("importlib.metadata.entry_points", lambda group: EntryPoints([point] if group == point.group else [])),
    ):
        registry._BACKENDS.pop(name, None)
        registry._COMPILER_FNS.pop(name, None)
        registry._discover_entrypoint_backends.__wrapped__()
        register()
        assert registry.lookup_backend("phalanx") is phalanx_backend
        torch._dynamo.reset()
        double = torch.compile(lambda x: 2 * x, backend="phalanx", options={"compiler": "eager"})
        assert torch.equal(double(torch.ones(2)), torch.full((2,), 2.0))


def test_registering_without_an_installed_package_works_and_twice_is_harmless() -> None:
    from torch._dynamo.backends import registry

    with mock.patch.dict(registry._BACKENDS), mock.patch.dict(registry._COMPILER_FNS):
        registry._BACKENDS.pop("phalanx", None)
        registry._COMPILER_FNS.pop("phalanx", None)
        register()
        register()
        assert registry.lookup_backend("phalanx") is phalanx_backend


@frames.untraced
def hidden(x: torch.Tensor) -> torch.Tensor:
    return beneath(x)


@frames.transparent
def looked_through(x: torch.Tensor) -> torch.Tensor:
    return beneath(x)


def beneath(x: torch.Tensor) -> torch.Tensor:
    return x.sin() + 1


class Keeping:
    def __init__(self) -> None:
        self.names: list[list[str]] = []

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        self.names.append([node.name for node in gm.graph.nodes if node.op.startswith("call")])
        return gm.forward


@pytest.mark.parametrize(("function", "captured"), [(hidden, []), (looked_through, [["sin", "add"]])])
def test_dynamo_leaves_marked_frames_alone(function: Any, captured: list[list[str]]) -> None:
    torch._dynamo.reset()
    keeping = Keeping()

    def outer(x: torch.Tensor) -> torch.Tensor:
        return function(x)

    for _ in range(2):
        assert torch.equal(torch.compile(outer, backend=keeping)(torch.ones(2)), beneath(torch.ones(2)))
    assert keeping.names == captured


def test_marks_survive_a_reset_of_dynamo() -> None:
    torch._dynamo.reset()
    test_dynamo_leaves_marked_frames_alone(hidden, [])


def test_torchs_own_modules_are_recognised() -> None:
    assert frames.hides_from_dynamo(torch.nn.Sequential())
    assert not frames.hides_from_dynamo(TorchNames.__new__(type("Mine", (torch.nn.Module,), {"forward": beneath})))


def test_dynamos_callback_can_be_asked_for() -> None:
    assert eval_frame.get_eval_frame_callback() is None


def test_the_guard_compiles_again_for_another_mark_and_not_for_the_same() -> None:
    torch._dynamo.reset()
    keeping = Keeping()

    def guarded(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        guard_on_cuts()
        return keeping(gm, example_inputs)

    compiled = torch.compile(beneath, backend=guarded)
    for mark in ("one", "two", "one", None, "two"):
        with mock.patch.object(TorchNames, "_active_cut_key", mark):
            compiled(torch.ones(2))
    assert len(keeping.names) == 3


def test_the_guard_is_not_asked_for_outside_of_dynamo() -> None:
    guard_on_cuts()
