"""Signals that are noted, and what they do before and after."""

import os
import signal
import threading
import time

import pytest

from dptrain.runtime import signals
from dptrain.runtime.signals import catching, caught


def send(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.fixture(autouse=True)
def _at_once(monkeypatch):
    """Take two signals for one however long a busy machine needs between them."""
    monkeypatch.setattr(signals, "_ONE_SECONDS", 600.0)


@pytest.mark.parametrize("number", signals.SIGNALS)
def test_the_first_signal_is_noted_and_handlers_come_back(number):
    before = [signal.getsignal(each) for each in signals.SIGNALS]
    with catching():
        assert caught() is None
        with catching():
            send(number)
            send(number)  # at once: forwarded by a launcher
        assert caught() == number
    assert caught() is None
    assert [signal.getsignal(each) for each in signals.SIGNALS] == before


def test_a_second_ctrl_c_ends_at_once(monkeypatch):
    monkeypatch.setattr(signals, "_ONE_SECONDS", -1.0)
    with catching():
        send(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)


def test_a_second_signal_does_what_it_would_have_done(monkeypatch):
    received = []
    monkeypatch.setattr(signals, "_ONE_SECONDS", -1.0)
    monkeypatch.setattr(signals.os, "kill", lambda pid, number: received.append((number, signal.getsignal(number))))
    with catching():
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGUSR1)
    assert received == [(signal.SIGUSR1, signal.SIG_DFL)]


@pytest.mark.parametrize("number", signals.FROM_OUTSIDE)
def test_a_signal_interrupts_once_and_handlers_come_back(number):
    with signals.interrupting():
        with pytest.raises(signals.SignalledError, match=signal.Signals(number).name):
            send(number)
        send(number)  # at once: forwarded by a launcher
    assert signal.getsignal(number) == signal.SIG_DFL
    assert caught() is None


def test_a_handler_of_the_users_own_stays():
    received = []
    signal.signal(signal.SIGTERM, lambda *arguments: received.append(arguments))
    try:
        with signals.interrupting():
            send(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert len(received) == 1


def test_another_thread_changes_nothing():
    results = []

    def work():
        with catching():
            results.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert results == [signal.getsignal(signal.SIGTERM)]


def test_what_is_no_training_ends_by_them(monkeypatch):
    received = []
    with catching(signals.FROM_OUTSIDE):
        signals.catch_early()
        send(signal.SIGTERM)
        monkeypatch.setattr(signals.os, "kill", lambda pid, number: received.append(number))
        signals.release_early()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        assert caught() is None
    assert received == [signal.SIGTERM]


@pytest.mark.parametrize("number", signals.SIGNALS)
def test_a_step_is_abandoned_only_inside_of_one_and_only_after_a_signal(number):
    begun = []
    with catching(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(signals, "at_first", [begun.append])
        send(number)
        assert begun == [number]
        signals.abandon_step(number)  # between two steps
        with signals.in_step(), signals.in_step(False):
            signals.abandon_step(number)  # while variables are assigned
        with pytest.raises(signals.EndlessStepError) as raised, signals.abandoned_after(3):
            signals.abandon_step(number)
        assert raised.value.finished == 3
        assert caught() == number
    signals.abandon_step(signal.SIGTERM)  # nobody catches it: the process goes on


def test_a_signal_of_another_rank_is_noted_once():
    with catching():
        signals.note(signal.SIGTERM)
        signals.note(signal.SIGINT)
        assert caught() == signal.SIGTERM


def test_a_signal_to_a_handler_finds_it(monkeypatch):
    """Else Python's own handler would take it for a second Ctrl-C."""
    checked, kill = threading.Event(), signal.pthread_kill

    def late_kill(ident, number):
        checked.set()
        time.sleep(0.2)
        kill(ident, number)

    monkeypatch.setattr(signals.signal, "pthread_kill", late_kill)
    with catching():
        thread = threading.Thread(target=signals.abandon_step, args=(signal.SIGINT,))
        thread.start()
        assert checked.wait(60)
    thread.join()
