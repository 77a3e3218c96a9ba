"""The store of a run: its path is nobody else's, also when it is gone."""

from __future__ import annotations

import gc
import os

from phalanx.launch.store import RunStore, open_store


def test_a_store_that_is_destroyed_after_its_file_was_closed_writes_into_no_other_file() -> None:
    launchers = RunStore()
    path = launchers.renew()
    workers = open_store(path)
    workers.set("key", b"value")
    launchers.close()
    # Whatever the launcher opens next: files of state, sockets, another store.
    others = [os.memfd_create(f"other-{number}") for number in range(20)]
    another = RunStore()
    try:
        assert another.renew() != path and not os.path.exists(path)
        del workers
        gc.collect()
        assert [os.fstat(descriptor).st_size for descriptor in others] == [0] * 20 and not another.was_used
    finally:
        another.close()
        for descriptor in others:
            os.close(descriptor)
