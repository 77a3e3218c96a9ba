"""The first host and its agents, over real channels of loopback: no workers, no namespaces."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.errors import CommunicationError, ConfigError
from phalanx.launch import worker as worker_module
from phalanx.launch.agent import LaunchSettings
from phalanx.launch.elastic.coordinator import Coordinator
from phalanx.launch.elastic.history import History
from phalanx.launch.elastic.hosts import agent as agent_module
from phalanx.launch.elastic.hosts import gathering
from phalanx.launch.elastic.hosts.agent import Agent
from phalanx.launch.elastic.hosts.gathering import Hosts
from phalanx.launch.elastic.membership import Limits, RunState, WorkerState
from phalanx.launch.elastic.story import Story
from phalanx.launch.elastic.supervisor import ElasticSupervisor
from phalanx.launch.hosts.channel import Channel, ChannelError, NotAdmittedError, enter
from phalanx.launch.hosts.company import HostsEnded
from phalanx.launch.hosts.meeting import Invitation
from phalanx.launch.rendezvous import Apart
from phalanx.launch.rundir import RunDirectory
from phalanx.launch.supervise.team import Interrupted
from tests.security.intruder import SECRET

pytestmark = pytest.mark.timeout(60)
CARD = {"elastic": True, "name": "second", "nproc": 2, "number": None, "limits": [2, 3]}


class First:
    """The first host's side, and the invitation to it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # A store of c10d's per generation is not of interest here.
        monkeypatch.setattr(gathering.importlib, "import_module", lambda name: None)
        self.said: list[str] = []
        listener = socket.create_server(("127.0.0.1", 0))
        self.invitation = Invitation(f"127.0.0.1:{listener.getsockname()[1]}", 2, 3, False, "run", SECRET.encode())
        self.hosts = Hosts(listener, self.invitation, 2, self.said.append)
        self.hosts.open()

    def join(self, **card: Any) -> tuple[Channel, str]:
        """An agent made of a channel; and the words with which it was refused."""
        connection = socket.create_connection(self.invitation.address)
        channel = enter(connection, SECRET.encode(), "run", 5.0)
        channel.send({**CARD, **card}, 1.0)
        return channel, channel.receive(5.0)["refused"]

    def wait(self, until: Callable[[list[dict[str, Any]]], bool]) -> list[dict[str, Any]]:
        """Look until what was heard is enough."""
        heard: list[dict[str, Any]] = []
        deadline = time.monotonic() + 15
        while not until(heard):
            assert time.monotonic() < deadline, heard
            heard += [message for _, message in self.hosts.look(time.monotonic())]
            time.sleep(0.01)
        return heard


@pytest.fixture
def first(monkeypatch: pytest.MonkeyPatch) -> Iterator[First]:
    made = First(monkeypatch)
    yield made
    made.hosts.end("the test is over")
    made.hosts.close()


def _has(*kinds: str) -> Callable[[list[dict[str, Any]]], bool]:
    return lambda heard: {message["is"] for message in heard} >= set(kinds)


def test_a_host_comes_is_heard_and_goes_with_its_words(first: First) -> None:
    channel, refused = first.join()
    assert refused == ""
    channel.send({"is": "signs", "signs": {}}, 1.0)
    first.wait(_has("came", "signs"))
    (there,) = first.hosts.all.values()
    assert (first.hosts.places, there.number, there.name) == (4, 1, "second")
    first.hosts.look(time.monotonic() + 1.0)
    assert channel.receive(2.0) == {"do": "beat"}
    channel.send({"is": "bye", "words": "its launcher was ended by SIGTERM"}, 1.0)
    first.wait(_has("bye"))
    assert not first.hosts.all and first.hosts.places == 2
    assert first.said[-1] == "host second at 127.0.0.1 is given up: its launcher was ended by SIGTERM"
    channel.close()


NONSENSE: list[dict[str, Any]] = [
    *({}, {"is": "bye"}),
    {"is": "signs", "signs": []},
    {"is": "said", "worker": 7, "message": "arrived"},
    {"is": "said", "worker": 7, "message": {"is": "event", "what": "formed"}},
    {"is": "ended", "worker": float("inf")},
    {"is": "ended", "worker": 7, "code": []},
]


