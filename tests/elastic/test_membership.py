"""`Membership` in every order of events: nobody is formed who must not be, and no run hangs."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.launch.elastic.actions import Action, Break, Dismiss, Form, GiveUp, Kill, Pause, Preserve, Start, Wake
from phalanx.launch.elastic.membership import Limits, Membership, RunState, WorkerState
from tests.elastic.world import Event, World, check_order

LIMITS = [
    # fewest, wanted, most, and faults in every order
    (1, 1, 1, 3),
    (1, 2, 2, 2),
    (2, 2, 2, 2),
    (1, 1, 2, 2),
    (2, 3, 3, 1),
    (1, 2, 3, 1),
    *(
        pytest.param(*case, marks=pytest.mark.soak)
        for case in ((1, 2, 2, 3), (2, 2, 2, 3), (1, 1, 2, 3), (2, 3, 3, 2), (1, 2, 3, 2))
    ),
]
_FAIR = 200  # so many steps take any of these worlds to its end, or to training


def _ends_or_trains(world: World, known: set[object]) -> None:
    """Followed in a fair world, without another fault, the run trains or is over."""
    path: list[Event] = []
    seen: list[object] = []
    for _ in range(_FAIR):
        key = world.key()
        if key in known or world.trains or world.is_over:
            known.update(seen)
            return
        seen.append(key)
        event = next(world.fair_steps(), None)
        assert event is not None, f"nothing happens any more: {world}"
        path.append(event)
        world = _step(world, event)
    raise AssertionError(f"goes round for ever: {path[-12:]} in {world}")


def _step(world: World, event: Event) -> World:
    after = world.after(event)
    assert after.machine.generation - world.machine.generation in (0, 1)
    if after.machine.generation != world.machine.generation:
        check_order(world.machine.members, after.machine.members)
    return after


@pytest.mark.parametrize(("fewest", "wanted", "most", "num_faults"), LIMITS)
def test_every_order_of_faults_leads_to_training_or_to_an_end(fewest: int, wanted: int, most: int, num_faults: int) -> None:
    first = World.begin(Limits(fewest, wanted, most))
    seen: set[tuple[object, int]] = set()
    fair: set[object] = set()
    # Paths are kept as links to where they came from: a failure prints its own.
    stack: list[tuple[World, int, tuple[object, ...]]] = [(first, num_faults, ())]
    while stack:
        world, budget, path = stack.pop()
        key = (world.key(), budget)
        if key in seen or world.machine.generation > 4:
            continue
        seen.add(key)
        try:
            _ends_or_trains(world, fair)
            for cost, events in ((0, world.fair_steps()), (1, world.faults())):
                if cost <= budget:
                    stack += [(_step(world, event), budget - cost, (path, event)) for event in events]
        except AssertionError as error:
            raise AssertionError(f"{error}\nafter {_unrolled(path)}") from error
    assert len(seen) > 50


def _unrolled(path: tuple[object, ...]) -> list[object]:
    found = []
    while path:
        path, event = path  # type: ignore[assignment, misc]
        found.append(event)
    return found[::-1]


@settings(max_examples=200)
@given(st.data())
def test_many_faults_in_larger_worlds(data: st.DataObject) -> None:
    fewest = data.draw(st.integers(1, 3))
    wanted = data.draw(st.integers(fewest, 4))
    most = data.draw(st.integers(wanted, 5))
    world = World.begin(Limits(fewest, wanted, most))
    for _ in range(data.draw(st.integers(0, 60))):
        events = [*world.fair_steps()] * 3 + [*world.faults()]
        if not events:
            break
        world = _step(world, data.draw(st.sampled_from(events)))
    _ends_or_trains(world, set())


# -- what the machine promises, one by one -----------------------------------------------------


def _formed(fewest: int = 1, wanted: int = 3, most: int = 4) -> Membership:
    machine = Membership(Limits(fewest, wanted, most, meeting_s=10, start_s=100))
    assert machine.begin(0) == [Start(wanted)]
    for worker in range(wanted):
        assert machine.started(worker, 0) == []
    actions = [action for worker in reversed(range(wanted)) for action in machine.arrived(worker, 0)]
    assert actions == [Form(1, tuple(range(wanted)))]
    machine.committed(0)
    return machine


def test_the_survivors_of_a_death_are_formed_and_the_dead_one_is_replaced() -> None:
    machine = _formed()
    # First of all the others are told, who may be waiting for it.
    assert machine.ended(1, False, 1) == [Break(1, (0, 1, 2), 1), Start(1)]
    assert machine.arrived(2, 1) == []
    assert machine.arrived(0, 1) == [Form(2, (0, 2))]
    machine.started(3, 1)
    assert machine.arrived(3, 2) == [Pause()]
    assert machine.arrived(2, 3) == [Break(2, (0, 2), 2)]
    assert machine.arrived(0, 3) == [Form(3, (0, 2, 3))]


def test_the_last_of_a_generation_is_asked_to_preserve_what_it_holds_while_it_waits() -> None:
    machine = _formed(fewest=2)
    machine.ended(0, False, 1)
    assert Preserve(1) not in machine.arrived(1, 1), "another may still come"
    assert Preserve(1) in machine.ended(2, False, 1)
    machine.started(3, 1)
    assert Preserve(1) not in machine.tick(2), "once"
    assert machine.arrived(3, 2) == [Form(2, (1, 3))]


def test_a_host_goes_with_its_workers_and_only_as_many_are_wanted_as_have_a_place() -> None:
    machine = _formed(wanted=4)
    assert machine.host_lost([1, 3], 2, 1) == [Break(1, (0, 1, 2, 3), 1)], "nobody is started who would have no place"
    assert (machine.wanted, machine.asked) == (2, 0)
    assert machine.arrived(0, 1) == [] and machine.arrived(2, 1) == [Form(2, (0, 2))]
    assert machine.host_came(2, 4, 2) == [Start(2)] and machine.wanted == 4
    # Lost again before anybody was started there.
    assert machine.host_lost([], 2, 3) == [] and (machine.wanted, machine.asked) == (2, 0)


def test_with_too_few_places_left_a_run_waits_for_a_host_to_come() -> None:
    machine = _formed(fewest=3)
    assert machine.host_lost([2], 2, 1) == [Break(1, (0, 1, 2), 2), Start(1)] and machine.wanted == 3
    assert machine.arrived(0, 1) == [] and machine.arrived(1, 1) == []
    assert machine.deadline == 101
    assert machine.host_came(1, 3, 50) == [] and (machine.wanted, machine.asked) == (3, 1)


def _with_a_host_lost_and_the_only_worker_of_another() -> Membership:
    """Three hosts with a worker each: host 1 is gone, and worker 2 of host 2. What host 1 had is on host 2."""
    machine = Membership(Limits(1, 3, 3, meeting_s=10, start_s=100))
    machine.begin(0)
    for worker in range(3):
        machine.started(worker, 0, host=worker)
    for worker in range(3):
        machine.arrived(worker, 0)
    machine.committed(0)
    machine.host_lost([1], 2, 1, host=1)
    assert machine.ended(2, False, 1) == [Start(1)]
    assert machine.arrived(0, 1) == [Form(2, (0,))]
    return machine


def test_a_generation_waits_for_a_worker_of_the_host_that_has_the_rest_of_the_state() -> None:
    machine = _with_a_host_lost_and_the_only_worker_of_another()
    assert machine.needs_hosts([2], 2) == [] and machine.needs_hosts([2], 2) == []
    assert machine.arrived(0, 2) == [Break(2, (0,), 0)], "not formed again without it"
    assert machine.deadline == 102
    machine.started(3, 2, host=2)
    assert machine.arrived(3, 4) == [Form(3, (0, 3))]
    # Should it be lost at once, the others are free to go on without it.
    assert machine.ended(3, False, 5) == [Break(3, (0, 3), 3), Start(1)]
    assert machine.arrived(0, 5) == [Form(4, (0,))]


def _is_lost(actions: list[Action]) -> bool:
    return isinstance(actions[0], GiveUp) and "held the state is lost" in actions[0].why


def test_the_wait_for_a_host_ends_with_the_host_with_time_and_with_the_hope_for_a_worker() -> None:
    assert _is_lost(_with_a_host_lost_and_the_only_worker_of_another().needs_hosts([], 2)), "no such host is there"
    for end in ("host", "another host", "time", "stillborn"):
        machine = _with_a_host_lost_and_the_only_worker_of_another()
        machine.needs_hosts([2], 2)
        machine.arrived(0, 2)
        machine.started(3, 2, host=2)
        match end:
            case "host":
                assert _is_lost(machine.host_lost([3], 1, 3, host=2))
            case "another host":
                assert machine.host_lost([], 2, 3, host=5) == []
            case "time":
                assert machine.tick(101) == [] and _is_lost(machine.tick(102))
            case "stillborn":
                assert machine.ended(3, False, 3) == [Start(1)]
                machine.started(4, 3, host=2)
                assert machine.ended(4, False, 4) == [Start(1)]
                machine.started(5, 4, host=2)
                assert _is_lost(machine.ended(5, False, 5))


def test_generations_that_only_found_out_whom_to_wait_for_are_not_counted_as_fruitless() -> None:
    machine = _with_a_host_lost_and_the_only_worker_of_another()
    for turn in range(5):
        machine.needs_hosts([2], 2)
        machine.arrived(0, 2)
        machine.started(3 + turn, 2, host=2)
        machine.arrived(3 + turn, 2)
        machine.committed(2)
        assert machine.ended(3 + turn, False, 3)
        assert machine.arrived(0, 3) == [Form(3 + 2 * turn + 1, (0,))]


def test_a_member_without_a_sign_of_life_is_fenced_and_replaced() -> None:
    machine = _formed()
    why = "it gave no sign of life for the time limit"
    assert machine.silent([1], 1) == [Kill(1, why), Break(1, (0, 1, 2), 1), Start(1)]
    assert machine.arrived(0, 1) == [] and machine.arrived(2, 1) == [Form(2, (0, 2))]
    assert machine.silent([1], 2) == [], "its death is known"
    assert machine.silent([2], 3)[0] == Kill(2, why)
    # Also at the meeting, where it holds nobody up but would be formed.
    assert machine.arrived(0, 4) == [Form(3, (0,))]
    machine.started(3, 4)
    assert machine.arrived(3, 4) == [Pause()]
    assert machine.silent([3], 5) == [Kill(3, why), Start(1)]


def test_members_that_are_all_silent_are_woken_before_they_are_given_up() -> None:
    machine = _formed()
    assert machine.silent([0, 1, 2], 1) == [Wake(0), Wake(1), Wake(2)]
    # They go on: the next time begins anew.
    machine.committed(2)
    assert machine.silent([0, 1, 2], 3) == [Wake(0), Wake(1), Wake(2)]
    actions = machine.silent([0, 1, 2], 4)
    assert [action.worker for action in actions if isinstance(action, Kill)] == [0, 1, 2]
    assert actions[-1] == Start(3)


def test_the_last_one_who_is_silent_after_the_others_have_finished_does_not_hold_the_run_open() -> None:
    machine = _formed()
    assert machine.ended(0, True, 1) == machine.ended(1, True, 1) == [], "who finishes breaks nothing"
    assert machine.silent([2], 2) == [Wake(2)]
    assert [type(action) for action in machine.silent([2], 3)] == [Kill, Break]
    assert machine.state is RunState.OVER


def test_a_silent_member_is_fenced_and_replaced() -> None:
    machine = _formed()
    assert machine.arrived(0, 1, silent=[1]) == [
        Break(1, (0, 1, 2), 0),
        Kill(1, "it did not answer for the time limit; worker 0 waited for it"),
        Start(1),
    ]
    # Whoever has come to the meeting is not silent, whatever the others say.
    assert machine.arrived(2, 1, silent=[0, 1]) == [Form(2, (0, 2))]
    assert machine.arrived(1, 2) == [Kill(1, "it had been given up")]


def test_a_member_that_does_not_come_to_the_meeting_is_fenced_and_replaced() -> None:
    machine = _formed()
    machine.ended(0, False, 1)
    # While all are in the midst of a step nobody is late; from when the first one comes, they are.
    assert machine.deadline is None and machine.tick(12) == []
    machine.arrived(1, 12)
    assert machine.deadline == 22 and machine.tick(21) == []
    killed, formed, start = machine.tick(22)
    assert isinstance(killed, Kill) and killed.worker == 2
    assert (formed, start) == (Form(2, (1,)), Start(1))


def test_starting_workers_are_waited_for_as_long_as_was_said_however_the_meeting_began() -> None:
    machine = _formed(fewest=2, wanted=2, most=2)
    machine.ended(0, False, 1)
    machine.started(2, 1)
    machine.arrived(1, 5)
    assert machine.deadline == 105
    (failure, killed, *others) = machine.tick(105)
    assert isinstance(failure, GiveUp) and "no more came within 100 s" in failure.why
    assert isinstance(killed, Kill) and len(others) == 1


def test_a_run_begins_without_those_who_never_come() -> None:
    machine = Membership(Limits(1, 3, 3, start_s=100))
    machine.begin(0)
    for worker in range(3):
        machine.started(worker, 0)
    assert machine.arrived(2, 1) == machine.arrived(0, 1) == []
    assert machine.tick(100) == [Form(1, (0, 2))]
    # And without waiting, where it is known that they do not.
    machine = Membership(Limits(1, 2, 2))
    machine.begin(0)
    machine.started(0, 0)
    machine.arrived(0, 0)
    assert machine.could_not_start("no memory", 0) == [Form(1, (0,))]


def test_workers_that_end_before_they_come_are_not_started_for_ever() -> None:
    for well in (False, True):
        machine = Membership(Limits(1, 1, 1))
        actions = machine.begin(0)
        for worker in range(3):
            assert actions == [Start(1)]
            machine.started(worker, 0)
            actions = machine.ended(worker, well, 0)
        assert len(actions) == 1 and isinstance(actions[0], GiveUp) and "3 workers in a row" in actions[0].why


def test_those_who_train_go_on_when_no_replacement_lives() -> None:
    machine = _formed()
    machine.ended(2, False, 1)
    machine.arrived(0, 1), machine.arrived(1, 1)
    for worker in range(3, 6):
        machine.started(worker, 1)
        actions = machine.ended(worker, False, 1)
    assert actions == [] and machine.state is RunState.RUNNING


def test_leaving_takes_no_more_away_than_may_go() -> None:
    machine = _formed(fewest=2)
    assert machine.wants_to_leave(0, 1) == [Pause()]
    assert machine.wants_to_leave(1, 1) == []
    assert machine.arrived(0, 2) == [Break(1, (0, 1, 2), 0), Dismiss(0)]
    assert machine.arrived(1, 2) == []
    assert machine.arrived(2, 2) == [Form(2, (1, 2))]
    assert machine.ended(0, True, 3) == []


def test_scaling_down_keeps_the_first_ranks_and_admits_nobody() -> None:
    machine = _formed()
    assert machine.scale(4, 1) == [Start(1)]
    machine.started(3, 1)
    assert machine.scale(2, 1) == [Pause()]
    # It was started for a place that is not there any more.
    assert machine.arrived(3, 1) == [Dismiss(3)]
    assert machine.arrived(2, 1) == [Break(1, (0, 1, 2), 2), Dismiss(2)]
    assert machine.arrived(0, 1) == [] and machine.arrived(1, 1) == [Form(2, (0, 1))]


def test_one_who_ends_well_at_the_meeting_has_not_finished() -> None:
    machine = _formed()
    machine.arrived(0, 1)
    assert machine.ended(0, True, 1) == [Start(1)]
    assert machine.state is RunState.GATHERING


def test_those_behind_one_who_has_finished_come_to_the_end_without_newcomers() -> None:
    machine = _formed()
    machine.ended(2, False, 1)
    machine.started(3, 1)
    machine.ended(0, True, 2)
    assert machine.state is RunState.ENDING
    killed, formed = machine.arrived(1, 3)
    assert isinstance(killed, Kill) and killed.worker == 3
    assert formed == Form(2, (1,))
    assert machine.could_not_start("late", 4) == []
    started = machine.started(4, 4)
    assert isinstance(started[0], Kill), "it would wait for ever"
    assert machine.ended(1, True, 5) == [] and machine.state is RunState.OVER
    assert machine.workers[1] is WorkerState.LEFT


def test_a_program_that_fails_in_every_generation_is_given_up() -> None:
    machine = _formed()
    for round_number in range(4):
        members = machine.members
        actions = [action for worker in members for action in machine.arrived(worker, round_number)]
    (why,) = [action.why for action in actions if isinstance(action, GiveUp)]
    assert "3 attempts in a row" in why


def test_a_run_whose_last_members_crash_has_failed_though_one_has_finished() -> None:
    machine = _formed(wanted=2)
    assert machine.ended(0, True, 1) == []
    broken, given_up = machine.ended(1, False, 2)
    assert isinstance(broken, Break) and isinstance(given_up, GiveUp) and "worker 1 ended badly" in given_up.why
    assert machine.state is RunState.OVER
    # Where another one comes to the end after it, everything has been done.
    machine = _formed()
    machine.ended(0, True, 1)
    machine.ended(1, False, 2)
    assert machine.arrived(2, 3) == [Form(2, (2,))]
    assert machine.ended(2, True, 4) == [] and machine.state is RunState.OVER


def test_newcomers_that_are_lost_before_their_first_step_are_not_replaced_for_ever() -> None:
    machine = _formed(wanted=2)
    actions = machine.ended(1, False, 1)
    machine.arrived(0, 1)
    for worker in range(2, 5):
        assert actions[-1] == Start(1)
        machine.committed(1)  # of the one who trains alone
        machine.started(worker, 1)
        assert machine.arrived(worker, 2) == [Pause()]
        assert machine.arrived(0, 2)[-1] == Form(machine.generation, (0, worker))
        actions = machine.ended(worker, False, 3)
        machine.arrived(0, 3)
    assert not any(isinstance(action, Start) for action in actions) and machine.state is RunState.RUNNING
    # One that has made a step shows that newcomers can.
    assert machine._lost_new == 3
    machine.started(5, 4)
    machine.arrived(5, 4), machine.arrived(0, 4)
    machine.committed(4)
    assert machine.ended(5, False, 5)[-1] == Start(1)


def test_limits_are_checked() -> None:
    for wrong in ((0, 1, 1), (2, 1, 2), (1, 3, 2)):
        with pytest.raises(ValueError, match="fewest <= wanted <= most"):
            Limits(*wrong)
