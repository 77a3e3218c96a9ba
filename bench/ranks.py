"""Benchmarks in many ranks: a function on every rank, its results by rank.

    results = run(2, "bench.ddp:measure", {"case": "mlp"})     # measure(worker, case="mlp") on each rank

Arguments and results are JSON. Each rank gets one compute thread unless the environment says otherwise.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from phalanx.comm.memory.heap import SWITCH, keep_freed_memory
from phalanx.launch.agent import LaunchSettings, launch
from phalanx.launch.rundir import RunDirectory
from phalanx.launch.worker import Worker, init

ROOT = Path(__file__).resolve().parents[1]


def run(nproc: int, function: str, arguments: dict[str, Any], tracing: str | None = None) -> list[Any]:
    """Call `function` ("module:name") on `nproc` fresh ranks over gloo. Raises with the first failure's words."""
    with tempfile.TemporaryDirectory(prefix="phalanx-bench-") as folder:
        command = ("--module", "bench.ranks", function, json.dumps(arguments), folder)
        settings = LaunchSettings(
            command,
            nproc,
            tracing=tracing is not None,
            environ={
                # Torch is compared with as its users have it.
                SWITCH: "0",
                "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
                "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]),
            },
        )
        directory = RunDirectory(tracing or folder)
        directory.root.mkdir(parents=True, exist_ok=True)
        outcome = launch(settings, directory, _pass_on)
        if outcome.failure is not None:
            raise RuntimeError(f"rank {outcome.failure.first.rank}: {outcome.failure.first.traceback}")
        if outcome.signal is not None:
            sys.exit(outcome.exitcode)
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(nproc)]


def keep_freed() -> None:
    """Let this process have the heap that our users have, which `run` takes from all to begin with."""
    os.environ.pop(SWITCH, None)
    keep_freed_memory(os.environ)


def _pass_on(rank: int, stream: str, line: str) -> None:
    if stream == "stderr" and "UserWarning" in line:
        print(f"rank {rank}: {line}", file=sys.stderr)


def main(function: str, arguments: str, folder: str) -> None:
    """One rank."""
    module, _, name = function.partition(":")
    with init("gloo", device="cpu") as worker:  # a benchmark on devices takes its own
        value = getattr(importlib.import_module(module), name)(worker, **json.loads(arguments))
        (Path(folder) / f"{worker.rank}.json").write_text(json.dumps(value))


__all__ = ["Worker", "run"]

if __name__ == "__main__":
    main(*sys.argv[1:])