@pytest.mark.parametrize("message", NONSENSE, ids=str)
def test_a_host_that_talks_nonsense_is_lost_alone(first: First, message: dict[str, Any], tmp_path: Path) -> None:
    here, rendezvous, directory = FakeHere(), Apart("run", 1), RunDirectory.create(tmp_path, "train")
    history = History(directory, lambda line: None)
    limits = Limits(1, 1, 2)
    supervisor = ElasticSupervisor(here, limits, rendezvous, 1.0, tmp_path, history.note, first.hosts)  # type: ignore[arg-type]
    coordinator = supervisor._coordinator
    channel, _ = first.join()
    first.hosts.gather(5.0)
    (there,) = first.hosts.all.values()
    coordinator.begin(time.monotonic(), 2)
    coordinator._next_worker = 7
    coordinator.connect_far(time.monotonic(), there.seat, there.number)
    first.hosts.settle(7, there.number)
    channel.send(message, 1.0)
    channel.send({"is": "signs", "signs": {"7": [1, False, 1]}}, 1.0)
    deadline = time.monotonic() + 5
    while first.hosts.all and time.monotonic() < deadline:
        supervisor._hear_hosts(first.hosts)
        time.sleep(0.02)
    assert coordinator.membership.workers[7] is WorkerState.DEAD and not first.hosts.all
    coordinator.close()
    history.close()
    rendezvous.leave("")
    channel.close()


@pytest.mark.parametrize("message", [{}, {"is": "bye"}], ids=str)
def test_nonsense_before_the_run_begins_is_survived_as_well(first: First, message: dict[str, Any]) -> None:
    strange, _ = first.join()
    first.wait(_has("came"))
    first.hosts._invitation = replace(first.invitation, fewest=3)
    strange.send(message, 1.0)
    with pytest.raises(CommunicationError, match="of 3 hosts here"):
        first.hosts.gather(0.6)
    strange.close()


@pytest.mark.parametrize("card", [{"name": None}, {"nproc": float("inf")}, {"limits": 3}, {"nproc": []}], ids=str)
def test_a_host_that_does_not_say_who_it_is_does_not_come_in(first: First, card: dict[str, Any]) -> None:
    channel = enter(socket.create_connection(first.invitation.address), SECRET.encode(), "run", 5.0)
    channel.send({name: value for name, value in {**CARD, **card}.items() if value is not None}, 1.0)
    with pytest.raises(ChannelError, match="closed"):
        channel.receive(5.0)
    assert not first.hosts.look(time.monotonic()) and not first.hosts.all
    channel.close()


def test_hosts_are_waited_for_whatever_the_numbers_of_their_descriptors(first: First) -> None:
    low, first.hosts._woken = first.hosts._woken, fcntl.fcntl(first.hosts._woken, fcntl.F_DUPFD_CLOEXEC, 1500)
    os.close(low)
    channel, _ = first.join()
    first.hosts.gather(5.0)
    assert len(first.hosts.all) == 1
    channel.close()


def test_who_does_not_know_the_secret_is_not_listened_to(first: First) -> None:
    with socket.create_connection(first.invitation.address) as connection, pytest.raises(NotAdmittedError):
        enter(connection, b"another secret, of this length", "run", 5.0)
    deadline = time.monotonic() + 5
    while not first.said and time.monotonic() < deadline:
        time.sleep(0.01)
    assert first.said == ["127.0.0.1 was not let in: it has another secret or --run-id"]
    assert first.hosts.look(time.monotonic()) == [] and not first.hosts.all


@pytest.mark.parametrize(
    ("card", "words"),
    [
        ({"elastic": False}, "started without --elastic"),
        ({"limits": [1, 4]}, "started with --nnodes 1:4, .* with 2:3"),
        ({"nproc": 0}, "no workers"),
    ],
)
def test_a_host_started_otherwise_is_refused_in_words(first: First, card: dict[str, Any], words: str) -> None:
    channel, refused = first.join(**card)
    assert re.search(words, refused), refused
    channel.close()
    first.hosts.look(time.monotonic())
    assert not first.hosts.all


def test_more_hosts_than_were_asked_for_are_refused(first: First) -> None:
    channels = [first.join()[0] for _ in range(2)]
    channel, refused = first.join()
    assert refused == "3 hosts are here already (--nnodes)"
    for one in (*channels, channel):
        one.close()


