"""Some programs of fixed seeds, and the fuzzer itself: what it would miss, nobody else finds."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.command import run_command
from tests.cluster.leaks import Leak
from tests.cluster.process import SEARCH_PATH
from tests.fuzz import events as ev
from tests.fuzz.__main__ import main
from tests.fuzz.job import Wrapped
from tests.fuzz.program import Model, Part, Program, routes_of
from tests.fuzz.runner import Failure, Runner
from tests.fuzz.script import script_of
from tests.fuzz.shrink import is_fair, shrink
from tests.fuzz.wider import FIRST, draw

# The runner's workers serve all tests of this file.
pytestmark = [pytest.mark.timeout(300), pytest.mark.allow_leaks(Leak.CHILDREN)]

# In parts, so that a run that is cut short says how far it got.
PROGRAMS_PER_SLICE = 30
FIRST_SEED = 20_000
WIDER_SEED = 120_000
SLICES = [FIRST_SEED + PROGRAMS_PER_SLICE * part for part in range(20)]
SLICES += [WIDER_SEED + PROGRAMS_PER_SLICE * part for part in range(9)]
EVERYDAY = (*SLICES[:3], *SLICES[20:24])

ROUTE = ((0, ""), (1, ""))


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    with Runner() as made:
        yield made


@pytest.mark.parametrize(
    "first", [first if first in EVERYDAY else pytest.param(first, marks=pytest.mark.thorough) for first in SLICES]
)
def test_programs_train_as_the_mean_by_hand_does(runner: Runner, first: int) -> None:
    results = runner.run(draw(seed) for seed in range(first, first + PROGRAMS_PER_SLICE))
    failures = [failure for _, failure in results if failure is not None]
    lines = [f"seed {f.program.seed}: {f.signature}\n    {f.text[:400]}" for f in failures]
    replay = " ".join(str(f.program.seed) for f in failures)
    assert not failures, "\n".join([*lines, f"shrink them with: python -m tests.fuzz --replay {replay}"])


def test_a_seed_is_a_program_and_a_program_prints_itself() -> None:
    names = {**vars(ev), "Program": Program, "Part": Part, "Model": Model}
    for seed in (*range(200), *range(FIRST, FIRST + 200)):
        program = draw(seed)
        assert program == draw(seed)
        assert eval(repr(program), names) == program


def test_every_event_and_part_and_option_is_drawn() -> None:
    programs = [draw(seed) for seed in (*range(3000), *range(FIRST, FIRST + 1000))]
    kinds = {type(event).__name__ for program in programs for event in program.events}
    defined = {name for name, kind in vars(ev).items() if isinstance(kind, type) and hasattr(kind, "run")}
    assert kinds == defined
    fields = ("views", "static", "find_unused", "skip_unused", "batched", "mixed", "delayed", "hook", "optimizer_first")
    fields += ("nonfinite", "drift", "models", "held", "common", "fused")
    for field in fields:
        assert any(getattr(program, field) for program in programs), f"no program with {field}"
    assert {program.ranks for program in programs} == {1, 2, 3, 4}
    assert {program.backend for program in programs} == {"gloo", "phalanx"}


def test_what_is_drawn_keeps_to_the_rules_by_which_programs_are_shrunk() -> None:
    assert [seed for seed in range(FIRST, FIRST + 500) if not is_fair(draw(seed))] == []


# -- does it catch? ----------------------------------------------------------------------------------


def _program(*events: object, **options: object) -> Program:
    parts = (Part("Biased"), Part("Wide"), *([Part("Wide")] if "models" in options else []))
    return Program(seed=1, ranks=2, backend="gloo", parts=parts, events=events, **options)  # type: ignore[arg-type]


def test_a_wrong_weight_is_a_wrong_gradient(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks get one program, the judge another: as if the wrapper had used other weights than it was given."""
    weighed = _program(ev.Backward(1, (ROUTE,), weights=(1.0, 3.0)), ev.Zero(), ev.Backward(2, (ROUTE,)))
    assert runner.run_one(weighed) is None
    failure = runner.run_one(_program(_Lying(1, (ROUTE,), weights=(1.0, 3.0))))
    assert failure is not None and failure.what in ("gradient", "replicas") and failure.at == 0


