"""Writing in the background, and what a fork sees of it."""

import os
import signal
import threading

import pytest

from dptrain.saving.background import Background


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_fork_does_not_wait_for_a_thread_that_it_has_not():
    background, started, end = Background(), threading.Event(), threading.Event()
    background.start(lambda: (started.set(), end.wait()))
    started.wait()
    child = os.fork()
    if not child:
        signal.alarm(5)
        background.wait()
        background.start(lambda: None)
        background.close()
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert not background._idle.is_set()
    end.set()
    background.wait()
    assert os.waitstatus_to_exitcode(status) == 0
