"""A signal is noted while somebody waits, and has its old effect afterwards."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from paddle_dp.launch.signals import Signals


@pytest.fixture(autouse=True)
def heeded():
    """A shell's background job, and nohup, have signals ignored from birth, which `Signals` respects."""
    numbers = (signal.SIGINT, signal.SIGHUP)
    before = [signal.signal(number, signal.default_int_handler) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_are_noted_and_counted(number):
    before = signal.getsignal(number)
    with Signals() as told:
        assert (told.number, told.name) == (0, "")
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)
        assert (told.number, told.times, told.name) == (number, 2, signal.Signals(number).name)
    assert signal.getsignal(number) is before


def test_the_first_signal_counts():
    with Signals() as told:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
    assert told.number == signal.SIGTERM


def test_nohup_stays_in_force():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Signals() as told:
            os.kill(os.getpid(), signal.SIGHUP)
        assert told.number == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_another_thread_changes_nothing():
    def wait():
        with Signals():
            seen.append(signal.getsignal(signal.SIGTERM))

    seen: list[object] = []
    thread = threading.Thread(target=wait)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGTERM)]
