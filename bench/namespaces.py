"""Several hosts played by one: network namespaces joined by a bridge, each with a line of limited speed.

    with Hosts(2, rate_mbit=1000) as hosts:
        subprocess.run(hosts.inside(1, ["ip", "address"]))

Needs Linux, root, `ip`, `tc` and `nsenter`. A namespace has no name and no process: it lives by a descriptor of this
process, so nothing is left however this process ends. Programs that run inside see loopback, and `LINE` to the other hosts.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

LINE = "line"
_CLONE_NEWNET = 0x40000000
_BRIDGE = "bridge"


def _call(name: str, *arguments: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")


def enter(namespace: str) -> None:
    """Move the calling thread, and every thread it starts, into a namespace given by its path."""
    fd = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _call("setns", fd, _CLONE_NEWNET)
    finally:
        os.close(fd)


def _new_namespace() -> int:
    """A descriptor of a network namespace of its own."""
    made: list[int | OSError] = []

    def make() -> None:
        # In a thread that ends: a namespace belongs to a thread, and the others stay where they are.
        try:
            _call("unshare", _CLONE_NEWNET)
            made.append(os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            made.append(error)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    if isinstance(made[0], OSError):
        raise made[0]
    return made[0]


class Hosts:
    """Hosts 0 to `num_hosts` - 1, reachable from each other at `addresses`."""

    def __init__(self, num_hosts: int, rate_mbit: int | None = None) -> None:
        self.addresses = [f"10.213.0.{host + 1}" for host in range(num_hosts)]
        self._fds = [_new_namespace() for _ in range(num_hosts + 1)]
        self._switch = num_hosts
        try:
            self._join(rate_mbit)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Hosts:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    def namespace(self, host: int) -> str:
        """A path that `enter` takes, valid for other processes too until `close`."""
        return f"/proc/{os.getpid()}/fd/{self._fds[host]}"

    def inside(self, host: int, command: Sequence[str]) -> list[str]:
        """The command that runs `command` on `host`."""
        return ["nsenter", f"--net={self.namespace(host)}", *command]

    def close(self) -> None:
        """Let go of the namespaces, which end with the last process inside."""
        for fd in self._fds:
            os.close(fd)
        self._fds = []

    def _join(self, rate_mbit: int | None) -> None:
        self._run(self._switch, f"ip link add {_BRIDGE} type bridge", f"ip link set {_BRIDGE} up")
        for host, address in enumerate(self.addresses):
            far = f"port{host}"
            self._run(self._switch, f"ip link add {far} type veth peer name {LINE} netns {self.namespace(host)}")
            self._run(self._switch, f"ip link set {far} master {_BRIDGE} up")
            self._run(host, "ip link set lo up", f"ip address add {address}/24 dev {LINE}", f"ip link set {LINE} up")
            if rate_mbit is not None:
                self._run(host, f"tc qdisc add dev {LINE} root tbf rate {rate_mbit}mbit burst 256kb latency 100ms")

    def _run(self, host: int, *commands: str) -> None:
        for command in commands:
            done = subprocess.run(self.inside(host, command.split()), capture_output=True, text=True, timeout=20)
            if done.returncode != 0:
                raise OSError(f"{command}: {done.stderr.strip()}")


def bytes_sent() -> int:
    """How many bytes have left the host that this thread is on."""
    # Not from /sys, which shows the network of whoever mounted it.
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == LINE:
            return int(counts.split()[8])
    raise OSError(f"this thread is on no host with a {LINE}")
