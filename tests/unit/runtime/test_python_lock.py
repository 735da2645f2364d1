"""Python is one thread's at a time, but for what has released the lock."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from dptrain.runtime.python_lock import acquired, released


def test_python_is_one_threads_at_a_time():
    inside, most = 0, []

    def count(_):
        nonlocal inside
        with acquired():
            for _ in range(20):
                inside += 1
                most.append(inside)
                threading.Event().wait(0.0001)  # where another thread could come in
                inside -= 1
                with released():
                    pass

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(count, range(8)))
    assert most == [1] * 160


def test_threads_that_released_the_lock_meet():
    met = threading.Barrier(3)

    def meet(_):
        with acquired(), released():
            met.wait(20)
        return True

    with ThreadPoolExecutor(3) as pool:
        assert all(pool.map(meet, range(3)))


def test_the_lock_is_taken_back_after_an_error():
    with acquired():
        with pytest.raises(KeyError), released():
            raise KeyError
        with pytest.raises(ValueError, match="mine"), released():
            raise ValueError("mine")
    with released(), acquired():  # releases nobody's lock
        pass
