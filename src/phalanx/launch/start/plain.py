"""Starting a worker as any program is started: a new interpreter, which imports torch for itself. Always possible."""

from __future__ import annotations

import subprocess

from phalanx.launch.start.child import Child
from phalanx.launch.start.order import WORKER, Order


def start_plainly(order: Order) -> Child:
    """Start it. Raises OSError where the system does not let us."""
    assert order.program == WORKER, "only a warm starter runs other programs"
    process = subprocess.Popen(
        order.command(),
        env=dict(order.environ),
        stdin=order.stdin,
        stdout=order.stdout,
        stderr=order.stderr,
        cwd=order.cwd,
        pass_fds=order.kept,
        start_new_session=order.new_session,
    )
    # The Popen must hear of the end from its own `poll`, or it would complain about a child that nobody waited for.
    return Child(process.pid, process.poll)
