"""The life of a worker process: wait for a call, make the group, run, take it down, report.

Runs in the worker only. The order of the messages is in docs/design/testing.md.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import datetime
import faulthandler
import os
import pickle
import random
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import numpy
import torch
import torch.distributed as dist

from tests.cluster import preload
from tests.cluster.call import STACKS_SIGNAL, Call, Clean, Raised, Release, Returned, StoreAt, StorePort
from tests.cluster.leaks import Leak, Watch

_PR_SET_PDEATHSIG = 1


def serve(connection: Connection, stacks_path: str) -> None:
    """Answer calls until the other end closes, or once if the call is for a fresh process."""
    # Its own process group, so that killing the worker also kills what it started.
    os.setpgid(0, 0)
    # Die with the fork server, which dies with pytest: a killed test run leaves nobody behind.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    torch.set_num_threads(1)
    with open(stacks_path, "w") as stacks:
        faulthandler.register(STACKS_SIGNAL, file=stacks, all_threads=True)
        watch = Watch()
        while True:
            try:
                call = pickle.loads(connection.recv_bytes())
            except EOFError:
                return
            if call.fresh:
                _serve_fresh(connection, call)
                return
            _serve_pooled(connection, call, watch)


def _serve_pooled(connection: Connection, call: Call, watch: Watch) -> None:
    watch.begin()
    with _surroundings(call):
        succeeded = _run_and_report(connection, call)
        # Also after a failure: the peers then see what they would see of a process that ended.
        succeeded = _leave_and_report(connection) and succeeded
    if succeeded:
        # The surroundings have just been put back, so the environment needs no look.
        _send(connection, Clean(watch.leaks({*call.allowed_leaks, Leak.ENVIRONMENT})))


def _serve_fresh(connection: Connection, call: Call) -> None:
    try:
        with _surroundings(call):
            # After a failure the group ends with the process, as it does when a script raises.
            if not (_run_and_report(connection, call) and _leave_and_report(connection)):
                sys.exit(1)
        _send(connection, Clean([]))
    finally:
        # multiprocessing ends its children without running exit functions; a user's script runs
        # them, and code under test may rely on them to clean up.
        atexit._run_exitfuncs()


def _run_and_report(connection: Connection, call: Call) -> bool:
    """Run the call and report how it ended; after a return, wait to be released."""
    try:
        payload = _run(connection, call)
    except BaseException as error:
        if call.fresh and isinstance(error, SystemExit):
            raise
        _send(connection, Raised(traceback.format_exc()))
        return False
    _send(connection, Returned(payload))
    # Ranks leave the group together: one that left early would close connections, and rank 0's
    # store, under a rank that still uses them.
    _receive(connection, Release)
    return True


def _leave_and_report(connection: Connection) -> bool:
    try:
        if dist.is_initialized():
            dist.destroy_process_group()
    except BaseException:
        _send(connection, Raised(traceback.format_exc()))
        return False
    return True


def _run(connection: Connection, call: Call) -> bytes:
    if preload.PHALANX_IMPORT_ERROR is not None:
        raise ImportError(f"phalanx does not import:\n{preload.PHALANX_IMPORT_ERROR}")
    fn, args, kwargs = pickle.loads(call.payload)
    if call.backend is not None:
        store = _join_store(connection, call)
        dist.init_process_group(
            call.backend,
            store=store,
            rank=call.rank,
            world_size=call.world,
            timeout=datetime.timedelta(seconds=call.pg_timeout_s),
        )
        _await_all_in_group(store, call)
    random.seed(call.seed)
    numpy.random.seed(call.seed)
    torch.manual_seed(call.seed)
    return pickle.dumps(fn(call.rank, call.world, *args, **kwargs))


def _join_store(connection: Connection, call: Call) -> dist.Store:
    """The call's own store, hosted by rank 0 on a port of its choice.

    The others are told the port once rank 0 listens: a refused connection is retried only after
    a second.
    """
    timeout = datetime.timedelta(seconds=call.pg_timeout_s)
    if call.rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, call.world, True, timeout, wait_for_workers=False)
        _send(connection, StorePort(store.port))
        return store
    port = _receive(connection, StoreAt).port
    return dist.TCPStore("127.0.0.1", port, call.world, False, timeout)


def _await_all_in_group(store: dist.Store, call: Call) -> None:
    """A test may kill its rank at once; the others must have made their connections by then."""
    store.set(f"in group/{call.rank}", "")
    store.wait([f"in group/{rank}" for rank in range(call.world)])


@contextlib.contextmanager
def _surroundings(call: Call) -> Iterator[None]:
    """What a call sees around it, and the undoing of what it changed there."""
    environment, directory = dict(os.environ), os.getcwd()
    sys.path[:] = call.sys_path
    os.environ.update(
        RANK=str(call.rank),
        LOCAL_RANK=str(call.rank),
        WORLD_SIZE=str(call.world),
        LOCAL_WORLD_SIZE=str(call.world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(call.master_port),
    )
    os.environ.update(call.env)
    try:
        with warnings.catch_warnings():
            yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(directory)
        torch.set_num_threads(1)
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)
        # Asked first, since setting it imports the whole of inductor.
        if torch.are_deterministic_algorithms_enabled():
            torch.use_deterministic_algorithms(False)


def _send(connection: Connection, message: Any) -> None:
    connection.send_bytes(pickle.dumps(message))


def _receive(connection: Connection, kind: type) -> Any:
    message = pickle.loads(connection.recv_bytes())
    assert isinstance(message, kind), f"expected {kind.__name__}, got {message}"
    return message
