"""What cannot be compiled, or not be cut, is said, and the rest goes on."""

from __future__ import annotations

import logging
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import phalanx
from phalanx.compile import phalanx_backend
from phalanx.errors import ConfigError
from tests.cluster import run_ranks
from tests.compile import zoo
from tests.compile.training import check_one_plan, cut, eager, train, wrap

pytestmark = pytest.mark.timeout(60)


class Failing:
    """An inner compiler that fails for graphs with an input whose name holds `bad`."""

    def __init__(self, bad: str) -> None:
        self.bad = bad
        self.calls = 0

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        from torch._dynamo import lookup_backend

        self.calls += 1
        if any(self.bad in node.name for node in gm.graph.find_nodes(op="placeholder")):
            raise ValueError(f"cannot compile {self.bad}\nand more")
        return lookup_backend("aot_eager")(gm, example_inputs)


def train_with_failure(rank: int, world: int) -> dict[str, Any]:
    torch._dynamo.reset()
    plain = wrap("mlp")
    reference = train(rank, plain, eager(plain))
    wrapper = wrap("mlp")
    failing = Failing("layers_modules_2_")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compiled = train(rank, wrapper, cut(wrapper, failing))
    explanation = check_one_plan(wrapper)
    return {
        "equal": compiled.equals(reference),
        "calls": failing.calls,
        "warnings": [str(each.message) for each in caught if "runs eagerly" in str(each.message)],
        "errors": [piece.error for piece in explanation.pieces],
        "early": compiled.launched_early,
        "table": str(explanation),
    }


def test_a_failing_piece_runs_eagerly_with_a_warning_that_names_it() -> None:
    for found in run_ranks(2, train_with_failure):
        assert found["equal"] and found["calls"] == 4
        (warning,) = found["warnings"]
        assert "piece 1" in warning and "ValueError: cannot compile layers_modules_2_" in warning
        assert found["errors"] == ["", "ValueError: cannot compile layers_modules_2_", "", ""]
        assert found["early"] >= 2
        assert "no: ValueError" in found["table"]


def whole_fails(rank: int, world: int) -> str:
    torch._dynamo.reset()
    wrapper = wrap("mlp", bucket_cap_mb=100)
    with pytest.raises(Exception, match="cannot compile layers") as caught:
        cut(wrapper, Failing("layers"))(zoo.batch(0, rank)[0])
    return type(caught.value).__name__


def test_an_error_in_a_graph_that_is_not_cut_is_dynamos_as_without_us() -> None:
    assert run_ranks(1, whole_fails) == ["BackendCompilerFailed"]


def fullgraph(rank: int, world: int) -> list[Any]:
    torch._dynamo.reset()
    good, bad = wrap("mlp"), wrap("broken")
    x = zoo.batch(0, rank)[0]
    found: list[Any] = [torch.equal(cut(good, fullgraph=True)(x), good(x))]
    try:
        cut(bad, fullgraph=True)(x)
        found.append("no error")
    except torch._dynamo.exc.Unsupported as error:
        found.append(str(error))
    inside = wrap("mlp", lambda model: cut(model, fullgraph=True))
    found.append(torch.equal(inside(x), good(x)))
    found += [wrapper.reducer.choose_buckets is not None for wrapper in (good, inside)]
    return found


def test_fullgraph_keeps_its_meaning() -> None:
    inside_equal, error, outside_equal, *captured = run_ranks(1, fullgraph)[0]
    assert inside_equal and outside_equal
    assert "graph_break" in error
    assert captured == [True, True]


class Gathered(logging.Handler):
    """Holds what the compiler says."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def __enter__(self) -> list[str]:
        logging.getLogger("phalanx.compile").addHandler(self)
        return self.lines

    def __exit__(self, *_: object) -> None:
        logging.getLogger("phalanx.compile").removeHandler(self)


class Loop(nn.Module):
    """Dynamo gives a frame up that breaks inside of a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
            torch._dynamo.graph_break()
        return x


def say(rank: int, world: int) -> dict[str, list[str]]:
    said = {}
    models = {"mutating": zoo.make("mutating"), "loop": Loop(), "mlp": zoo.make("mlp")}
    for name, model in models.items():
        torch._dynamo.reset()
        wrapper = phalanx.DistributedDataParallel(model, bucket_cap_mb=0.0015)
        with Gathered() as lines:
            for step in range(2):
                cut(wrapper)(zoo.batch(step, rank)[0]).sum().backward()
        said[name] = lines
    return said


def test_what_is_not_cut_or_not_compiled_is_said_once() -> None:
    said = run_ranks(1, say)[0]
    (uncut,) = said["mutating"]
    assert uncut.startswith("graph ") and "not cut" in uncut and "changes in place" in uncut
    (uncompiled,) = said["loop"]
    assert uncompiled.startswith("nothing of Loop was compiled")
    assert said["mlp"] == []


def partly(rank: int, world: int) -> list[str]:
    torch._dynamo.reset()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.tail(self.first(x).relu())

        @torch._dynamo.disable
        def tail(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(x)

    wrapper = phalanx.DistributedDataParallel(Model(), bucket_cap_mb=0.0001)
    with Gathered() as lines:
        for step in range(3):
            cut(wrapper)(zoo.batch(step, rank)[0]).sum().backward()
    check_one_plan(wrapper)
    return lines


def test_parameters_outside_of_the_compiled_graphs_are_counted() -> None:
    assert run_ranks(1, partly) == [["2 of 4 parameters are used outside of the compiled graphs, first 'second.bias'"]]


@pytest.mark.parametrize("compiler", ["phalanx", phalanx_backend, 3])
def test_a_compiler_that_cannot_compile_pieces_is_refused(compiler: Any) -> None:
    with pytest.raises(Exception, match=r'options\["compiler"\]') as caught:
        cut(nn.Linear(2, 2), compiler)(torch.ones(2, 2))
    assert isinstance(caught.value, ConfigError) or isinstance(caught.value.inner_exception, ConfigError)


def with_options(rank: int, world: int, options: dict[str, Any]) -> str:
    torch._dynamo.reset()
    wrapper = phalanx.DistributedDataParallel(zoo.make("mlp"), bucket_cap_mb=0.0015)
    with pytest.raises(Exception) as caught:
        torch.compile(wrapper, backend=phalanx_backend, options=options)(zoo.batch(0, rank)[0])
    return str(caught.value)


@pytest.mark.parametrize("options", [{"max_autotone": True}, {"epilogue-fusion": "yes"}])
def test_an_option_that_inductor_does_not_have_is_refused_and_no_piece_runs_uncompiled(options: dict[str, Any]) -> None:
    assert "Unexpected" in run_ranks(1, with_options, options)[0]


def test_options_have_the_names_that_torch_compile_knows() -> None:
    seen: list[dict[str, Any]] = []

    def compiler(graph: torch.fx.GraphModule, inputs: Any, config_patches: dict[str, Any]) -> Any:
        seen.append(config_patches)
        return graph.forward

    with mock.patch("torch._dynamo.lookup_backend", lambda _: compiler):
        phalanx_backend(torch.fx.symbolic_trace(nn.Identity()), [], options={"epilogue-fusion": False})
    assert seen == [{"epilogue_fusion": False, "keep_output_stride": True}]
