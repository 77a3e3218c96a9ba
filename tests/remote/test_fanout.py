"""What is learnt from answers, whichever of them comes first."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from phalanx.remote import fanout
from phalanx.remote.state import Part

pytestmark = pytest.mark.timeout(20)


def test_a_clock_is_compared_with_the_moment_at_which_its_answer_came() -> None:
    """Else an owner beside a slow one seems to be behind by as long, and is given less time for the next step."""
    owners = {name: fanout.Owner(SimpleNamespace(name=name), False, mock.Mock(spec=Part)) for name in ("slow", "fast")}
    futures: dict[str, Any] = {name: torch.futures.Future() for name in owners}
    with mock.patch.object(fanout.rpc, "rpc_async", lambda info, *_, **__: futures[info.name]):
        pendings = [fanout.launch(owner, "has_applied", (1,), None) for owner in owners.values()]
    clock = time.monotonic()
    futures["fast"].set_result((None, True))
    later = threading.Timer(1.0, futures["slow"].set_result, [(None, True)])
    later.start()
    answers = fanout.collect(pendings)
    later.join()
    assert answers.results == {"slow": True, "fast": True}
    for owner in owners.values():
        owner.note_clock(clock)
    assert owners["slow"].clock_lead_s < -0.9 and owners["fast"].clock_lead_s > -0.5
