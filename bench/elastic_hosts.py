"""What does a commit cost in an elastic run on two hosts, where each rank's share is mirrored on the other?

Two hosts with one rank each: network namespaces whose lines carry so many Mbit/s. Steps with and without a commit, in
turns, as in `bench.elastic`, whose ranks these are. A plain optimizer is held by every rank, and nothing is sent; the share
of a divided one is written and sent with every step. Needs root, to make the hosts.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import tempfile
from pathlib import Path

from bench import elastic_ranks as ranks
from bench.measure import Samples, ratio
from bench.models import CASES, SIZES
from bench.namespaces import LINE, Hosts
from bench.table import Result, Row, options, present

ROOT = Path(__file__).resolve().parents[1]
NUM_HOSTS = 2
_COSTS = {ranks.OVERHEAD: "plain optimizer, held", ranks.OVERHEAD_SHARDED: "ZeRO, written and mirrored"}
_LIMIT_S = 280.0
_PORT = 29_400
_BYTES_PER_PARAMETER = 12  # AdamW in float32: the parameter and two moments


def cost(side: str, case: str, num_rounds: int, rate_mbit: int) -> dict[str, list[float]]:
    """Milliseconds per step with and without a commit, of the slower rank."""
    environ = os.environ | {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": LINE,
        "PHALANX_SECRET": secrets.token_hex(16),
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # torch warns that these addresses have no names
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    with tempfile.TemporaryDirectory(prefix="phalanx-bench-") as name, Hosts(NUM_HOSTS, rate_mbit) as hosts:
        started = []
        for host in range(NUM_HOSTS):
            limits = ["--elastic", "--nnodes", str(NUM_HOSTS), "--nproc", "1", "--quiet", "--run-dir", f"{name}/runs-{host}"]
            command = [sys.executable, "-m", "phalanx.cli.main", "run", *limits]
            command += ["--endpoint", f"{hosts.addresses[0]}:{_PORT}", "--module", "bench.elastic_ranks"]
            command += [side, case, f"{name}/cost", str(num_rounds)]
            started.append(subprocess.Popen(hosts.inside(host, command), env=environ, cwd=ROOT))
        try:
            if any(process.wait(timeout=_LIMIT_S) for process in started):
                raise RuntimeError("a host failed; see its own words above")
        finally:
            for process in started:
                process.terminate()
                process.wait(timeout=30)
        found = [json.loads(Path(f"{name}/cost.{rank}").read_text()) for rank in range(NUM_HOSTS)]
    return {name: list(map(max, zip(*(one[name] for one in found), strict=True))) for name in found[0]}


def main() -> None:
    parser = options("what a commit costs in an elastic run on two hosts")
    parser.add_argument("--case", action="append", help="the model: a case or a size of bench.models")
    parser.add_argument("--rounds", type=int, default=60, help="pairs of steps")
    parser.add_argument("--mbit", type=int, action="append", help="what a line between the hosts carries")
    parsed = parser.parse_args()
    assert __doc__ is not None
    result = Result("elastic_hosts", __doc__.splitlines()[0], "elastic", "not")
    for case in parsed.case or ("mlp-512", "gpt-5m"):
        num_parameters = sum(param.numel() for param in (CASES | SIZES)[case].build().parameters())
        share_mb = _BYTES_PER_PARAMETER * num_parameters / NUM_HOSTS / 1e6
        result.notes.append(f"{case}: {num_parameters / 1e6:.1f} million parameters, a mirrored share is {share_mb:.1f} MB")
        for rate_mbit in parsed.mbit or (10_000, 1000):
            for side, name in _COSTS.items():
                taken = cost(side, case, 4 if parsed.quick else parsed.rounds, rate_mbit)
                ms = {one: Samples(tuple(values)) for one, values in taken.items()}
                found = ratio(ms["elastic"], ms["plain"])
                each = (ms["elastic"].median, ms["plain"].median, found.median, found.low, found.high)
                result.rows.append(Row(f"{case}, {rate_mbit} Mbit/s, {name}", *each))
    result.notes.append(f"load of the machine: {os.getloadavg()[0]:.1f} at the end")
    present(result, parsed)


if __name__ == "__main__":
    main()
