"""Who this process is, read from what its launcher left in the environment.

Pure: a mapping in, an `Environment` out. Knows torchrun (and anything else that sets RANK and WORLD_SIZE),
Slurm's srun, Open MPI, MPICH and its relatives, and a process started alone. Nothing here opens a socket.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from phalanx.errors import ConfigError

LOOPBACK = "127.0.0.1"
DEFAULT_PORT = 29500
# Ports derived from a job's identity fall here: above the registered services, below Linux's ephemeral range.
_DERIVED_PORTS = range(21000, 32000)


@dataclass(frozen=True)
class Environment:
    """One worker's place in the world, and where the ranks meet.

    `host` and `port` name rank 0's meeting point; both are None for a process started alone, which meets
    nobody.
    """

    launcher: str
    rank: int
    world: int
    local_rank: int
    local_world: int
    host: str | None = None
    port: int | None = None
    hosts: int | None = None
    """How many hosts take part, where the launcher says so; the same on every rank, unlike `local_world`."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world:
            raise ConfigError(
                f"{self.launcher} says rank {self.rank} in a world of {self.world}. "
                "Ranks count from 0 to the size of the world less 1."
            )
        if not 0 <= self.local_rank < self.local_world:
            raise ConfigError(
                f"rank {self.rank}: {self.launcher} says local rank {self.local_rank} of "
                f"{self.local_world} on this host. Local ranks count from 0 on every host."
            )

    @property
    def one_host(self) -> bool:
        """Whether the launcher started every rank on this host."""
        return self.local_world == self.world

    @property
    def shares_hosts(self) -> bool:
        """Whether some host holds several ranks, as far as is known. All ranks must come to the same answer.

        So a rank's own `local_world` counts only where it is the whole world: hosts may hold unequally many.
        """
        return self.world > (1 if self.one_host else self.hosts or self.world)


def detect(environ: Mapping[str, str], parent_pid: int = 0) -> Environment:
    """Read `environ`. The first launcher found wins: torchrun's variables, Slurm, Open MPI, MPICH, alone.

    `parent_pid` is the launcher's own process id; where nothing else in the environment tells two jobs on
    one host apart, the port is derived from it.
    """
    for reader in (_torchrun, _slurm, _open_mpi, _mpich):
        found = reader(_Variables(environ), parent_pid)
        if found is not None:
            return found
    return Environment("alone", rank=0, world=1, local_rank=0, local_world=1)


