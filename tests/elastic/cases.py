"""Runs a plan on a `Host` and checks what has come of it.

    python -m tests.elastic.cases FOLDER < list of cases as JSON

One process for any number of cases: torch is imported once, and workers are forked from it.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import sys
import time
import warnings
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from phalanx.launch.elastic.membership import Limits
from tests.elastic import reference
from tests.elastic.host import Host
from tests.elastic.program import Plan, make_net, make_optimizer, train


@dataclass(frozen=True)
class Case:
    """A plan, how many run it, and what is done to them from outside.

    `outside` are (what, seconds after a generation gets on, rank): a signal's name, with " all" for every member, or "scale
    N". Each waits for the one before it and for a generation to get on since; a negative number counts from the beginning.
    """

    plan: Plan
    fewest: int = 1
    wanted: int = 3
    most: int = 4
    outside: tuple[tuple[str, float, int], ...] = ()
    limit_s: float = 60.0
    must_fire: bool = True
    most_lost: int | None = None
    """How many may end badly; the others must live through it."""

    @classmethod
    def of(cls, value: dict[str, Any]) -> Case:
        plan = Plan(**_tuples(value.pop("plan"), "faults"))
        return cls(plan, **_tuples(value, "outside"))


def _tuples(value: dict[str, Any], name: str) -> dict[str, Any]:
    return {**value, name: tuple(tuple(one) for one in value.get(name, ()))}


@dataclass
class Outcome:
    """What a case has come to. `error` is empty if all was as it must be."""

    error: str = ""
    fired: list[str] = field(default_factory=list)
    recovered_s: list[float] = field(default_factory=list)
    """From each fault to the next committed step."""
    num_steps: int = 0
    num_generations: int = 0
    seconds: float = 0.0
    stuck: list[float] = field(default_factory=list)
    """When nothing had happened for seconds, but for what costs a time limit."""
    difference: float = 0.0


def run_case(case: Case, folder: Path) -> Outcome:
    """Run it, in `folder`, and check everything."""
    folder.mkdir(parents=True)
    outcome, begun = Outcome(), time.monotonic()
    outside = [one for one in case.outside if one[1] >= 0]
    limits = Limits(case.fewest, case.wanted, case.most, meeting_s=max(10.0, case.plan.timeout_s), start_s=20)

    def on_event(host: Host, event: dict[str, Any]) -> None:
        if event["event"] == "gets on" and outside:
            what, after, rank = outside.pop(0)
            host.after(after, lambda: _do(host, what, rank))

    host = Host(lambda number: train(case.plan, str(folder), number), limits, case.limit_s, on_event=on_event)
    host.log = str(folder / "log")
    for what, when, rank in case.outside:
        if when < 0:
            host.after(-when, lambda what=what, rank=rank: _do(host, what, rank))  # type: ignore[misc]
    try:
        host.run()
        _check(case, folder, host, outcome)
    except Exception as error:
        outcome.error = f"{type(error).__name__}: {error}"
    outcome.seconds = round(time.monotonic() - begun, 2)
    outcome.num_generations = host.coordinator.membership.generation
    _measure(case, folder, host, outcome)
    outcome.stuck = host.stuck
    (folder / "events").write_text("\n".join(map(str, host.events)))
    return outcome


def _do(host: Host, what: str, rank: int) -> None:
    members = host.coordinator.membership.members
    if what.startswith("scale"):
        host.coordinator.scale(int(what.split()[1]), time.monotonic())
    elif members:
        name, _, how = what.partition(" ")
        for worker in members if how == "all" else members[rank % len(members) :][:1]:
            host.signal(worker, getattr(signal, name))
            if how == "for a moment":
                host.after(0.5, lambda worker=worker: host.signal(worker, signal.SIGCONT))  # type: ignore[misc]


def _check(case: Case, folder: Path, host: Host, outcome: Outcome) -> None:
    # A worker that dies when others have finished is a run that has failed; what was learnt is right all the same.
    failure = host.coordinator.failure
    assert not failure or "ended badly when others had finished" in failure, failure
    fired = [int(path.name.split("-")[1]) for path in folder.glob("fault-*")]
    outcome.fired = [" ".join(map(str, case.plan.faults[number])) for number in sorted(fired)]
    outcome.fired += [event["event"] for event in host.events if event["event"].startswith(("sent", "scale"))]
    expected = len(case.plan.faults) + sum(case.wanted if what.endswith(" all") else 1 for what, _, _ in case.outside)
    assert not case.must_fire or len(outcome.fired) == expected, f"of {expected} faults only {outcome.fired} fired"
    results = {int(path.name.split("-")[1]): json.loads(path.read_text()) for path in folder.glob("result-*")}
    assert results, f"nobody came to the end: {host.codes}"
    assert set(results) >= {worker for worker in host.coordinator.membership.members if host.codes[worker] == 0}
    fenced = {event["worker"] for event in host.events if event["event"] == "fenced"}
    lost = [worker for worker, code in host.codes.items() if code and worker not in fenced]
    assert case.most_lost is None or len(lost) <= case.most_lost, f"too many were lost: {lost}"
    steps = {result["step"] for result in results.values()}
    assert len(steps) == 1, f"ranks ended after different steps: {results}"
    outcome.num_steps = steps.pop()
    found = reference.committed_records(folder)
    reference.check_records(case.plan, found, outcome.num_steps)
    reference.check_random_numbers(folder)
    reference.check_commits(folder)
    if case.plan.generations:
        _check_census(folder)
    params = {name for name, _ in make_net(case.plan).named_parameters()}
    for name in params:
        assert len({result["digests"][name] for result in results.values()}) == 1, f"replicas differ in {name}"
    assert len({str(result["lr"]) for result in results.values()}) == 1
    even = len({record["count"] for records in found.values() for record in records}) == 1
    # The loader weighs the gradients of one wrapper.
    if (case.plan.accumulate == 1 and case.plan.wrappers == 1) or even:
        outcome.difference = reference.check_parameters(case.plan, folder, found, results)


def _check_census(folder: Path) -> None:
    """A worker that has lived through all generations holds no more after the last than after the first ones."""
    counts = [json.loads(line) for line in (folder / "census-0").read_text().splitlines()]
    for world in {count["world"] for count in counts}:
        early, *_, late = [count for count in counts if count["world"] == world and count["generation"] > 4]
        for name in ("descriptors", "threads", "shm", "groups"):
            assert late[name] <= early[name], f"{name}: {[count[name] for count in counts]}"
        # The allocator and the kernel take and join a few as they like.
        assert late["maps"] <= early["maps"] + 4 and late["pages"] < 1.02 * early["pages"], counts


def _measure(case: Case, folder: Path, host: Host, outcome: Outcome) -> None:
    """Seconds from each fault to the next step that was committed in a generation formed since."""
    deaths = [json.loads(path.read_text())[0] - host._begun for path in folder.glob("fault-*")]
    deaths += [event["at"] for event in host.events if event["event"] == "sent SIGKILL"]
    # What costs the time limit by its nature is not measured: a rank that stops must be silent for so long.
    stopped = any(fault[0] == "stop" for fault in case.plan.faults) or any("STOP" in what for what, _, _ in case.outside)
    deaths = [] if stopped else deaths
    gets_on = [event["at"] for event in host.events if event["event"] == "gets on"]
    for death in deaths:
        later = [at for at in gets_on if at > death]
        if later:
            outcome.recovered_s.append(round(later[0] - death, 3))


def warm() -> None:
    """What torch does at its first optimizer, and once per process, is done before anybody is forked."""
    net = make_net(Plan())
    optimizer = make_optimizer(Plan(), list(net.parameters()), sharded=False)
    net(torch.zeros(2, 24, dtype=torch.float64)).sum().backward()
    optimizer.step()
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    # What the workers' collectors do not look at stays in the memory that they share with this process.
    gc.collect()
    gc.freeze()


def warm_compiler() -> None:
    """Dynamo takes many seconds to import and to compile for the first time."""
    net = make_net(Plan())
    torch.compile(net, backend="aot_eager")(torch.zeros(2, 24, dtype=torch.float64)).sum().backward()
    torch.compiler.reset()
    gc.freeze()


def main() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    warm()
    folder = Path(sys.argv[1])
    deadline = time.monotonic() + float(os.environ.get("PHALANX_CASES_SECONDS", "inf"))
    # Those that compile last: their compiler makes this process large, and forks of it slow.
    cases = sorted(enumerate(map(Case.of, json.load(sys.stdin))), key=lambda one: one[1].plan.compiles)
    is_warm = False
    for number, case in cases:
        if time.monotonic() > deadline:
            break
        if case.plan.compiles and not is_warm:
            warm_compiler()
            is_warm = True
        outcome = run_case(case, folder / str(number))
        print(json.dumps({"number": number, **asdict(outcome)}), flush=True)
        if not outcome.error and not outcome.stuck:
            shutil.rmtree(folder / str(number))


if __name__ == "__main__":
    main()
