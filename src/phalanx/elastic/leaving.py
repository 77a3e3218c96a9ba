"""How a worker is asked to leave an elastic run: by a signal, as batch systems send it before they take a node back."""

from __future__ import annotations

import signal
import threading
from typing import Any

from ..launch.elastic.member import Member

LEAVE = signal.SIGUSR1


def leave_on_signal(member: Member) -> None:
    """From now on SIGUSR1 lets this worker leave after the step it is in. A handler of the script's own is left alone."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(LEAVE) is not signal.SIG_DFL:
        return

    def leave(*_: Any) -> None:
        member.leave()

    signal.signal(LEAVE, leave)
