"""Where RPC listens, and what is refused before it does."""

from __future__ import annotations

import ipaddress
import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc

import phalanx.remote as remote
from phalanx.errors import ConfigError, RemoteError
from phalanx.remote import session as session_module
from phalanx.remote.interfaces import find_interface
from tests.cluster import spawn_ranks
from tests.remote.world import checked

INTERFACES = [
    (name, entry.address)
    for name, entries in psutil.net_if_addrs().items()
    for entry in entries
    if entry.family.name == "AF_INET"
]
ELSEWHERE = [(name, address) for name, address in INTERFACES if not ipaddress.ip_address(address).is_loopback]


def listening_addresses() -> list[str]:
    """As the kernel tells it: /proc/net/tcp and tcp6, restricted to this process's sockets."""
    inodes = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(descriptor)
        except FileNotFoundError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[len("socket:[") : -1])
    found: list[str] = []
    for table, size in (("tcp", 4), ("tcp6", 16)):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                raw = bytes.fromhex(fields[1].split(":")[0])
                # Words of four bytes, each in the host's order.
                words = b"".join(raw[at : at + 4][::-1] for at in range(0, size, 4))
                found.append(str(ipaddress.ip_address(words)))
    return found


def abstract_sockets() -> list[str]:
    return [c.laddr for c in psutil.Process().net_connections("unix") if str(c.laddr).startswith("@")]


def look_at_sockets(rank: int, world: int, interface: str | None) -> tuple[list[str], list[str], list[str], float]:
    before = abstract_sockets()
    with remote.init(f"worker{rank}", interface=interface):
        during = listening_addresses()
        unix = [name for name in abstract_sockets() if name not in before]
        other = f"worker{(rank + 1) % world}"
        answer = rpc.rpc_sync(other, torch.add, args=(torch.ones(1), 1)).item()
    return during, unix, listening_addresses(), answer


@pytest.mark.parametrize("interface", [None, *(name for name, _ in ELSEWHERE[:1])])
def test_nothing_listens_outside_the_chosen_interface(interface: str | None) -> None:
    address = "127.0.0.1" if interface is None else dict(INTERFACES)[interface]
    env = {"MASTER_ADDR": address}
    for during, unix, after, answer in checked(spawn_ranks(2, look_at_sockets, interface, backend=None, env=env)):
        # TensorPipe, and on rank 0 the store.
        assert during and set(during) == {address}
        assert unix == [] and after == [] and answer == 2.0


def listen_as_torch_does(rank: int, world: int) -> list[str]:
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world)
    found = listening_addresses()
    rpc.shutdown()
    return found


def test_the_look_at_sockets_would_notice_torchs_own_way() -> None:
    first, _ = checked(spawn_ranks(2, listen_as_torch_does, backend=None, check_shm=False))
    assert "::" in first


@pytest.mark.parametrize("everywhere", ["0.0.0.0", "::", "*", "any", "all", ""])
def test_listening_everywhere_is_refused(everywhere: str) -> None:
    with pytest.raises(ConfigError, match="every interface"):
        remote.init("worker0", 0, 1, interface=everywhere)


def test_an_interface_is_found_by_name_and_by_address_and_must_exist() -> None:
    for name, address in INTERFACES:
        assert find_interface(name) == (name, address) == find_interface(address)
    assert find_interface(None).is_loopback
    with pytest.raises(ConfigError, match="none of that name"):
        find_interface("nowhere0")


@pytest.mark.parametrize(
    ("env", "kwargs", "text"),
    [
        ({"MASTER_ADDR": "192.0.2.77", "MASTER_PORT": "29999"}, {}, "loopback only"),
        ({"MASTER_ADDR": "nobody.invalid", "MASTER_PORT": "29999"}, {}, "does not resolve"),
        ({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "x"}, {}, "MASTER_PORT is 'x'"),
        ({"RANK": ""}, {"rank": None}, "RANK"),
        ({}, {"options": rpc.TensorPipeRpcBackendOptions(init_method="tcp://127.0.0.1:1")}, "init_method"),
    ],
)
def test_settings_that_cannot_be_honoured_are_refused(
    env: dict[str, str], kwargs: dict[str, Any], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, value in env.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(ConfigError, match=text):
        remote.init(**{"name": "worker0", "rank": 0, "world_size": 1, **kwargs})


def pretend(rank: int, world: int, trusted: list[bool], names: list[str]) -> str:
    session_module.network_identity = lambda: f"host {rank}"
    try:
        with remote.init(names[rank], trusted_network=trusted[rank]):
            return "started"
    except ConfigError as error:
        assert rpc.api._is_current_rpc_agent_set() is False
        return str(error)


@pytest.mark.parametrize("trusted", [[False, False], [True, False], [True, True]])
def test_several_hosts_need_the_word_of_every_rank(trusted: list[bool]) -> None:
    texts = checked(spawn_ranks(2, pretend, trusted, ["a", "b"], backend=None))
    if all(trusted):
        assert texts == ["started", "started"]
    else:
        assert all("2 hosts" in text and "trusted_network=True" in text for text in texts)


def test_two_workers_of_one_name_are_refused_on_every_rank() -> None:
    texts = checked(spawn_ranks(2, pretend, [True, True], ["a", "a"], backend=None))
    assert all("several ranks are called a" in text for text in texts)


def start_twice(rank: int, world: int, meeting: str) -> str:
    store = dist.FileStore(meeting, world)
    with remote.init(f"worker{rank}", store=store):
        pass
    try:
        remote.init(f"worker{rank}", store=store)
    except ConfigError as error:
        return str(error)
    return ""


def test_a_second_session_in_one_process_is_refused_since_rrefs_would_not_work(tmp_path: Path) -> None:
    texts = checked(spawn_ranks(2, start_twice, str(tmp_path / "meeting"), backend=None))
    assert all("once a process" in text for text in texts)


def fail_inside(rank: int, world: int) -> str:
    try:
        with remote.init(f"worker{rank}"):
            raise KeyError("mine")
    except KeyError as error:
        return f"{error} {rpc.api._is_current_rpc_agent_set()}"


def test_an_exception_leaves_the_session_without_waiting_for_the_others() -> None:
    assert checked(spawn_ranks(2, fail_inside, backend=None)) == ["'mine' False"] * 2


def end_while_meeting(rank: int, world: int, moment: str) -> tuple[str, float]:
    began = time.monotonic()
    if rank == 1 and moment == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
        session_module._start = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    try:
        remote.init(f"worker{rank}", options=rpc.TensorPipeRpcBackendOptions(_transports=["uv"], rpc_timeout=20))
    except RemoteError as error:
        return str(error), time.monotonic() - began
    return "", 0.0


def test_a_worker_that_ends_before_rpc_has_started_is_named_at_once() -> None:
    outcomes = spawn_ranks(3, end_while_meeting, "between", backend=None)
    assert [outcome.exitcode for outcome in outcomes] == [0, -signal.SIGKILL, 0], outcomes[0].error_text
    for rank in (0, 2):
        text, seconds = outcomes[rank].value
        assert f"worker{rank}: rank {rank}: rank 1 has ended" in text
        assert seconds < 15, "long before the time limit"


@pytest.mark.thorough
def test_a_worker_that_never_comes_is_named_at_the_time_limit() -> None:
    outcomes = spawn_ranks(3, end_while_meeting, "before", backend=None)
    for rank in (0, 2):
        text, _ = outcomes[rank].value
        assert f"worker{rank}: rank {rank}: rank 1 did not come to the meeting of the 3 ranks within 20 s" in text
