"""`phalanx run` on one host: nothing of it can be read, written or reached by who is not its user."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import psutil
import pytest

from phalanx.launch.store import RunStore, answer_env_rendezvous, run_store
from tests.security.intruder import Running, as_nobody, attempt, needs_namespaces, needs_root, network

pytestmark = pytest.mark.timeout(120)

# A script that knows nothing of phalanx: torch's own call, torch's own variables.
PLAIN = """
import os, time
import torch, torch.distributed as dist
dist.init_process_group("{backend}")
x = torch.ones(1)
dist.all_reduce(x)
if dist.get_rank() == 0:
    print("sum", x.item(), "store", os.environ["PHALANX_RUN_STORE"], "port", os.environ["MASTER_PORT"], flush=True)
while not os.path.exists("stop"):
    time.sleep(0.05)
dist.all_reduce(x)
dist.destroy_process_group()
"""


def listeners(run: Running) -> dict[int, list[tuple[str, int]]]:
    """By process id, the TCP sockets on which the launcher and everything below it listen."""
    launcher = psutil.Process(run.process.pid)
    return {
        process.pid: [tuple(c.laddr) for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
        for process in [launcher, *launcher.children(recursive=True)]
    }


@pytest.mark.parametrize("backend", [pytest.param("gloo", marks=pytest.mark.thorough), "phalanx"])
def test_a_plain_script_runs_and_nothing_listens_beyond_loopback(tmp_path: Path, backend: str) -> None:
    script = PLAIN.format(backend=backend).replace("import torch,", "import phalanx, torch,")
    with Running(tmp_path, script, "--nproc", "2") as run:
        run.wait_for(r"sum 2\.0")
        found = listeners(run)
        (tmp_path / "stop").touch()
        assert run.end() == 0, run.said()
    assert len(found) >= 3, "the launcher and two workers were looked at"
    assert found[run.process.pid] == [], "the launcher listens nowhere at all"
    assert {address for sockets in found.values() for address, _ in sockets} <= {"127.0.0.1"}


TUTORIAL = """
import os, time
import torch, torch.distributed as dist
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
if "{way}" == "tcp":
    dist.init_process_group("gloo", init_method="tcp://localhost:12355", rank=rank, world_size=world)
else:
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", "12355"
    dist.init_process_group("gloo", rank=rank, world_size=world)
for _ in range(5):
    x = torch.ones(1)
    dist.all_reduce(x)
    dist.destroy_process_group()
    dist.init_process_group("gloo", rank=rank, world_size=world)
print("sum", x.item(), flush=True)
while not os.path.exists("stop"):
    time.sleep(0.05)
dist.barrier()
"""


@pytest.mark.parametrize("way", [pytest.param("env", marks=pytest.mark.thorough), "tcp"])
def test_a_script_that_chooses_its_own_port_opens_nothing_either(tmp_path: Path, way: str) -> None:
    with Running(tmp_path, TUTORIAL.replace("{way}", way), "--nproc", "2") as run:
        run.wait_for(r"sum 2\.0")
        found = listeners(run)
        (tmp_path / "stop").touch()
        assert run.end() == 0, run.said()
    assert len(found) >= 3 and {address for sockets in found.values() for address, _ in sockets} <= {"127.0.0.1"}


@needs_root
def test_another_user_can_neither_read_nor_write_the_store(tmp_path: Path) -> None:
    with Running(tmp_path, PLAIN.format(backend="gloo"), "--nproc", "2") as run:
        path, port = run.wait_for(r"store (/proc/\d+/fd/\d+) port (\d+)").groups()
        assert Path(path).read_bytes() != b"", "the user's own process can, so the path is right"
        for command in (["cat", path], ["ls", "-l", path], ["sh", "-c", f"echo gone > {path}"]):
            code, said = attempt(as_nobody(*command))
            assert code != 0 and "denied" in said.lower(), (command, said)
        code, said = attempt(as_nobody("cat", f"/proc/{run.process.pid}/environ"))
        assert code != 0 and "denied" in said.lower()
        # Nothing answers where torch's store would be.
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", int(port)), timeout=5)
        (tmp_path / "stop").touch()
        assert run.end() == 0, run.said()


@needs_namespaces
def test_another_host_reaches_no_port_of_the_run(tmp_path: Path) -> None:
    probe = "import socket, sys\nfor port in sys.argv[2:]:\n    print(socket.socket().connect_ex((sys.argv[1], int(port))))"
    with network(2) as net, Running(tmp_path, PLAIN.format(backend="gloo"), "--nproc", "2", prefix=net.on(0)) as run:
        run.wait_for(r"sum 2\.0")
        ports = [str(port) for _, port in net.listening(0)]
        assert ports, "gloo listens on the run's own loopback"
        _, said = attempt(net.on(1, sys.executable, "-c", probe, net.addresses[0], *ports))
        refused = {"111"}  # ECONNREFUSED
        assert set(said.split()) == refused, said
        (tmp_path / "stop").touch()
        assert run.end() == 0, run.said()


@needs_root
@pytest.mark.thorough
def test_a_network_of_its_own_keeps_gloo_from_the_other_users_of_the_host(tmp_path: Path) -> None:
    # The recipe of SECURITY.md for hosts shared with people one does not trust.
    prefix = ["unshare", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    with Running(tmp_path, PLAIN.format(backend="gloo"), "--nproc", "2", prefix=prefix) as run:
        run.wait_for(r"sum 2\.0")
        inside = [port for sockets in listeners(run).values() for _, port in sockets]
        (tmp_path / "stop").touch()
        assert run.end() == 0, run.said()
    outside = {c.laddr.port for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    assert not outside & set(inside)


def test_the_store_is_new_at_each_start_and_gone_with_the_launcher() -> None:
    store = RunStore()
    first = run_store({"PHALANX_RUN_STORE": store.renew()})
    assert first is not None
    first.set("key", "of the first start")
    path = store.renew()
    second = run_store({"PHALANX_RUN_STORE": path})
    assert second is not None and not second.check(["key"])
    assert os.stat(path).st_mode & 0o777 == 0o600 and os.stat(path).st_nlink == 0
    del first, second
    store.close()
    store.close()
    assert not os.path.exists(path)


def test_a_store_that_cannot_be_opened_is_said_with_the_rank() -> None:
    with pytest.raises(Exception, match="rank 3: the store of this run, /proc/1/fd/99999, cannot be opened"):
        run_store({"PHALANX_RUN_STORE": "/proc/1/fd/99999", "RANK": "3"})


def test_outside_of_a_run_the_meeting_is_left_to_torch() -> None:
    # Also notices when torch moves the registry, which is private.
    import torch.distributed.distributed_c10d as c10d

    handlers = c10d.rendezvous.__globals__["_rendezvous_handlers"]
    before = dict(handlers)
    answer_env_rendezvous({})
    assert handlers == before and {"env", "tcp"} <= set(before)