@pytest.mark.parametrize("how", ["closed", "silent"])
def test_a_host_that_falls_silent_or_hangs_up_is_lost(first: First, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathering, "LOST_S", 1.0)
    channel, _ = first.join()
    first.wait(_has("came"))
    if how == "closed":
        channel.close()
    started = time.monotonic()
    (bye,) = (one for one in first.wait(_has("bye")) if one["is"] == "bye")
    assert ("no sign of life" in bye["words"]) == (how == "silent") and not first.hosts.all
    assert how == "closed" or time.monotonic() - started > 0.9
    channel.close()


def _coordinated(first: First) -> tuple[Coordinator, list[dict[str, Any]]]:
    records: list[dict[str, Any]] = []
    first.hosts.open_store = lambda: "tcp://127.0.0.1:1"  # type: ignore[method-assign]
    asked: list[Any] = []
    started, woken = asked.append, asked.append
    return Coordinator(Limits(1, 2, 4), started, lambda *_: None, woken, records.append, first.hosts), records


def test_workers_of_another_host_are_formed_paged_and_lost_together(first: First) -> None:
    channel, _ = first.join()
    first.wait(_has("came"))
    (there,) = first.hosts.all.values()
    coordinator, records = _coordinated(first)
    coordinator.begin(0.0, 4)
    lines = []
    for worker in range(4):
        if worker < 2:
            assert coordinator.connect(0.0)[0] == worker
            lines.append(coordinator.lines[worker])
        else:
            assert coordinator.connect_far(0.0, there.seat, there.number) == worker
            lines.append(there.lines[worker])
        first.hosts.settle(worker, int(worker > 1))
    for worker in range(4):
        coordinator._take(worker, {"is": "arrived"}, 0.0)
    told = [message["message"] for message in _received(channel, 2) if message["do"] == "tell"]
    assert [(one["is"], one["rank"], one["hosts"], one["store"]) for one in told] == [
        ("form", 2, [0, 0, 1, 1], "tcp://127.0.0.1:1"),
        ("form", 3, [0, 0, 1, 1], "tcp://127.0.0.1:1"),
    ]
    assert "images" not in told[0], "where the first host keeps its files is of no use there"
    # Of all files of this generation, this host holds those of its own ranks and the mirrors of the others.
    assert len(coordinator._shelf.generations[0].files) == 4
    coordinator._take(0, {"is": "arrived"}, 0.0)
    assert {(one["worker"], one["generation"], one["by"]) for one in _received(channel, 2)} == {(2, 1, 0), (3, 1, 0)}
    coordinator.host_lost(list(there.workers), 2, "with its host", 0.0)
    assert [one["worker"] for one in records if one["event"] == "lost"] == [2, 3]
    coordinator._take(1, {"is": "arrived"}, 0.0)
    assert coordinator.membership.members == (0, 1) and coordinator.membership.wanted == 2
    assert coordinator.membership.state is RunState.RUNNING and not coordinator.membership.asked
    coordinator._take(0, {"is": "lost state"}, 0.0)
    assert "newest checkpoint" in coordinator.failure
    coordinator.close()
    channel.close()


def test_a_host_without_workers_that_keeps_a_part_of_the_state_is_waited_for_in_words(first: First) -> None:
    channel, _ = first.join()
    first.wait(_has("came"))
    (there,) = first.hosts.all.values()
    coordinator, records = _coordinated(first)
    coordinator.begin(0.0, 2)
    coordinator.connect(0.0)
    coordinator.connect_far(0.0, there.seat, there.number)
    for worker in range(2):
        first.hosts.settle(worker, worker)
        coordinator._take(worker, {"is": "arrived"}, 0.0)
    assert first.hosts.empty() is None
    there.unseat(1)
    coordinator.ended(1, False, 1.0, -9)
    assert first.hosts.empty() is there, "its replacement is started there"
    coordinator._take(0, {"is": "arrived"}, 1.0)
    for _ in range(2):  # as every rank says so
        coordinator._take(0, {"is": "lost state", "absent": [1, 7]}, 1.0)
    coordinator._take(0, {"is": "arrived"}, 1.0)
    (waits,) = [one for one in records if one["event"] == "awaits"]
    assert (waits["hosts"], waits["names"]) == ([1], ["second"]) and not coordinator.failure
    (event,) = Story().add(waits)
    assert str(event) == (
        "a part of the state is kept on second, without a worker at the moment: waits up to 300 s for its replacement"
    )
    coordinator.connect_far(2.0, there.seat, there.number)
    first.hosts.settle(2, 1)
    coordinator._take(2, {"is": "arrived"}, 2.0)
    assert coordinator.membership.members == (0, 2)
    # The hosts that it would take now are not there.
    coordinator._take(0, {"is": "lost state", "absent": [7]}, 3.0)
    assert "newest checkpoint" in coordinator.failure
    coordinator.close()
    channel.close()


