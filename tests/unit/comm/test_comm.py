"""Agreement between ranks, without MPI: ranks are threads that meet at a barrier."""

import os

import numpy as np
import pytest

from dptrain.comm import Same, SoloCommunicator, current, independent
from dptrain.comm.base import Communicator
from dptrain.errors import AgreedError, ConfigError, DataError
from tests.thread_ranks import on_ranks


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_one_failure_fails_all_with_one_message(bad):
    def action(comm: Communicator) -> None:
        def check() -> None:
            if comm.rank == bad:
                raise DataError("truncated")

        comm.agree("data", check)

    results = on_ranks(3, action)
    assert all(isinstance(error, AgreedError) for error in results)
    others = ", ".join(str(rank) for rank in range(3) if rank != bad)
    assert {str(error) for error in results} == {
        f"truncated (rank {bad}, host host{bad}, pid {os.getpid()}; no error on ranks {others})"
    }
    assert {error.exit_code for error in results} == {65}


def test_the_same_failure_everywhere_is_one_line():
    def action(comm: Communicator) -> None:
        def check() -> None:
            raise ConfigError("bad value")

        comm.agree("configuration", check)

    results = on_ranks(4, action)
    assert {str(error) for error in results} == {"bad value"}
    assert {error.exit_code for error in results} == {2}


def test_different_failures_name_the_first_and_the_others():
    def action(comm: Communicator) -> None:
        def check() -> None:
            if comm.rank:
                raise DataError(f"file {comm.rank}")

        comm.agree("data", check)

    assert {str(e) for e in on_ranks(3, action)} == {
        f"file 1 (rank 1, host host1, pid {os.getpid()}; also failed: rank 2; no error on rank 0)"
    }


def test_unexpected_exceptions_are_internal_errors_everywhere():
    def action(comm: Communicator) -> None:
        comm.agree("model", lambda: 1 / 0 if comm.rank == 1 else 1)

    results = on_ranks(2, action)
    assert {error.exit_code for error in results} == {70}
    assert all("ZeroDivisionError" in str(error) for error in results)


def test_too_little_memory_on_one_rank_is_the_devices_error_everywhere():
    def action(comm: Communicator) -> None:
        def allocate() -> None:
            if comm.rank == 1:
                raise MemoryError("unable to allocate")

        comm.agree("model", allocate)

    assert {error.exit_code for error in on_ranks(2, action)} == {69}


def test_success_returns_each_ranks_own_result():
    assert on_ranks(3, lambda comm: comm.agree("x", lambda: comm.rank * 10)) == [0, 10, 20]


def test_what_must_be_the_same_of_results_travels_with_the_agreement():
    same_facts = Same("the ranks count differently", lambda number: {"parity": number % 2}, {"parity": "count in twos"})
    assert on_ranks(3, lambda comm: comm.agree("x", lambda: comm.rank * 2, same_facts)) == [0, 2, 4]
    results = on_ranks(2, lambda comm: comm.agree("x", lambda: comm.rank, same_facts))
    assert {str(error) for error in results} == {
        "the ranks count differently: parity: rank 0 has 0, rank 1 has 1; count in twos"
    }
    assert {error.exit_code for error in results} == {2}


def test_a_failure_comes_before_what_differs():
    same_facts = Same("the ranks count differently", lambda number: {"number": number}, {})
    results = on_ranks(2, lambda comm: comm.agree("x", lambda: comm.rank / comm.rank, same_facts))
    assert {error.exit_code for error in results} == {70}
    assert all("ZeroDivisionError" in str(error) for error in results)
    assert on_ranks(3, lambda comm: comm.broadcast_fact({"r": comm.rank})) == [{"r": 0}] * 3


def test_solo():
    comm = SoloCommunicator()
    buffer = np.arange(3.0)
    comm.allreduce_sum(buffer)
    comm.broadcast(buffer)
    comm.barrier()
    assert buffer.tolist() == [0, 1, 2]
    array, fill = comm.shared_array((2, 3), np.uint8)
    assert (array.shape, array.dtype, fill) == ((2, 3), np.uint8, True)
    assert comm.allgather({"a": 1}) == [{"a": 1}]
    assert current() is current()
    assert isinstance(current(), SoloCommunicator)


def test_mail_to_oneself():
    solo = SoloCommunicator()
    assert solo.received() == []
    solo.send(0, {"run": 3})
    solo.send(0, ["x", None], bytes(range(256)))
    assert solo.received() == [(0, {"run": 3}, b""), (0, ["x", None], bytes(range(256)))]
    assert solo.received() == []


def test_numbers_of_numpy_are_facts_too():
    fact = {"size": np.int64(8), "rates": (np.float32(0.5), np.array([1, 2])), "on": np.bool_(True)}
    plain = {"size": 8, "rates": [0.5, [1, 2]], "on": True}
    solo = SoloCommunicator()
    assert solo.allgather(fact) == [plain]
    solo.send(0, fact)
    assert solo.received() == [(0, plain, b"")]
    with pytest.raises(TypeError, match="set"):
        solo.allgather({1, 2})


def test_independent_processes_train_alone():
    ranks = current()
    with independent():
        inside = current()
        assert inside.size == 1
        assert inside is not ranks
    assert current() is ranks


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_ranks_that_are_in_different_calls_learn_who_is_where(odd):
    def action(comm: Communicator) -> object:
        if comm.rank == odd:
            return comm.agree("fit", lambda: 1)
        return comm.require_same("the ranks differ", {"rows": 3})

    results = on_ranks(3, action)
    assert all(isinstance(error, AgreedError) for error in results), results
    assert {error.exit_code for error in results} == {2}
    (message,) = {str(error) for error in results}
    others = ", ".join(str(rank) for rank in range(3) if rank != odd)
    assert f"rank {odd} in agree('fit')" in message
    assert f"ranks {others} in require_same('the ranks differ')" in message


def test_facts_that_not_all_ranks_have_differ():
    results = on_ranks(2, lambda comm: comm.require_same("differ", {"a": 1, **({"b": 2} if comm.rank else {})}))
    assert {str(error) for error in results} == {"differ: b: rank 0 has None, rank 1 has 2"}


def test_what_to_do_is_said_of_facts_that_differ():
    advice = {"b": "seed it", "a": "never said"}
    results = on_ranks(2, lambda comm: comm.require_same("differ", {"a": 1, "b": comm.rank}, advice))
    assert {str(error) for error in results} == {"differ: b: rank 0 has 0, rank 1 has 1; seed it"}


@pytest.mark.parametrize(("count", "more"), [(3, ""), (4, "; and 1 more"), (10, "; and 7 more")])
def test_of_many_facts_that_differ_three_are_shown(count, more):
    results = on_ranks(2, lambda comm: comm.require_same("differ", {f"f{n}": comm.rank for n in range(count)}))
    message = "; ".join(f"f{n}: rank 0 has 0, rank 1 has 1" for n in range(3))
    assert {str(error) for error in results} == {f"differ: {message}{more}"}
