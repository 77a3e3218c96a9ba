"""One optimizer over parameters on remote workers, on torch's RPC; and starting that RPC safely."""

from phalanx.remote.failures import StepFailed, WorkerFailure, WorkersFailed
from phalanx.remote.groups import PerOwner
from phalanx.remote.optimizer import DistributedOptimizer, OwnerTiming
from phalanx.remote.session import Session, init

__all__ = [
    "DistributedOptimizer",
    "OwnerTiming",
    "PerOwner",
    "Session",
    "StepFailed",
    "WorkerFailure",
    "WorkersFailed",
    "init",
]