class _Lying(ev.Backward):
    """Gives a weight to the wrapper that the reference does not hear of."""

    def back(self, job: object, loss: object, retain: bool = False) -> Iterator[object]:
        weight = 2.0 if type(job).__name__ == "Wrapped" and job.rank else None  # type: ignore[attr-defined]
        yield from job.backward(loss, True, weight, retain)  # type: ignore[attr-defined]


class _Leaving(ev.Backward):
    """Rank 1 raises, which the others cannot know. The reference does not: that would be a program that torch refuses."""

    def run(self, job: object) -> Iterator[object]:
        if isinstance(job, Wrapped) and job.rank == 1:
            raise LookupError("rank 1 has had enough")
        yield from super().run(job)


def test_a_rank_that_raises_is_named_and_the_next_program_runs(runner: Runner) -> None:
    fine = _program(ev.Backward(1, (ROUTE,)))
    failures = dict(runner.run([fine, _program(_Leaving(1, (ROUTE,))), fine.but(seed=2)]))
    assert [failure and failure.what for failure in failures.values()] == [None, "raised", None]
    assert any(failure and "LookupError" in failure.text for failure in failures.values())


def test_a_failure_shrinks_to_what_it_takes() -> None:
    """Without ranks: a made-up fault that shows only with a hook, a large part and a second backward."""

    def run(program: Program) -> Failure | None:
        used = {number for route in routes_of(program.events) for number, _ in route}
        large = any(program.parts[number].width >= 2048 for number in used)
        backwards = sum(isinstance(event, ev.Pass) for event in program.events)
        wrong = program.hook is not None and large and backwards >= 2
        return Failure(program, "gradient", "made up", len(program.events) - 1) if wrong else None

    found = (run(draw(seed)) for seed in range(10_000))
    failure = next(one for one in found if one is not None)
    small = shrink(failure, run).program
    assert len(small.events) == 2 and len(small.parts) == 1 and small.parts[0].width == 2048
    assert small.hook is not None and small.mode == "plain" and not small.views and small.cap_mb is None


# -- the script --------------------------------------------------------------------------------------