class _Variables:
    """Typed reading of the environment, with errors that name the variable."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ

    def __contains__(self, name: str) -> bool:
        return bool(self._environ.get(name))

    def text(self, *names: str) -> str | None:
        return next((self._environ[name] for name in names if name in self), None)

    def number(self, *names: str, default: int | None = None) -> int:
        name = next((name for name in names if name in self), None)
        if name is None:
            if default is None:
                raise ConfigError(f"the environment has no {names[0]}, which its launcher should have set")
            return default
        try:
            return int(self._environ[name])
        except ValueError:
            raise ConfigError(
                f"environment variable {name} should be a whole number, got {self._environ[name]!r}"
            ) from None

    def optional_number(self, *names: str) -> int | None:
        return self.number(*names) if any(name in self for name in names) else None

    def port(self, identity: int) -> int:
        derived = _DERIVED_PORTS[identity % len(_DERIVED_PORTS)] if identity else DEFAULT_PORT
        return self.number("MASTER_PORT", default=derived)


def _torchrun(variables: _Variables, parent_pid: int) -> Environment | None:
    if "RANK" not in variables or "WORLD_SIZE" not in variables:
        return None
    host = variables.text("MASTER_ADDR") or LOOPBACK
    rank, world = variables.number("RANK"), variables.number("WORLD_SIZE")
    # Launchers that set only RANK and WORLD_SIZE run one worker a host, or everything on one.
    together = host in (LOOPBACK, "localhost", "::1")
    return Environment(
        "torchrun" if "TORCHELASTIC_RUN_ID" in variables else "environment",
        rank=rank,
        world=world,
        local_rank=variables.number("LOCAL_RANK", default=rank if together else 0),
        local_world=variables.number("LOCAL_WORLD_SIZE", default=world if together else 1),
        host=host,
        port=variables.number("MASTER_PORT", default=DEFAULT_PORT),
        hosts=variables.optional_number("GROUP_WORLD_SIZE"),
    )


def _slurm(variables: _Variables, parent_pid: int) -> Environment | None:
    # Only srun starts tasks: a batch script or an salloc shell has SLURM_PROCID but no step, and is alone.
    if "SLURM_PROCID" not in variables or "SLURM_STEP_ID" not in variables:
        return None
    rank = variables.number("SLURM_PROCID")
    world = variables.number("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    hosts = variables.text("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    counts = variables.text("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    node = variables.number("SLURM_NODEID", default=0)
    identity = variables.number("SLURM_JOB_ID", default=0) * 64 + variables.number("SLURM_STEP_ID")
    return Environment(
        "slurm",
        rank=rank,
        world=world,
        local_rank=variables.number("SLURM_LOCALID"),
        local_world=tasks_on_node(counts, node) if counts else world,
        host=variables.text("MASTER_ADDR") or (first_host(hosts) if hosts else LOOPBACK),
        port=variables.port(identity),
        hosts=variables.optional_number("SLURM_STEP_NUM_NODES", "SLURM_NNODES"),
    )


def _open_mpi(variables: _Variables, parent_pid: int) -> Environment | None:
    if "OMPI_COMM_WORLD_RANK" not in variables:
        return None
    return _mpi(variables, "openmpi", "OMPI_COMM_WORLD_", ("LOCAL_RANK", "LOCAL_SIZE"), parent_pid)


def _mpich(variables: _Variables, parent_pid: int) -> Environment | None:
    if "MV2_COMM_WORLD_RANK" in variables:
        return _mpi(variables, "mvapich", "MV2_COMM_WORLD_", ("LOCAL_RANK", "LOCAL_SIZE"), parent_pid)
    if "PMI_RANK" in variables and "PMI_SIZE" in variables:
        return _mpi(variables, "mpich", "PMI_", (), parent_pid)
    return None


def _mpi(
    variables: _Variables, launcher: str, prefix: str, local: tuple[str, ...], parent_pid: int
) -> Environment:
    rank, world = variables.number(f"{prefix}RANK"), variables.number(f"{prefix}SIZE")
    local_names = [f"{prefix}{name}" for name in local] or ["MPI_LOCALRANKID", "MPI_LOCALNRANKS"]
    if local_names[1] in variables:
        local_rank, local_world = variables.number(local_names[0]), variables.number(local_names[1])
    else:
        local_rank, local_world = rank, world
    host = variables.text("MASTER_ADDR")
    if host is None and local_world != world:
        raise ConfigError(
            f"rank {rank}: {launcher} started {world} ranks on several hosts and does not say where they "
            "meet. Set MASTER_ADDR (and MASTER_PORT) to an address of rank 0's host that all can reach."
        )
    # On one host every rank has the same parent, mpirun or its proxy; over several the parents differ.
    identity = parent_pid if local_world == world else 0
    return Environment(
        launcher, rank, world, local_rank, local_world, host or LOOPBACK, variables.port(identity)
    )


def first_host(hosts: str) -> str:
    """The first host of a Slurm host list: `first_host("gpu[003-005,9],login1") == "gpu003"`."""
    match = re.match(r"([^,\[\]]+)(?:\[([^\]]*)\])?([^,\[\]]*)", hosts.strip())
    if match is None:
        raise ConfigError(f"cannot read the Slurm host list {hosts!r}. Set MASTER_ADDR to rank 0's host.")
    prefix, numbers, suffix = match.groups()
    first = re.split("[,-]", numbers)[0] if numbers else ""
    return f"{prefix}{first}{suffix}"


def tasks_on_node(counts: str, node: int) -> int:
    """How many tasks run on the node of that index: `tasks_on_node("2(x3),1", 3) == 1`."""
    tasks: list[int] = []
    for piece in counts.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", piece.strip())
        if match is None:
            raise ConfigError(f"cannot read Slurm's tasks per node {counts!r}")
        tasks.extend([int(match[1])] * int(match[2] or 1))
    if node >= len(tasks):
        raise ConfigError(f"Slurm's tasks per node {counts!r} say nothing of node {node}")
    return tasks[node]
