"""What workers are told of where they meet."""

from __future__ import annotations

from phalanx.launch.hosts.meeting import Invitation
from phalanx.launch.rendezvous import ManyHosts
from phalanx.launch.variables import ENDS, RUN_STORE


def test_workers_of_several_hosts_do_not_meet_in_the_run_that_theirs_was_started_in() -> None:
    """One host of them may be started by a worker of `phalanx run`, and the others not."""
    hosts = ManyHosts(Invitation("127.0.0.1:29500", 2, 2, False, "run", b"secret" * 4), 1, None, print)
    environ = {RUN_STORE: "/proc/1/fd/9", ENDS: "/proc/1/fd/8"}
    try:
        hosts.prepare(environ)
        assert RUN_STORE not in environ and environ[ENDS] != "/proc/1/fd/8"
    finally:
        hosts.leave("")