def _received(channel: Channel, count: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    while len(found) < count:
        message = channel.receive(5.0)
        found += [] if message["do"] == "beat" else [message]
    return found


class FakeHere:
    """What an agent starts, kills and is told by; no process."""

    def __init__(self) -> None:
        self.team, self.started, self.done = self, [], []  # type: ignore[var-annotated]
        self.codes: dict[int, int] = {}

    def begin(self, place: object) -> None: ...

    def start(self, worker: int, theirs: socket.socket, said: dict[str, str]) -> int:
        if worker == 99:
            raise OSError("no memory")
        self.started.append(worker)
        self.worker = theirs.dup()
        return 4711

    def newly_ended(self) -> dict[int, int]:
        found, self.codes = self.codes, {}
        return found

    def pulse(self, worker: int) -> str:
        return '{"rank": 7}'

    def sentinels(self) -> list[int]:
        return []

    def kill_one(self, worker: int, why: str) -> None:
        self.done.append(("kill", worker))

    def wake_one(self, worker: int) -> None:
        self.done.append(("wake", worker))

    def kill(self) -> None:
        self.done.append(("kill all",))

    @contextlib.contextmanager
    def ended_with(self, grace_s: float) -> Iterator[None]:
        yield


class Joined:
    """An agent in a thread-free test: looked at step by step."""

    def __init__(self, first: First) -> None:
        self.here = FakeHere()
        self.rendezvous = Apart("run", 2)
        self.agent = Agent(self.here, self.rendezvous, first.invitation, lambda line: None, 1.0)  # type: ignore[arg-type]
        with ThreadPoolExecutor(1) as pool:
            joining = pool.submit(self.agent._join)
            first.wait(_has("came"))
            joining.result()
        (self.there,) = first.hosts.all.values()

    def close(self) -> None:
        self.agent._close("")
        self.rendezvous.leave("")


def test_an_agent_does_what_it_is_told_and_says_what_it_sees(first: First) -> None:
    joined = Joined(first)
    agent, there = joined.agent, joined.there
    line, page = there.seat(7)
    there.send({"do": "start", "worker": 7, "joins": True})
    there.send({"do": "start", "worker": 99, "joins": True})
    agent._look()
    heard = first.wait(_has("started", "ended", "pulse"))
    assert [one["text"] for one in heard if one["is"] == "pulse"] == ['{"rank": 7}']
    assert [one["pid"] for one in heard if one["is"] == "started"] == [4711]
    assert [(one["worker"], one["why"]) for one in heard if one["is"] == "ended"] == [(99, "no memory")]
    page.end_generation(3, 1)
    form = {"is": "form", "generation": 4, "members": [0, 7], "hosts": [0, 1], "rank": 1}
    line.send(form)
    for what in ("kill", "wake"):
        there.send({"do": what, "worker": 7})
    agent._look()
    assert (agent._pages[7].over, agent._pages[7].by) == (3, 1) and joined.here.done == [("kill", 7), ("wake", 7)]
    told = joined.here.worker.makefile().readline()
    # Its own files and the mirror that it keeps for rank 0.
    assert '"images"' in told and told.count("/proc/") == 10 and '"kept": []' in told
    agent._give_back()
    agent._look()
    assert [one["message"] for one in first.wait(_has("said")) if one["is"] == "said"] == [{"is": "leaving"}]
    joined.here.worker.sendall(b'{"is": "committed", "version": 3}\n')
    joined.here.codes[7] = -9
    agent._look()
    heard = first.wait(_has("said", "ended"))
    kinds = [one["is"] for one in heard if one["is"] not in ("signs", "pulse")]
    assert kinds == ["said", "ended"], "what it said last comes before its end"
    there.send({"do": "forget", "generation": 5})
    there.send({"do": "end", "words": ""})
    agent._look()
    assert agent._verdict == "" and not agent._shelf.generations
    joined.close()


def test_hosts_that_were_all_suspended_find_each_other_again(first: First, monkeypatch: pytest.MonkeyPatch) -> None:
    joined, monotonic = Joined(first), time.monotonic
    joined.agent._look()
    first.hosts.look(monotonic())
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + 600.0)
    for _ in range(2):
        joined.agent._look()
        first.hosts.look(time.monotonic())
    assert list(first.hosts.all.values()) == [joined.there]
    with pytest.raises(HostsEnded, match="no sign of life"):  # the first one does not come back
        for _ in range(20):
            joined.agent._look()
    joined.close()


