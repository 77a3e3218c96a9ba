"""Several hosts: who does not know the secret is not listened to, and who does sends values, never code."""

from __future__ import annotations

import ast
import contextlib
import errno
import json
import os
import pickle
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from phalanx.errors import CommunicationError, ConfigError
from phalanx.launch.hosts import channel as channel_module
from phalanx.launch.hosts.channel import Channel, ChannelError, NotAdmittedError, admit, enter
from phalanx.launch.hosts.company import HostsEnded, HostsStore
from phalanx.launch.hosts.door import Door
from phalanx.launch.hosts.filter import packet_filter
from phalanx.launch.hosts.head import Head
from phalanx.launch.hosts.meeting import Invitation, WorkerStore, check_endpoint, listen, meet
from phalanx.launch.hosts.member import Member, knock
from phalanx.launch.hosts.rounds import Host, Rounds
from phalanx.launch.hosts.secret import read_secret
from phalanx.launch.rendezvous import ManyHosts
from tests.security.intruder import ROOT, SECRET

pytestmark = pytest.mark.timeout(120)
KEY = (SECRET.encode(), "run")


def pair(ours: tuple[bytes, str], theirs: tuple[bytes, str]) -> tuple[Channel, Channel]:
    listener = socket.create_server(("127.0.0.1", 0))
    one = socket.create_connection(listener.getsockname())
    two, _ = listener.accept()
    listener.close()
    with ThreadPoolExecutor(2) as pool:
        head, member = pool.submit(admit, one, *ours, 5.0), pool.submit(enter, two, *theirs, 5.0)
        try:
            return head.result(), member.result()
        except NotAdmittedError:
            one.close(), two.close()
            raise


def test_who_knows_the_secret_is_heard_both_ways() -> None:
    head, member = pair(KEY, KEY)
    member.send({"a": [1, "ü"]}, 1.0)
    assert head.receive(1.0) == {"a": [1, "ü"]}
    head.send({}, 1.0)
    assert member.receive(1.0) == {}
    head.close(), member.close(), member.close()


@pytest.mark.parametrize("theirs", [(b"another secret, of this length", "run"), (SECRET.encode(), "another run")])
def test_another_secret_or_another_run_is_not_admitted(theirs: tuple[bytes, str]) -> None:
    with pytest.raises(NotAdmittedError):
        pair(KEY, theirs)


def test_a_head_that_does_not_know_the_secret_is_not_believed() -> None:
    listener = socket.create_server(("127.0.0.1", 0))

    def impostor() -> None:
        connection, _ = listener.accept()
        connection.sendall(b"phalanx hosts 1\n" + bytes(32))
        connection.recv(64)
        connection.sendall(bytes(32))
        connection.close()

    thread = threading.Thread(target=impostor)
    thread.start()
    with socket.create_connection(listener.getsockname()) as connection:
        with pytest.raises(NotAdmittedError, match="does not know the secret"):
            enter(connection, *KEY, 5.0)
    thread.join()
    listener.close()


def test_bytes_that_come_without_end_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    head, member = pair(KEY, KEY)
    num_read = 0

    class Endless:
        def setblocking(self, flag: bool) -> None: ...

        def recv(self, count: int) -> bytes:
            nonlocal num_read
            num_read += count
            assert num_read < 1 << 23, "all that comes is kept"
            return bytes(count)

    monkeypatch.setattr(head, "_connection", Endless())
    with pytest.raises(ChannelError, match="does not bear its signature"):
        head.take()
    monkeypatch.undo()
    head.close(), member.close()


def raw(channel: Channel) -> socket.socket:
    return channel._connection


@pytest.mark.parametrize("tamper", ["flip", "repeat", "forge", "huge"])
def test_a_frame_that_was_changed_repeated_or_forged_ends_the_connection(tamper: str) -> None:
    head, member = pair(KEY, KEY)
    member.send({"op": "beat"}, 1.0)
    wire = raw(head).recv(1 << 16)
    relay, far = socket.socketpair()
    head._connection = far
    if tamper == "flip":
        relay.sendall(wire[:-1] + bytes([wire[-1] ^ 1]))
    elif tamper == "repeat":
        relay.sendall(wire + wire)
        assert head.receive(1.0) == {"op": "beat"}
    elif tamper == "forge":
        payload = json.dumps({"op": "leave", "words": "x"}).encode()
        relay.sendall(struct.pack(">I", len(payload)) + bytes(32) + payload)
    else:
        relay.sendall(struct.pack(">I", 1 << 31) + bytes(64))
    with pytest.raises(ChannelError, match=r"signature|announces"):
        head.receive(1.0)
    for end in (relay, far, raw(member)):
        end.close()


