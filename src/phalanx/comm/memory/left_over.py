"""What autograd keeps of a backward that raised: let go of before somebody misses the memory.

Each thread that calls `backward` has a queue of nodes that are ready to run. When a node or a hook raises, the engine leaves
its loop, and the nodes that were ready stay in the queue, with all that follows them in the graph: parameters, saved
activations. They are dropped when the thread begins its next backward. Until then a program that goes on would hold two
graphs through its next forward, and one that leaves its group would keep the group's shared memory.

Knows nothing of wrappers; who sees a pass raise says so.
"""

from __future__ import annotations

import threading

import torch

# The threads whose last backward raised.
_threads: set[int] = set()


def backward_raised() -> None:
    """A backward of this thread raises, or is about to."""
    _threads.add(threading.get_ident())


def drop_left_over() -> None:
    """If a backward of this thread has raised since the last time: have autograd let go of what is left of it.

    Inside of a backward nothing is done: the queue is in use.
    """
    me = threading.get_ident()
    # Private, but the only way to know; tests/ddp/test_torch_internals.py notices if it moves.
    if me not in _threads or torch._C._current_graph_task_id() != -1:
        return
    _threads.discard(me)
    with torch.enable_grad():
        torch.zeros((), requires_grad=True).clone().backward()
