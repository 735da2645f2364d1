"""Python is one thread's at a time, but for what is aside."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from dptrain.runtime.in_turn import aside, in_turn


def test_python_is_one_threads_at_a_time():
    inside, most = 0, []

    def count(_):
        nonlocal inside
        with in_turn():
            for _ in range(20):
                inside += 1
                most.append(inside)
                threading.Event().wait(0.0001)  # where another thread could come in
                inside -= 1
                with aside():
                    pass

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(count, range(8)))
    assert most == [1] * 160


def test_aside_threads_meet():
    met = threading.Barrier(3)

    def meet(_):
        with in_turn(), aside():
            met.wait(20)
        return True

    with ThreadPoolExecutor(3) as pool:
        assert all(pool.map(meet, range(3)))


def test_a_turn_comes_back_after_an_error():
    with in_turn():
        with pytest.raises(KeyError), aside():
            raise KeyError
        with pytest.raises(ValueError, match="mine"), aside():
            raise ValueError("mine")
    with aside(), in_turn():  # nobody's turn is given away
        pass
