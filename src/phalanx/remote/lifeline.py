"""Who is still there, at the end of a session: nobody waits for ever for a worker that has died.

RPC's own graceful end waits for all workers, without a limit or with one that no training time fits. Here a worker that has
nothing more to do says so in the store in which the workers met, goes on serving, and waits until every other one is done
as well, has failed, or is dead:

    done      it left its session in peace, and waits as we do
    failed    it left by an exception, whose words it has written down
    dead      its process is gone (same host: the kernel tells), or it gave no sign of life for a while (another host)
    stopped   by a signal, and not continued for a while (same host)

Knows nothing of RPC. Writes signs of life only where a worker is on another host.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

import torch.distributed as dist

from phalanx.comm.failure.answering import AnsweringStore, SilentStoreError
from phalanx.comm.failure.arrivals import is_tcp
from phalanx.comm.failure.board import launcher_serves_store
from phalanx.comm.failure.processes import has_ended, is_stopped
from phalanx.comm.failure.waiter import say
from phalanx.comm.failure.waiting import Waiting

_SERVER = 0  # the rank that serves the store, where no launcher does
_POLL_S = 0.1
_BEAT_S = 0.5
_SILENCE_S = 10.0  # of a worker on another host, after which it counts as dead
_STOPPED_S = 60.0  # of a worker on this host, after which nobody waits for it any more
_LONGEST_LOOK_S = 1.0  # who was stopped itself, with all others (Ctrl-Z), must not take that time for theirs
_STAY_S = 2.0  # how long the worker that serves the store stays after a bad end, for the others to read it


class Lifeline:
    """One worker's view of the others. `everyone`: name and `identity()` of each, by rank."""

    def __init__(self, store: dist.Store, rank: int, everyone: list[dict[str, Any]]) -> None:
        elsewhere = is_tcp(store) and rank != _SERVER
        self._store = AnsweringStore(dist.PrefixStore("lifeline", store), elsewhere, _STOPPED_S)
        self._depends_on_server = elsewhere and not launcher_serves_store()
        self._rank = rank
        self._everyone = everyone
        self._heard: dict[int, tuple[bytes, float]] = {}  # the last sign of life of a worker elsewhere, and when it changed
        self._stopped_s: dict[int, float] = {}  # for how long a worker on this host was seen to stand still
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        if any(other["host"] != everyone[rank]["host"] for other in everyone):
            self._thread = threading.Thread(target=self._beat, name=f"phalanx-lifeline-{rank}", daemon=True)
            self._thread.start()

    def _beat(self) -> None:
        count = 0
        while not self._ended.wait(_BEAT_S):
            count += 1
            try:
                self._store.set(f"beat/{self._rank}", str(count))
            except (RuntimeError, OSError):
                return  # the store is gone, and everybody notices

    def fail(self, words: str) -> None:
        """This worker leaves by an exception."""
        with contextlib.suppress(RuntimeError, OSError):
            self._store.set(f"end/{self._rank}", f"failed: {words}"[:4000])

    def wait_for_others(self) -> dict[str, str]:
        """Say that this worker is done, and return when no other has anything to do; what went wrong, by worker name."""
        wrong: dict[str, str] = {}
        waiting = Waiting(say)
        with contextlib.suppress(RuntimeError, OSError):
            self._store.set(f"end/{self._rank}", "done")
        others = [rank for rank in range(len(self._everyone)) if rank != self._rank]
        looked = time.monotonic()
        while others:
            looked, before = time.monotonic(), looked
            try:
                for rank in self._stopped(others, min(looked - before, _LONGEST_LOOK_S)):
                    wrong[self._name(rank)] = f"has been stopped by a signal for {_STOPPED_S:g} s"
                    others.remove(rank)
                if not self._is_without_server():
                    others = [rank for rank in others if not self._has_ended(rank, wrong)]
                elif _SERVER not in others:
                    return wrong  # it was given up
            except SilentStoreError:
                return {**wrong, self._name(_SERVER): f"has not answered for {_STOPPED_S:g} s, and serves the store"}
            except (RuntimeError, OSError):
                # The store is gone, and with it the worker that served it. The others are told by nobody.
                return {**wrong, self._name(_SERVER): "died, and with it the store in which the workers meet"}
            if others:
                names = ", ".join(self._name(rank) for rank in others)
                waiting.look(lambda names=names: f"{self._name(self._rank)} is done and waits for {names}")  # type: ignore[misc]
                time.sleep(_POLL_S)
        return wrong

    def _has_ended(self, rank: int, wrong: dict[str, str]) -> bool:
        if self._store.check([f"end/{rank}"]):
            how = self._store.get(f"end/{rank}").decode()
            if how != "done":
                wrong[self._name(rank)] = how
            return True
        if self._is_dead(rank):
            # It may have written its end just before.
            if self._store.check([f"end/{rank}"]):
                return self._has_ended(rank, wrong)
            wrong[self._name(rank)] = "died"
            return True
        return False

    def _stopped(self, others: list[int], passed_s: float) -> list[int]:
        """Those of this host that were seen standing still for too long; `passed_s` since the last look."""
        here = self._everyone[self._rank]["host"]
        for rank in others:
            stands = self._everyone[rank]["host"] == here and is_stopped(self._everyone[rank]["pid"])
            self._stopped_s[rank] = self._stopped_s.get(rank, 0.0) + passed_s if stands else 0.0
        return [rank for rank in others if self._stopped_s[rank] > _STOPPED_S]

    def _is_without_server(self) -> bool:
        """Whether the worker that serves the store is stopped just now: it would not answer, nor end."""
        server, here = self._everyone[_SERVER], self._everyone[self._rank]["host"]
        return self._depends_on_server and server["host"] == here and is_stopped(server["pid"])

    def _is_dead(self, rank: int) -> bool:
        other = self._everyone[rank]
        here = self._everyone[self._rank]["host"]
        if other["host"] == here:
            return has_ended(other, here)
        beat = self._store.get(f"beat/{rank}") if self._store.check([f"beat/{rank}"]) else b""
        now = time.monotonic()
        last, since = self._heard.get(rank, (None, now))
        self._heard[rank] = (beat, now if beat != last else since)
        return bool(now - self._heard[rank][1] > _SILENCE_S)

    def _name(self, rank: int) -> str:
        return str(self._everyone[rank]["name"])

    def close(self, badly: bool) -> None:
        """The session is over. `badly`: others may still have to read why; rank 0 serves the store."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        with contextlib.suppress(RuntimeError, OSError):
            self._store.set(f"left/{self._rank}", "1")
            deadline = time.monotonic() + _STAY_S
            while badly and self._rank == 0 and time.monotonic() < deadline:
                alive = [rank for rank in range(1, len(self._everyone)) if not self._is_dead(rank)]
                if not alive or self._store.check([f"left/{rank}" for rank in alive]):
                    break
                time.sleep(_POLL_S)
