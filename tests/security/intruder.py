"""Who tries to get in: another user of this host, and hosts of their own, made of network namespaces."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.cluster.command import Command, run_command
from tests.cluster.process import SEARCH_PATH

ROOT = Path(__file__).resolve().parents[2]
NOBODY = 65534
SECRET = "a secret of the tests, long enough"

needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None, reason="becoming another user needs root and setpriv"
)


def _can_make_namespaces() -> bool:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    name = f"px{uuid.uuid4().hex[:8]}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode != 0:
        return False
    return subprocess.run(["ip", "netns", "del", name], capture_output=True).returncode == 0


needs_namespaces = pytest.mark.skipif(not _can_make_namespaces(), reason="network namespaces need root and iproute2")


def as_nobody(*command: str) -> list[str]:
    """The command, run as another user of this host."""
    return ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", *command]


def attempt(command: Sequence[str]) -> tuple[int, str]:
    """Exit code and everything said."""
    done = run_command(list(command), capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout + done.stderr


class Network:
    """Hosts on one network: namespaces joined by a bridge in one more, addresses 10.99.0.1, .2, …"""

    def __init__(self, count: int) -> None:
        self._id = uuid.uuid4().hex[:6]
        self._bridge = f"px{self._id}b"
        self.hosts = [f"px{self._id}{index}" for index in range(count)]
        self.addresses = [f"10.99.0.{index + 1}" for index in range(count)]
        self._made: list[str] = []
        for name in [self._bridge, *self.hosts]:
            _ip("netns", "add", name)
            self._made.append(name)
        _ip("-n", self._bridge, "link", "add", "br0", "type", "bridge")
        _ip("-n", self._bridge, "link", "set", "br0", "up")
        for index, (host, address) in enumerate(zip(self.hosts, self.addresses, strict=True)):
            _ip("-n", host, "link", "add", "eth0", "type", "veth", "peer", "name", f"p{index}", "netns", self._bridge)
            _ip("-n", self._bridge, "link", "set", f"p{index}", "master", "br0", "up")
            _ip("-n", host, "addr", "add", f"{address}/24", "dev", "eth0")
            _ip("-n", host, "link", "set", "eth0", "up")
            _ip("-n", host, "link", "set", "lo", "up")

    def on(self, host: int, *command: str) -> list[str]:
        """The command, run on that host."""
        return ["ip", "netns", "exec", self.hosts[host], *command]

    def listening(self, host: int) -> list[tuple[str, int]]:
        """(address, port) of everything that listens there."""
        _, text = attempt(self.on(host, "ss", "-Hltn"))
        found = [line.split()[3].rpartition(":") for line in text.splitlines() if line.strip()]
        return [(address, int(port)) for address, _, port in found]

    def tunnel(self, kind: str) -> list[str]:
        """Join hosts 0 and 1 by an interface wg0 of their own; returns its two addresses."""
        addresses = ["10.77.0.1", "10.77.0.2"]
        keys = [_wireguard_key() if kind == "wireguard" else ("", "") for _ in addresses]
        for index, other in ((0, 1), (1, 0)):
            host, near, far = self.hosts[index], self.addresses[index], self.addresses[other]
            if kind == "wireguard":
                _ip("-n", host, "link", "add", "wg0", "type", "wireguard")
                peer = ["peer", keys[other][1], "allowed-ips", f"{addresses[other]}/32", "endpoint", f"{far}:51820"]
                command = self.on(index, "wg", "set", "wg0", "private-key", "/dev/stdin", "listen-port", "51820", *peer)
                subprocess.run(command, input=keys[index][0], text=True, check=True)
            else:
                ends = ["local", near, "remote", far, "dstport", "4789", "dev", "eth0"]
                _ip("-n", host, "link", "add", "wg0", "type", "vxlan", "id", "77", *ends)
            _ip("-n", host, "addr", "add", f"{addresses[index]}/24", "dev", "wg0")
            _ip("-n", host, "link", "set", "wg0", "up")
        return addresses

    def cut(self, host: int) -> None:
        """Take the host off the network, without a word to anybody."""
        _ip("-n", self.hosts[host], "link", "set", "eth0", "down")

    def close(self) -> None:
        for name in self._made:
            _ip("netns", "del", name)


def can_tunnel(kind: str) -> bool:
    """Whether this kernel has such interfaces, and for WireGuard the tool that sets them up."""
    if kind == "wireguard" and shutil.which("wg") is None:
        return False
    name = f"px{uuid.uuid4().hex[:6]}"
    options = ["id", "1", "dstport", "4789"] if kind == "vxlan" else []
    if subprocess.run(["ip", "link", "add", name, "type", kind, *options], capture_output=True).returncode != 0:
        return False
    return subprocess.run(["ip", "link", "del", name], capture_output=True).returncode == 0


def _wireguard_key() -> tuple[str, str]:
    private = subprocess.run(["wg", "genkey"], capture_output=True, text=True, check=True).stdout
    public = subprocess.run(["wg", "pubkey"], input=private, capture_output=True, text=True, check=True).stdout
    return private, public.strip()


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, (arguments, done.stderr)


@contextlib.contextmanager
def network(count: int) -> Iterator[Network]:
    made = Network(count)
    try:
        yield made
    finally:
        made.close()


class Running:
    """`phalanx run` in the background, with what it says in a file. Ended with the block."""

    def __init__(
        self, folder: Path, script: str, *options: str, prefix: Sequence[str] = (), cold: bool = False, **environ: str
    ) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self._script = folder / "train.py"
        self._script.write_text(script)
        self.output = folder / "output.txt"
        command = [*prefix, sys.executable, "-m", "phalanx.cli.main", "run", "--run-dir", str(folder / "runs")]
        command += [*options, str(self._script)]
        env = {**os.environ, "PYTHONPATH": SEARCH_PATH, "OMP_NUM_THREADS": "1", **environ}
        with open(self.output, "wb") as output:
            self.process = Command(command, cold, stdout=output, stderr=subprocess.STDOUT, env=env, cwd=folder)

    def said(self) -> str:
        return self.output.read_text(errors="replace")

    def wait_for(self, pattern: str, seconds: float = 60) -> re.Match[str]:
        """Wait until it says so."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            found = re.search(pattern, self.said())
            if found is not None:
                return found
            if self.process.poll() is not None and re.search(pattern, self.said()) is None:
                break
            time.sleep(0.05)
        raise AssertionError(f"never said {pattern!r}, but:\n{self.said()}")

    def end(self, seconds: float = 60) -> int:
        return self.process.wait(seconds)

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
