"""The failure relay: a lead's thread that carries news of failures between the hosts.

Inside a host every waiting rank watches every other. Between hosts nobody does: a lead that waits
for gloo hears of nothing but its own connections. So the relay of each lead listens to its own
host, and looks into the store for what the others have to report. What it hears in one place it
tells in the other, and it cuts the connections of gloo to wake up its lead.

A lead that waits long may wait for one that has come to another collective: then each waits for messages that nobody
sends. So the relays of those who wait compare what for.
"""

from __future__ import annotations

import json
import select
import threading

import torch.distributed as dist

from ...errors import CollectiveTimeout, CommunicationError, PeerFailure
from ..shm.transport.call import different_calls, unpacked
from ..shm.transport.link import Watch
from .leads import Leads

_LOOK_S = 0.25
_LONG_S = 2.0
_KEY = "failure"


class FailureRelay:
    """Runs from its making until `close`, or until it has carried the news of a failure."""

    def __init__(self, watch: Watch, leads: Leads, store: dist.Store, name: str) -> None:
        self._watch = watch
        self._leads = leads
        # A connection of its own: a call on the common one would have to wait for others' calls.
        self._store: dist.Store = store.clone()  # type: ignore[attr-defined]  # missing in torch's stubs
        self.has_store = True
        """Whether the store still answers."""
        self._compared: int | None = None  # the number of the last collective of which this lead said that it waits
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)  # joined by `close`, see `lifetime`
        self._thread.start()

    def stop(self) -> None:
        """Carry no more news: this rank is leaving."""
        self._is_closed.set()

    def close(self) -> None:
        """Stop, at the latest after one look."""
        self._is_closed.set()
        self._thread.join()

    def _serve(self) -> None:
        poller = select.poll()
        poller.register(self._watch.notices_fd, select.POLLIN)
        while not self._is_closed.is_set():
            if poller.poll(_LOOK_S * 1000):
                self._watch.read_notices()
            if self._is_closed.is_set():
                return
            broken = self._watch.broken or self._compare_waits()
            if broken is not None:
                report(self._store, self._watch.break_(broken))
                self._leads.cut()
                return
            told = self._read_report()
            if told is not None:
                self._watch.break_(told)
                self._leads.cut()
                return

    def _compare_waits(self) -> CommunicationError | None:
        """The error if another lead waits for another collective in the place of that for which this one does."""
        at = self._leads.waits(_LONG_S)
        if at is None or at.number == self._compared or not self.has_store:
            return None
        me = self._watch.global_rank
        try:
            # The first who waits long says for what, the others look whether they do for the same.
            said = self._store.compare_set(f"waits/{at.number}", "", json.dumps([me, at.tag, at.what.packed.hex()]))
            if self._compared is not None:
                self._store.delete_key(f"waits/{self._compared}")
        except RuntimeError:
            self.has_store = False
            return None
        self._compared = at.number
        other, tag, packed = json.loads(said)
        if tag == at.tag:
            return None
        return PeerFailure(str(different_calls(me, (me, other), (at.what, unpacked(bytes.fromhex(packed))))))

    def _read_report(self) -> CommunicationError | None:
        try:
            if not self.has_store or not self._store.check([_KEY]):
                return None
            record = json.loads(self._store.get(_KEY))
        except RuntimeError:
            # See `report`. Not asked again: each time would print a warning.
            self.has_store = False
            return None
        kind = CollectiveTimeout if record["is_timeout"] else PeerFailure
        return kind(record["text"], tuple(record["ranks"]))


def report(store: dist.Store, error: CommunicationError) -> None:
    """Tell the other hosts, unless somebody has: only the first report counts, so that all tell the same."""
    record = {
        "is_timeout": isinstance(error, CollectiveTimeout),
        "text": str(error),
        "ranks": error.ranks,
    }
    try:
        store.compare_set(_KEY, "", json.dumps(record))
    except RuntimeError:
        pass  # the store is gone, and with it the rank that kept it: everybody will notice