def test_who_was_stopped_does_not_take_that_time_for_the_others_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    head, member = pair(KEY, KEY)
    stopped_s = 0.0
    monkeypatch.setattr(channel_module, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + stopped_s))
    with ThreadPoolExecutor(1) as pool:
        heard = pool.submit(head.receive, 4.0)
        time.sleep(0.2)
        stopped_s = 600.0
        time.sleep(1.5)
        member.send({"op": "beat"}, 1.0)
        assert heard.result(5.0) == {"op": "beat"}
        started = time.monotonic()
        with pytest.raises(ChannelError, match="no answer in time"):
            head.receive(1.5)
    assert 1.0 < time.monotonic() - started < 3.0
    head.close(), member.close()


@pytest.fixture
def head() -> Iterator[tuple[Head, list[str]]]:
    said: list[str] = []
    listener = socket.create_server(("127.0.0.1", 0))
    made = Head(listener, Host(0, "first", 1), Rounds(2, 2), KEY, lambda peers: ("127.0.0.1", 1), said.append)
    yield made, said
    made.leave("the test is over")


def at(head: Head) -> tuple[str, int]:
    host, _, port = head._where.rpartition(":")
    return host, int(port)


class Bomb:
    """What the launcher must never run."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.mark,))


GREETINGS = {
    "silence": lambda mark: b"",
    "web": lambda mark: b"GET / HTTP/1.0\r\n\r\n",
    "zeros": lambda mark: bytes(64),
    "pickle": lambda mark: pickle.dumps(Bomb(mark)) * 4,
    "flood": lambda mark: b"\xff" * (1 << 20),
}


@pytest.mark.parametrize("kind", GREETINGS)
def test_strangers_get_a_nonce_and_nothing_else(head: tuple[Head, list[str]], kind: str, tmp_path: Path) -> None:
    greeting = GREETINGS[kind](tmp_path / "mark")
    with socket.create_connection(at(head[0])) as stranger:
        stranger.settimeout(10)
        assert stranger.recv(48, socket.MSG_WAITALL).startswith(b"phalanx hosts 1\n")
        with contextlib.suppress(OSError):  # it may have hung up by the end of a long one
            stranger.sendall(greeting)
            stranger.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(4096) == b""
    assert not (tmp_path / "mark").exists()
    if len(greeting) >= 64:
        deadline = time.monotonic() + 5
        while not head[1] and time.monotonic() < deadline:
            time.sleep(0.01)
        assert head[1] == ["127.0.0.1 was not let in: it has another secret or --run-id"]


def test_many_silent_strangers_do_not_keep_a_host_out(head: tuple[Head, list[str]]) -> None:
    # Nobody of them is given up before the time limit, and more come: a host of the run gets in at the first attempt.
    strangers = [socket.create_connection(at(head[0])) for _ in range(40)]
    assert all(stranger.recv(48, socket.MSG_WAITALL) for stranger in strangers[-30:]), "all of them are being greeted"
    started = time.monotonic()
    join(head[0], "second").leave("")
    assert time.monotonic() - started < 4, "it did not wait for the strangers' time limit"
    for stranger in strangers:
        stranger.close()


def test_a_thread_that_cannot_be_had_does_not_close_the_door(monkeypatch: pytest.MonkeyPatch) -> None:
    start, refused, welcomed = threading.Thread.start, [], threading.Event()

    def started(thread: threading.Thread) -> None:
        if thread.name == "phalanx-host" and len(refused) < 2:
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", started)
    listener = socket.create_server(("127.0.0.1", 0))
    door = Door(listener, KEY, lambda channel: (channel.close(), welcomed.set()), lambda line: None)
    for _ in range(2):
        with socket.create_connection(listener.getsockname()) as connection:
            connection.settimeout(5)
            assert connection.recv(1) == b"", "it is turned away, not left waiting"
    with socket.create_connection(listener.getsockname()) as connection:
        enter(connection, *KEY, 5.0)
        assert welcomed.wait(5) and len(refused) == 2
    door.close()


def test_a_connection_that_cannot_be_taken_does_not_close_the_door() -> None:
    class Listener:
        """Has no descriptors left for a moment."""

        def __init__(self) -> None:
            self.real = socket.create_server(("127.0.0.1", 0))
            self.num_failed = 0

        def accept(self) -> tuple[socket.socket, object]:
            if self.num_failed < 3:
                self.num_failed += 1
                raise OSError(errno.EMFILE, "Too many open files")
            return self.real.accept()

        def __getattr__(self, name: str) -> Any:
            return getattr(self.real, name)

    listener, welcomed = Listener(), threading.Event()
    door = Door(cast(socket.socket, listener), KEY, lambda channel: (channel.close(), welcomed.set()), lambda line: None)
    with socket.create_connection(listener.getsockname()) as connection:
        enter(connection, *KEY, 5.0)
        assert welcomed.wait(5) and listener.num_failed == 3
    door.close()


def test_a_host_that_is_dropped_in_the_midst_knocks_again_and_one_with_another_secret_does_not() -> None:
    num_hung_up = 0

    def head(listener: socket.socket, hang_up: int) -> None:
        nonlocal num_hung_up
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                if num_hung_up < hang_up:
                    connection.sendall(b"phalanx hosts 1\n" + bytes(32))
                    connection.recv(64, socket.MSG_WAITALL)
                    num_hung_up += 1  # before the other end can know of it and go on
                    connection.close()
                else:
                    admit(connection, *KEY, 5.0)
                    return

    me = Host(-1, "second", 1)
    for hang_up in (2, 9):
        num_hung_up = 0
        with socket.create_server(("127.0.0.1", 0)) as listener:
            thread = threading.Thread(target=head, args=(listener, hang_up))
            thread.start()
            where = listener.getsockname()
            if hang_up == 2:
                knock(where, me, KEY, lambda line: None, 10.0, lambda channel: channel).close()
            else:
                with pytest.raises(CommunicationError, match=r"does not trust the host at .*: it refused our secret"):
                    knock(where, me, KEY, lambda line: None, 10.0, lambda channel: channel)
                assert num_hung_up == 3
            listener.shutdown(socket.SHUT_RDWR)
        thread.join(10)


def test_a_store_that_the_kernel_does_not_filter_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.launch.hosts.meeting.admit_only", lambda listener, peers: False)
    said: list[str] = []
    store = WorkerStore("127.0.0.1", said.append)
    _, port = store.renew({"127.0.0.1"})
    store.renew({"127.0.0.1"})
    assert len(said) == 1 and f"whoever reaches 127.0.0.1:{port} can read and write the workers' store" in said[0]


def join(head: Head, name: str, limits: tuple[int, int] = (2, 2)) -> Member:
    connection = socket.create_connection(at(head))
    return Member(enter(connection, *KEY, 5.0), Host(-1, name, 1), limits, "here", lambda line: None)


def test_two_hosts_meet_and_share_values(head: tuple[Head, list[str]]) -> None:
    member = join(head[0], "second")
    with ThreadPoolExecutor(1) as pool:
        there = pool.submit(member.join, 10.0)
        here = head[0].join(10.0)
        assert (here.rank, here.hosts, there.result().rank, there.result().hosts) == (0, 2, 1, 2)
    stores = HostsStore(head[0], "1/"), HostsStore(member, "1/")
    stores[0].set("a", b"\xff\x00x")
    assert stores[1].get("a") == b"\xff\x00x" and stores[1].add("n", 2) == 2 and stores[0].add("n", 1) == 3
    assert stores[0].multi_get(["a", "n"]) == [b"\xff\x00x", b"3"] and not stores[1].check(["b"])
    member.leave("rank 1 failed first (exit code 1): ValueError: seven")
    assert "second at 127.0.0.1 ended: rank 1 failed first (exit code 1): ValueError: seven" == head[0].verdict(5.0)
    with pytest.raises(HostsEnded, match="ValueError: seven"):
        head[0].news()


def test_a_host_that_waits_does_not_hold_up_a_run_that_has_finished(head: tuple[Head, list[str]]) -> None:
    members = [join(head[0], name) for name in ("second", "spare")]
    with ThreadPoolExecutor(2) as pool:
        there = pool.submit(members[0].join, 10.0)
        head[0].join(10.0)
        there.result()
        spare = pool.submit(members[1].join, 20.0)
        while not head[0]._rounds.waiting():
            time.sleep(0.01)
        members[0].leave("")
        with pytest.raises(HostsEnded, match="no new round"):
            spare.result(5.0)
    assert "no new round" in members[1].verdict(0.0)
    members[1].leave("")


def test_a_restart_after_another_host_has_finished_is_not_waited_for(head: tuple[Head, list[str]]) -> None:
    member = join(head[0], "second")
    with ThreadPoolExecutor(1) as pool:
        there = pool.submit(member.join, 10.0)
        head[0].join(10.0)
        there.result()
        again = pool.submit(head[0].join, 20.0)
        while not head[0]._rounds.waiting():
            time.sleep(0.01)
        member.leave("")
        with pytest.raises(HostsEnded, match="no new round"):
            again.result(5.0)
    assert "no new round" in head[0].verdict(0.0)


def test_a_host_that_goes_before_it_has_said_how_many_workers_it_has_is_done_without() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    rounds = Rounds(1, 2, restartable=True)
    first = Head(listener, Host(0, "first", 3), rounds, KEY, lambda peers: ("127.0.0.1", 1), lambda line: None)
    rendezvous = ManyHosts(Invitation("127.0.0.1:1", 1, 2, True, "run", KEY[0]), 3, None, lambda line: None)
    rendezvous._company = first
    member = join(first, "second", (1, 2))
    with ThreadPoolExecutor(2) as pool:
        there = pool.submit(member.join, 10.0)
        here = pool.submit(rendezvous.next_round)
        assert there.result(10.0).hosts == 2
        member.leave("it was interrupted")
        found = here.result(15.0)
    assert (found.hosts, found.world) == (1, 3)
    rendezvous.leave("the test is over")


def test_a_host_started_otherwise_is_refused_in_words(head: tuple[Head, list[str]]) -> None:
    with pytest.raises(CommunicationError, match="refused second: it was started with --nnodes 1:4, first with 2"):
        join(head[0], "second", (1, 4))


def test_a_host_that_falls_silent_is_lost(head: tuple[Head, list[str]]) -> None:
    member = join(head[0], "second")
    with ThreadPoolExecutor(1) as pool:
        there = pool.submit(member.join, 10.0)
        head[0].join(10.0)
        there.result()
    member._requests.put(None)  # its thread ends without a goodbye, and the connection stays open
    started = time.monotonic()
    assert "second at 127.0.0.1 was lost (no answer in time)" in head[0].verdict(10.0)
    assert time.monotonic() - started < 7
    member._channel.close()


NONSENSE = [
    '{"op": "store", "do": "add", "key": "n", "amount": Infinity}',
    '{"op": "store", "do": "divide", "key": "n"}',
    '{"op": ["beat"], "words": {}}{',
    "[" * 100_000,
    "",
]


@pytest.mark.parametrize("text", NONSENSE, ids=lambda text: text[:40])
def test_a_host_that_talks_nonsense_is_lost_in_words(
    head: tuple[Head, list[str]], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    member = join(head[0], "second")
    with ThreadPoolExecutor(1) as pool:
        there = pool.submit(member.join, 10.0)
        head[0].join(10.0)
        there.result()
    dumps = json.dumps
    monkeypatch.setattr(json, "dumps", lambda said: text if said == {"op": "beat"} else dumps(said))
    assert "second at 127.0.0.1 was lost" in head[0].verdict(4.0)
    member.leave("")


@pytest.mark.parametrize("endpoint", ["0.0.0.0:29500", "[::]:29500", "*:29500", "any:1"])
def test_every_interface_at_once_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="means every interface"):
        check_endpoint(endpoint)


@pytest.mark.parametrize("host", ["0x0", "0.0", "00.0.0.0", "[::0]", "[0:0:0:0:0:0:0:0]", "[::ffff:0.0.0.0]"])
def test_nor_under_another_name(host: str) -> None:
    with pytest.raises(ConfigError, match="means every interface"):
        listen(Invitation(f"{host}:0", 2, 2, False, "run", KEY[0]), 0)


def test_an_address_of_four_bytes_in_sixteen_is_what_its_packets_say() -> None:
    listener = listen(Invitation("[::ffff:127.0.0.1]:0", 2, 2, False, "run", KEY[0]), 0)
    assert listener is not None
    with listener:
        assert listener.family is socket.AF_INET and listener.getsockname()[0] == "127.0.0.1"


@pytest.mark.parametrize("host", ["head..cluster", "h" * 64 + ".cluster", ".head", "head\udc80"])
def test_a_name_that_no_host_can_have_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match="no host can have that name"):
        check_endpoint(f"{host}:29500")
    assert check_endpoint("[fe80::1%eth0]:29500") and check_endpoint("head.cluster.:29500")


def test_an_endpoint_that_is_not_here_is_said_to_the_first_host() -> None:
    invitation = Invitation("192.0.2.1:29500", 2, 2, False, "run", KEY[0])
    with pytest.raises(ConfigError, match=r"cannot listen at --endpoint 192.0.2.1:29500"):
        meet(invitation, 1, 0, lambda line: None, 1.0)


def test_nobody_at_the_endpoint_is_said_after_a_while_and_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.comm.failure.waiting.FIRST_S", 0.0)
    said: list[str] = []
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        invitation = Invitation(f"127.0.0.1:{free.getsockname()[1]}", 2, 2, False, "run", KEY[0])
        with pytest.raises(CommunicationError, match="no host answered"):
            meet(invitation, 1, 1, said.append, 0.6)
    assert len(said) == 1 and "waits for the first host to answer at 127.0.0.1" in said[0] and "refused" in said[0]


def test_secrets_are_private_files_and_not_short(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text(SECRET + "\n")
    file.chmod(0o644)
    with pytest.raises(ConfigError, match=r"can be read by others \(mode 0644\)"):
        read_secret(str(file), {})
    file.chmod(0o600)
    assert read_secret(str(file), {"PHALANX_SECRET": "not this one, not this one"}) == SECRET.encode()
    assert read_secret(None, {"PHALANX_SECRET": SECRET}) == SECRET.encode() and read_secret(None, {}) is None
    assert read_secret(None, {"PHALANX_SECRET": os.fsdecode(b"\xff" * 16)}) == b"\xff" * 16
    (tmp_path / "link").symlink_to(file)
    assert read_secret(str(tmp_path / "link"), {}) == SECRET.encode(), "as Kubernetes mounts them"
    for path, words in ((tmp_path / "none", "No such file"), (tmp_path, "not a plain file")):
        with pytest.raises(ConfigError, match=words):
            read_secret(str(path), {})
    with pytest.raises(ConfigError, match="has 5 bytes, at least 16"):
        read_secret(None, {"PHALANX_SECRET": "short"})


def test_no_pickle_anywhere_in_the_launcher() -> None:
    forbidden = {"pickle", "cPickle", "dill", "marshal", "shelve", "cloudpickle"}
    files = [*(ROOT / "src" / "phalanx" / "launch").rglob("*.py"), ROOT / "src" / "phalanx" / "cli" / "run.py"]
    assert len(files) > 10
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not forbidden & {name.partition(".")[0] for name in names}, path
            torchs = {"dynamic_rendezvous", "c10d_rendezvous_backend", "registry"}
            assert not torchs & {name.split(".")[-1] for name in names}, path


def test_the_filter_lets_pass_the_named_addresses_alone() -> None:
    program = packet_filter({"10.0.0.2", "10.0.0.1", "::1"}, ipv6=False)
    assert len(program) == 2 * 3 + 1 and program[-1] == (6, 0, 0, 0)
    assert [one[3] for one in program if one[0] == 0x15] == [0x0A000001, 0x0A000002]
    assert len(packet_filter({"::1", "10.0.0.1"}, ipv6=True)) == 9 + 1
