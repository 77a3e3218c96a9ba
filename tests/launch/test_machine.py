"""The doctor's questions, with the machine made ill on purpose."""

from __future__ import annotations

import os
import resource
import socket
import time
from unittest import mock

import pytest

from phalanx.launch import machine
from phalanx.launch.machine import Level


def test_a_healthy_machine_has_no_bad_answer() -> None:
    answers = machine.examine()
    assert len(answers) == len(machine.QUESTIONS)
    assert [answer for answer in answers if answer.level is Level.BAD] == []


@pytest.mark.parametrize(
    ("illness", "question", "remedy"),
    [
        (mock.patch.dict(os.environ, OMP_NUM_THREADS="9999"), machine.threads, "Unset it"),
        (mock.patch.dict(os.environ, OMP_NUM_THREADS="many"), machine.threads, "Unset it"),
        (mock.patch("sys.version_info", (3, 9, 1)), machine.python, "Install Python 3.11"),
        (mock.patch("torch.__version__", "2.6.0+cpu"), machine.torch_build, "torch>=2.13"),
        (mock.patch("torch.distributed.is_gloo_available", return_value=False), machine.backends, "with gloo"),
        (mock.patch("os.memfd_create", side_effect=OSError("not here")), machine.shared_memory, "gloo works"),
        (mock.patch("os.ftruncate", side_effect=OSError("no space")), machine.shared_memory, "memory limit"),
        (mock.patch("socket.create_connection", side_effect=OSError("refused")), machine.loopback, "firewall"),
        (mock.patch("socket.getaddrinfo", side_effect=socket.gaierror()), machine.host_name, "/etc/hosts"),
        (mock.patch("resource.getrlimit", return_value=(64, 4096)), machine.limits, "ulimit -n 4096"),
        (
            mock.patch("psutil.virtual_memory", return_value=mock.Mock(available=1_000)),
            machine.memory,
            "End other programs",
        ),
        (mock.patch("time.gmtime", return_value=time.gmtime(0)), machine.clock, "Set the clock"),
    ],
)
def test_an_illness_is_found_and_has_a_remedy(illness, question, remedy: str) -> None:  # type: ignore[no-untyped-def]
    with illness:
        answer = question()
    assert answer.level is Level.BAD and remedy in answer.remedy


def test_a_clock_that_jumps_is_found() -> None:
    real = time.time
    with mock.patch("time.time", side_effect=[real(), real() + 3600]):
        assert machine.clock(pause=lambda _: None).level is Level.BAD


def test_an_address_space_limit_is_only_noted() -> None:
    with mock.patch("resource.getrlimit", side_effect=[(9999, 9999), (10**10, resource.RLIM_INFINITY)]):
        assert machine.limits().level is Level.NOTE


def test_a_question_that_breaks_is_a_bad_answer() -> None:
    def broken() -> machine.Answer:
        raise ZeroDivisionError("oops")

    with mock.patch.object(machine, "QUESTIONS", (broken,)):
        (answer,) = machine.examine()
    assert answer.level is Level.BAD and "oops" in answer.text
