"""A bench of many ranks on one host, for tests.

    run_ranks(3, fn, *args)       pooled workers, alive for the whole pytest run; returns values by rank
    spawn_ranks(3, fn, *args)     fresh processes, for tests in which a rank dies; returns RankOutcomes

`fn(rank, world, *args, **kwargs)` is a module-level function: it travels by name, so the workers
import the module it lives in. How it works: docs/design/testing.md.
"""

from tests.cluster.exchange import PATIENCE, reserved_port
from tests.cluster.failure import ClusterFailure
from tests.cluster.fresh import RankOutcome, spawn_ranks
from tests.cluster.leaks import Leak
from tests.cluster.pool import run_ranks

__all__ = ["PATIENCE", "ClusterFailure", "Leak", "RankOutcome", "reserved_port", "run_ranks", "spawn_ranks"]
