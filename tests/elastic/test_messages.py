"""The line between a worker and its launcher: messages come whole, in order, and its end is noticed."""

from __future__ import annotations

import fcntl
import socket
import threading
from collections.abc import Iterator

import pytest

from phalanx.launch.elastic.messages import Line


@pytest.fixture
def ends() -> Iterator[tuple[Line, socket.socket]]:
    ours, theirs = socket.socketpair()
    line = Line(ours)
    yield line, theirs
    line.close()
    theirs.close()


def test_messages_come_whole_and_in_order_however_they_are_cut(ends: tuple[Line, socket.socket]) -> None:
    line, theirs = ends
    data = b'{"is": "a"}\n{"is": "b"}\n'
    for at in range(len(data)):
        theirs.sendall(data[at : at + 1])
        message = line.receive()
        assert message == ({"is": "a"} if at == 11 else {"is": "b"} if at == len(data) - 1 else None)
    theirs.sendall(data)
    assert [line.receive(), line.receive(), line.receive()] == [{"is": "a"}, {"is": "b"}, None]
    assert not line.is_closed


def test_waiting_goes_on_until_a_message_is_whole(ends: tuple[Line, socket.socket]) -> None:
    line, theirs = ends
    theirs.sendall(b'{"is": ')
    sender = threading.Timer(0.05, theirs.sendall, (b'"late"}\n',))
    sender.start()
    assert line.receive(None) == {"is": "late"}
    sender.join()
    assert line.receive(0.01) is None and not line.is_closed


def test_what_was_said_last_is_heard_before_the_end(ends: tuple[Line, socket.socket]) -> None:
    line, theirs = ends
    theirs.sendall(b'{"is": "committed"}\n{"is": "torn')
    theirs.close()
    assert line.receive() == {"is": "committed"}
    assert line.receive() is None and line.is_closed
    assert line.receive(None) is None
    line.send({"is": "nothing"})  # to nobody


def test_a_message_larger_than_the_socket_holds_arrives(ends: tuple[Line, socket.socket]) -> None:
    line, theirs = ends
    other = Line(theirs)
    text = "x" * 3_000_000
    sender = threading.Thread(target=line.send, args=({"is": text},))
    sender.start()
    message = other.receive(5.0)
    sender.join()
    assert message == {"is": text}


def test_a_launcher_of_many_workers_has_descriptors_of_any_number(ends: tuple[Line, socket.socket]) -> None:
    with socket.socket(fileno=fcntl.fcntl(ends[1], fcntl.F_DUPFD_CLOEXEC, 1500)) as theirs:
        line = Line(theirs)
        ends[0].send({"is": "pause"})
        assert line.receive(5.0) == {"is": "pause"} and line.receive(0.01) is None
        text = "x" * 1_000_000
        sending = threading.Thread(target=line.send, args=({"text": text},))
        sending.start()
        assert ends[0].receive(5.0) == {"text": text}
        sending.join()
