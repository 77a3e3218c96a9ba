"""How soon the death of a rank is seen by the others, and whether the right one is named.

    python -m tests.soak.latency PLANS      as JSON, or without an argument from the standard input

One line of JSON per plan. The victim writes down when it dies, or the one who ends it does; a survivor when it raises. Ranks
are forked; those on several hosts are in network namespaces, and share nothing but a line.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import phalanx
from bench.namespaces import LINE, Hosts, enter

# By transport: (backend, hosts of how many ranks, how soon a death must be seen).
TRANSPORTS = {
    "shared memory": ("phalanx", (3,), 1.0),
    "gloo": ("gloo", (3,), 5.0),
    "between hosts": ("phalanx", (2, 2), 5.0),
    "gloo between hosts": ("gloo", (1, 1, 1), 5.0),
}
FAULTS = ("kill", "raise", "term")
_AT_STEP = 5
_LIMIT_S = 90


def draw(seed: int) -> list[dict[str, Any]]:
    """One plan per transport and fault; victims and moments are the seed's."""
    plans = []
    for transport, (_, hosts, _) in TRANSPORTS.items():
        for fault in FAULTS:
            chance = random.Random(f"{seed} {transport} {fault}")
            moment = chance.choice(("backward", "between"))
            plan = {"transport": transport, "fault": fault, "victim": chance.randrange(sum(hosts)), "moment": moment}
            plans.append(plan)
    return plans


def train(rank: int, plan: dict[str, Any], said: int) -> None:
    """One rank's program: trains until somebody dies."""
    phalanx.init(backend=TRANSPORTS[plan["transport"]][0], timeout_s=60)
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)])
    wrapped = phalanx.DistributedDataParallel(net, bucket_cap_mb=0.2)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)
    step, victim = 0, rank == plan["victim"]
    if victim and plan["moment"] == "backward":
        net[3].weight.register_hook(lambda _: _die(plan["fault"], said) if step == _AT_STEP else None)
    try:
        while True:
            loss = wrapped(torch.randn(4, 256)).square().mean()
            if victim and step == _AT_STEP and plan["moment"] == "between":
                _die(plan["fault"], said)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
    except phalanx.PhalanxError as error:
        if not victim:
            _say(said, rank=rank, what="saw", text=str(error)[:400])
        raise


def _die(fault: str, said: int) -> None:
    if fault == "term":
        _say(said, what="ready")
        time.sleep(_LIMIT_S)
    _say(said, what="died")
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise ValueError("the victim's own words")


def _say(descriptor: int, **facts: Any) -> None:
    # The clock of the machine, which all of them share.
    os.write(descriptor, (json.dumps({"at": time.monotonic(), **facts}) + "\n").encode())


@contextlib.contextmanager
def _places(hosts: tuple[int, ...]) -> Iterator[list[dict[str, str]]]:
    """Per rank: its network, if it has one of its own, and how it finds the others."""
    if len(hosts) == 1:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        yield [{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}] * hosts[0]
        return
    with Hosts(len(hosts)) as made:
        where = {"MASTER_ADDR": made.addresses[0], "MASTER_PORT": "29501", "GLOO_SOCKET_IFNAME": LINE}
        yield [{**where, "namespace": made.namespace(host)} for host, count in enumerate(hosts) for _ in range(count)]


def run(plan: dict[str, Any]) -> dict[str, Any]:
    """How long each survivor took to see it, who named another rank than the victim, and all exit codes."""
    hosts, victim = TRANSPORTS[plan["transport"]][1], plan["victim"]
    world = sum(hosts)
    reader, writer = os.pipe()
    with _places(hosts) as places:
        pids = [_fork(rank, world, plan, writer, place) for rank, place in enumerate(places)]
        os.close(writer)
        died, saw = 0.0, {}
        with open(reader) as notes:
            for note in map(json.loads, notes):
                if note["what"] == "ready":
                    time.sleep(0.3)
                    died = time.monotonic()
                    os.kill(pids[victim], signal.SIGTERM)
                elif note["what"] == "died":
                    died = note["at"]
                else:
                    saw[note["rank"]] = note
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    seconds = {rank: round(note["at"] - died, 3) for rank, note in saw.items()}
    # Not at its beginning, where each names itself.
    wrong = [note["text"] for note in saw.values() if f"rank {victim}" not in note["text"].partition(":")[2]]
    missing = sorted(set(range(world)) - {victim} - set(saw))
    return {"plan": plan, "codes": codes, "seconds": seconds, "wrong": wrong, "missing": missing}


def _fork(rank: int, world: int, plan: dict[str, Any], writer: int, place: dict[str, str]) -> int:
    pid = os.fork()
    if pid:
        return pid
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    signal.alarm(_LIMIT_S)
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ.update({name: str(value) for name, value in numbers.items()}, **place)
    if "namespace" in place:
        enter(place["namespace"])
    train(rank, plan, writer)
    sys.exit(0)  # out of this module, through the interpreter's end


def main() -> None:
    # Names from files only, and imports that would cost each rank a second. Not above: it changes the process it is in.
    import tests.cluster.preload  # noqa: F401

    for plan in json.loads(sys.argv[1] if len(sys.argv) > 1 else sys.stdin.read()):
        outcome = {**run(plan), "load": round(os.getloadavg()[0], 1)}
        os.write(1, (json.dumps(outcome) + "\n").encode())  # a forked rank must not have our buffer to flush


if __name__ == "__main__":
    main()