NESTED = ((0, "reentrant"), (1, ""), (0, ""))
EVERYTHING = (
    ev.Listen(2, scale=True),
    ev.Backward(1, (ROUTE,), peek=-1),
    ev.Keep(),
    ev.Step(clip=1.0),
    ev.Zero("zeros", "optimizer"),
    ev.Backward(2, (ROUTE, NESTED), sync=False),
    ev.TwoForwards(3, (ROUTE,), each=True),
    ev.TwoForwards(4, (ROUTE,)),
    ev.Twice(5, (ROUTE,)),
    ev.Partial(6, (ROUTE,), rest=True),
    ev.Step(),
    ev.Fail(7, (ROUTE,), at=1),
    ev.Poison(7, (ROUTE,), victim=1, part=1),
    ev.Poison(7, (ROUTE,)),
    ev.Look(8, (ROUTE,), "eval", 0),
    ev.Look(9, (ROUTE,), "grad"),
    ev.Look(10, (ROUTE,), "saliency"),
    ev.Rate(),
    ev.Retype(),
    ev.Reload(),
    ev.Reload("optimizer"),
    ev.Place("own"),
    ev.Penalty(11, (ROUTE,), alone=False),
    ev.Step(),
    ev.Zero(),
    ev.Place("flat"),
    ev.Hidden(12, (ROUTE,), where="beside"),
    ev.Hidden(12, (ROUTE,), where="aux", weights=(1.0, 3.0)),
    ev.Hidden(12, (ROUTE,)),
    ev.Inner(13, (ROUTE,)),
    ev.Inner(13, (ROUTE,), alone=False),
    ev.Join(14, (ROUTE,), counts=(1, 2), dropped=(0,)),
    ev.Freeze(0),
    ev.Backward(17, (ROUTE,)),
    ev.Step(),
    ev.Group(1),
    ev.Group(-1, 0.2),
    ev.Closure(18, (ROUTE,), rate=0.5),
    ev.Closure(19, (ROUTE,), rate=0.5, late=True),
)
BOTH = ((0, ""), (1, ""), (2, ""))
OF_SEVERAL = (
    ev.Backward(1, (BOTH,), weights=(1.0, 3.0)),
    ev.Step(clip=1.0),
    ev.Zero(via="optimizer"),
    ev.Backward(2, (BOTH,), sync=False, models=(1, 0)),
    ev.Backward(3, (BOTH, ROUTE), models=(1, 0), together="sum"),
    ev.Step(models=(0,)),
    ev.Zero(models=(0,)),
    ev.Apart(4, (BOTH,), reverse=True),
    ev.Rate(),
    ev.Reload("optimizer"),
    ev.Reload(),
    ev.Step(),
    ev.Zero(via="wrapper"),
    ev.Dtype("float64", zeroed=True),
    ev.Group(1),
    ev.Fail(5, (BOTH,), at=2, apart=True),
    ev.Backward(6, (BOTH,), together="cut"),
    ev.Step(models=(1,)),
)
OF_GRADIENTS = (
    ev.Backward(1, (BOTH,)),
    ev.Move(1, 2),
    ev.Backward(2, (BOTH,)),
    ev.Move(2, 1, "swapped"),
    ev.Step(),
    ev.GradDtype(1, "float64"),
    ev.Backward(3, (BOTH,)),
    ev.Step(),
)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"nonfinite": "skip"}, id="plain"),
        # Nearly the same script.
        pytest.param({"mode": "zero", "cap_mb": 0.0001, "nonfinite": "raise"}, id="zero", marks=pytest.mark.thorough),
    ],
)
def test_the_script_of_a_program_does_the_same(options: dict[str, object], tmp_path: Path, runner: Runner) -> None:
    program = _program(*EVERYTHING, **options, held=(1,))
    _check_script(program, tmp_path, runner)


@pytest.mark.thorough
def test_the_script_of_several_models_does_the_same(tmp_path: Path, runner: Runner) -> None:
    models = (Model(2), Model(1, "overlapped_later"))
    _check_script(_program(*OF_SEVERAL, models=models, held=(1,), cap_mb=0.0001), tmp_path, runner)
    both = [ev.Step() if isinstance(event, ev.Step) else event for event in OF_SEVERAL]
    models = (Model(2, "zero"), Model(1, "zero"))
    without = [event for event in both if not isinstance(event, ev.Dtype)]
    _check_script(_program(*without, models=models, held=(1,), cap_mb=0.0001, common=True), tmp_path, runner)


@pytest.mark.thorough
def test_the_script_of_moved_gradients_does_the_same(tmp_path: Path, runner: Runner) -> None:
    _check_script(_program(*OF_GRADIENTS, models=(Model(2), Model(1)), views=True), tmp_path, runner)


def _check_script(program: Program, tmp_path: Path, runner: Runner) -> None:
    failure = runner.run_one(program)
    assert failure is None, failure.text
    path = tmp_path / "program.py"
    text = script_of(Failure(program, "gradient", "as an example", len(program.events) - 1))
    # Here its ranks are forked from a process that has torch: importing it took most of the time.
    assert text.count('get_context("spawn")') == 1
    path.write_text(text.replace('get_context("spawn")', 'get_context("fork")'))
    environment = os.environ | {"PYTHONPATH": SEARCH_PATH, "OMP_NUM_THREADS": "1"}
    done = run_command([sys.executable, str(path)], capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(f"0 of {2 * (1 + len(program.parts))} tensors") == 2


@pytest.mark.thorough
def test_the_command_replays_a_seed_and_says_how_many_failed(capsys: pytest.CaptureFixture[str]) -> None:
    # In this process, whose fork server is there already.
    assert main(["--count", "3", "--seed", str(FIRST_SEED)]) == 0
    assert "3 programs in" in capsys.readouterr().out
