"""`phalanx run --elastic` on hosts made of network namespaces, with the program of `tests.elastic.program`.

The hosts share a folder, as over NFS, in which the ranks write down what they do; from that `reference` computes the run
again. Each host's memory files are its launcher's own, and are reached by nobody else.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.elastic import reference
from tests.elastic.program import Plan
from tests.security.intruder import SECRET, Network, Running, network

SCRIPT = """
import json, os
from tests.elastic.program import Plan, train
said = json.loads(os.environ["PHALANX_TEST_PLAN"])
said["faults"] = tuple(map(tuple, said["faults"]))
train(Plan(**said), os.environ["PHALANX_TEST_FOLDER"], int(os.environ["PHALANX_ELASTIC_NUMBER"]))
"""


class Hosts:
    """A run on several hosts. `start` one after the other; the first is host 0."""

    def __init__(self, net: Network, folder: Path, plan: Plan, *options: str) -> None:
        self.net, self.folder, self.plan, self._options = net, folder, plan, options
        self.shared = folder / "shared"
        self.shared.mkdir()
        self.runs: dict[int, Running] = {}
        self._stack = contextlib.ExitStack()

    def start(self, host: int, nproc: int = 2) -> Running:
        """`phalanx run` on this host."""
        options = ["--elastic", "--nproc", str(nproc), "--endpoint", f"{self.net.addresses[0]}:29400", *self._options]
        environ = {"PHALANX_SECRET": SECRET, "PHALANX_TEST_FOLDER": str(self.shared)}
        environ["PHALANX_TEST_PLAN"] = json.dumps(asdict(self.plan))
        run = Running(self.folder / f"host-{host}", SCRIPT, *options, prefix=self.net.on(host), **environ)
        self.runs[host] = self._stack.enter_context(run)
        return run

    def close(self) -> None:
        self._stack.close()

    def said(self) -> str:
        """By all."""
        return "\n".join(f"--- host {host}\n{run.said()}" for host, run in self.runs.items())

    def events(self) -> list[dict[str, Any]]:
        """The record that the first host's launcher keeps."""
        (file,) = (self.folder / "host-0" / "runs").glob("*/elastic.jsonl")
        return [json.loads(line) for line in file.read_text().splitlines()]

    def wait_for_step(self, step: int, seconds: float = 60.0) -> None:
        """Return when some rank is at it."""
        deadline = time.monotonic() + seconds
        while not any(f'"step": {step},' in path.read_text() for path in self.shared.glob("records-*")):
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.05)

    def worlds(self) -> list[int]:
        """How many ranks went on, at each change."""
        return [event["world"] for event in self.events() if event["event"] == "formed"]

    def check(self) -> int:
        """Every committed step was made once, of every sample, and all ranks have what that gives. How many steps."""
        fired = sorted(int(path.name.split("-")[1]) for path in self.shared.glob("fault-*"))
        assert fired == list(range(len(self.plan.faults))), f"only {fired} of {self.plan.faults} fired\n{self.said()}"
        results = {int(path.name.split("-")[1]): json.loads(path.read_text()) for path in self.shared.glob("result-*")}
        assert results, self.said()
        (num_steps,) = {result["step"] for result in results.values()}
        found = reference.committed_records(self.shared)
        reference.check_records(self.plan, found, num_steps)
        reference.check_random_numbers(self.shared)
        reference.check_commits(self.shared)
        assert len({json.dumps(result["digests"]) for result in results.values()}) == 1, "replicas differ"
        reference.check_parameters(self.plan, self.shared, found, results)
        return num_steps


@contextlib.contextmanager
def hosts(count: int, folder: Path, plan: Plan, *options: str) -> Iterator[Hosts]:
    with network(count) as net:
        made = Hosts(net, folder, plan, *options)
        try:
            yield made
        finally:
            made.close()
    assert not [name for name in os.listdir("/dev/shm") if name.startswith("phalanx")], "left behind"