@pytest.mark.parametrize("how", ["closed", "silent", "nonsense"])
def test_an_agent_without_the_first_host_kills_its_workers_at_once(
    first: First, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_module, "SILENCE_S", 1.0 if how == "silent" else 30.0)
    joined = Joined(first)
    if how == "closed":
        first.hosts._lose(joined.there)
    elif how == "nonsense":
        joined.there.send({"do": "forget", "generation": "seven"})
    with pytest.raises(HostsEnded, match=r"the first host, at 127.0.0.1:.* was lost"):
        while True:
            joined.agent._signed_at = float("inf")  # it says nothing in here
            joined.agent._look()
    assert joined.here.done == [("kill all",)]
    joined.close()


def test_a_host_whose_workers_take_their_time_to_end_is_not_lost_before_they_have(
    first: First, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gathering, "LOST_S", 1.0)
    here, rendezvous, ended = FakeHere(), Apart("run", 2), []

    @contextlib.contextmanager
    def ended_with(grace_s: float) -> Iterator[None]:
        try:
            yield
        finally:
            time.sleep(2.0)
            ended.append(time.monotonic())

    def look() -> None:
        raise Interrupted(signal.SIGTERM)

    here.ended_with = ended_with  # type: ignore[method-assign]
    agent = Agent(here, rendezvous, first.invitation, lambda line: None, 5.0)  # type: ignore[arg-type]
    monkeypatch.setattr(agent, "_look", look)
    with ThreadPoolExecutor(1) as pool:
        heard = pool.submit(lambda: (first.wait(_has("came", "bye")), time.monotonic()))
        with pytest.raises(Interrupted):
            agent.run()
        messages, at = heard.result()
    assert messages[-1]["words"] == "its launcher was ended by SIGTERM" and at > ended[0]
    rendezvous.leave("")


def test_what_cannot_go_on_between_hosts_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match="communicates over gloo"):
        worker_module._init_member(SimpleNamespace(spans_hosts=True), "phalanx", "cpu", None, None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="Leave one of the two out"):
        LaunchSettings(("train.py",), 1, max_restarts=1, elastic=Limits(1, 1, 1))


def test_an_agent_that_is_refused_says_why(first: First) -> None:
    channels = [first.join()[0] for _ in range(2)]
    rendezvous = Apart("run", 2)
    agent = Agent(FakeHere(), rendezvous, first.invitation, lambda line: None, 1.0)  # type: ignore[arg-type]
    with pytest.raises(CommunicationError, match=r"refused .*3 hosts are here already"):
        agent.run()
    rendezvous.leave("")
    for channel in channels:
        channel.close()


def test_the_time_that_workers_have_to_start_begins_when_the_hosts_are_there(tmp_path: Path) -> None:
    here, rendezvous = FakeHere(), Apart("run", 1)
    limits = Limits(1, 1, 1, start_s=1.0)
    supervisor = ElasticSupervisor(here, limits, rendezvous, 1.0, tmp_path, lambda record: None)  # type: ignore[arg-type]
    found: list[str] = []

    def look() -> None:
        supervisor._coordinator.tick(time.monotonic())
        found.append(supervisor.failure)
        supervisor._coordinator.membership.state = RunState.OVER

    supervisor._gather = lambda: time.sleep(1.1)  # type: ignore[method-assign]
    supervisor._start, supervisor._look = lambda: None, look  # type: ignore[method-assign]
    supervisor.run()
    rendezvous.leave("")
    assert found == [""]
