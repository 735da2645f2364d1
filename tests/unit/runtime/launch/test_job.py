"""What a rank's end means for the others."""

import itertools
import selectors
import signal
import socket

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dptrain.runtime.launch import job as job_module
from dptrain.runtime.launch.job import Job, Start, _Connection, _Rank, own_addresses
from dptrain.runtime.launch.mpirun import Launcher
from tests.sample import examples

# A rank: how it ended (None: it runs; "gone": with its supervisor), whether in MPI, seconds ago.
RUNS, RUNS_IN_MPI = (None, False, 0), (None, True, 0)
LEFT = (0, True, 0)


def job_of(*ranks, size=None, stop_signal=None, now=100.0):
    start = Start(Launcher("MPICH", ("/bin/mpirun",)), ("true",), size or len(ranks), {}, ("127.0.0.1",), grace=20)
    job = Job(start, [])
    job._stop_signal = stop_signal
    job._began = 0.0
    for number, (status, in_mpi, ago) in enumerate(ranks):
        ended = None if status is None else now - ago
        rank = _Rank(
            number, "host", 1000 + number, socket.socket(), None if status == "gone" else status, ended, in_mpi
        )
        rank.connection.close()
        job._ranks[number] = rank
    return job


def verdict(*ranks, mpirun=None, later=0.0, **options):
    """Return code and text of what is decided at once, or `later`, or None."""
    job = job_of(*ranks, **options)
    job._mpirun_ended = None if mpirun is None else 99.0
    outcome = job._judge(100.0, mpirun) or job._judge(100.0 + later, mpirun)
    return outcome and (outcome.code, outcome.text.partition("launch: ")[2])


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([LEFT, LEFT], (0, "")),
        ([RUNS, RUNS], None),
        ([RUNS, (3, False, 0)], (3, "exited with code 3")),
        ([(5, True, 1), (3, True, 2)], (3, "exited with code 3")),  # the first one
        ([RUNS, (-9, True, 0)], (137, "was killed by SIGKILL (out of memory?)")),
        ([RUNS, (-35, True, 0)], (163, "was killed by signal 35")),
        ([(0, False, 0), RUNS], None),  # no program of MPI
        ([(0, False, 0), RUNS, RUNS_IN_MPI], (77, "exited with code 0 without MPI, so that ranks 1, 2 would wait")),
        ([(75, True, 0), (75, True, 0)], (75, "")),
        ([(75, True, 0), (3, True, 0)], (3, "exited with code 3")),
        ([("gone", True, 3), RUNS], (137, "is gone, and its supervisor too")),
        ([("gone", True, 0), RUNS], None),
        ([("gone", True, 3), ("gone", True, 3)], None),  # as after MPI_Abort
        ([("gone", True, 11), ("gone", True, 11)], (137, "is gone, and its supervisor too")),
        ([(-15, True, 0), RUNS], None),  # by mpirun, which will say why, or
        ([(-15, True, 3), RUNS], (143, "was killed by SIGTERM")),
    ],
)
def test_ends(ranks, expected):
    actual = verdict(*ranks, later=2.0 if expected and expected[0] == 77 else 0.0)
    assert actual is expected is None or (actual[0], actual[1][: len(expected[1])]) == expected


def test_who_exits_with_0_in_the_middle_has_failed():
    job = job_of((0, True, 0), RUNS_IN_MPI)
    connection = _Connection(socket.socket(), rank=job._ranks[0])
    assert job._judge(100.0, None) is None
    assert job._note(connection, ["unfinished"])
    outcome = job._judge(100.0, None)
    assert outcome is not None
    assert outcome.code == 77
    assert outcome.text.endswith("exited with code 0 in the middle of the job (C's _exit, or MPI_Abort?)")
    job._ranks[0].status = 3
    assert job._judge(100.0, None).code == 3
    connection.socket.close()


@pytest.mark.parametrize("first", [LEFT, (75, False, 0)])
def test_one_that_has_left_in_peace_is_followed_in_time(first):
    assert verdict(first, RUNS_IN_MPI, later=19.0) is None
    code, text = verdict(first, RUNS_IN_MPI, later=21.0)
    assert code == (first[0] or 77)
    assert text == f"exited with code {first[0]}, and rank 1 did not within 20 s"


@pytest.mark.parametrize("status", [-signal.SIGTERM, 128 + signal.SIGTERM, 75, 0])
def test_who_is_told_to_stop_may_stop(status):
    assert verdict((status, True, 0), RUNS_IN_MPI, stop_signal=signal.SIGTERM, later=10.0) is None
    ended = verdict((status, True, 0), (status, True, 0), stop_signal=signal.SIGTERM)
    assert ended == (143 if abs(status) in (15, 143) else status, "")


def test_a_command_that_cannot_be_told_to_save_is_preempted_all_the_same():
    code, text = verdict((-signal.SIGUSR1, False, 0), stop_signal=signal.SIGUSR1)
    assert (code, text.endswith("nothing was saved")) == (75, True)


@pytest.mark.parametrize(
    ("ranks", "size", "mpirun", "expected"),
    [
        ([("gone", True, 0)] * 2, 2, 7, (7, "mpirun ended the job with exit code 7")),
        ([RUNS, RUNS], 2, -9, (137, "mpirun was killed by SIGKILL (out of memory?)")),
        ([RUNS], 2, 255, (255, "mpirun exited with code 255 before all ranks had started")),
        ([("gone", True, 0)] * 2, 2, 0, (70, "mpirun ended the job with exit code 0")),
        ([("gone", True, 0), (4, True, 0)], 2, 7, (4, "exited with code 4")),
    ],
)
def test_what_mpirun_says(ranks, size, mpirun, expected):
    assert verdict(*ranks, size=size, mpirun=mpirun) == expected


def test_all_ranks_must_start_in_time():
    assert verdict(RUNS, size=3, later=100.0) is None
    assert verdict(RUNS, size=3, later=250.0) == (77, "ranks 1, 2 did not start within 300 s")


def test_only_supervisors_of_this_job_are_heard():
    job = job_of(size=1)
    stranger = _Connection(socket.socket())
    for line in (
        "hello",
        f"hello {'0' * 32} 0 host 1",
        "hello \ufffd 0 host 1",
        "GET / HTTP/1.1",
        f"exit {job._token} 0 h 1",
    ):
        assert not job._note(stranger, line.split())
    assert job._note(stranger, f"hello {job._token} 0 host 1".split())
    assert job._ranks[0].pid == 1
    stranger.socket.close()


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(1, 6), st.data())
def test_every_rank_hears_of_a_signal_once_whenever_it_starts(size, data):
    number = data.draw(st.sampled_from([signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]))
    events = data.draw(st.permutations([*range(size), "signal", "look", "look"]))
    start = Start(Launcher("MPICH", ("/bin/mpirun",)), ("true",), size, {}, ("127.0.0.1",))
    job = Job(start, [])
    pairs = {}
    for event in events:
        if isinstance(event, int):
            ours, theirs = pairs[event] = socket.socketpair()
            assert job._note(_Connection(ours), ["hello", job._token, str(event), "host", "17"])
        elif event == "signal":
            job._signals.append(number)
        else:
            job._obey(100.0)
    job._obey(100.0)
    before = job._verdict is not None  # there was no rank when `launch` took the signal
    heard = set()
    for ours, theirs in pairs.values():
        ours.close()
        heard.add(theirs.makefile().read())
        theirs.close()
    assert before or heard == {f"signal {int(number)}\n"}
    assert not before or (job._verdict.code in (75, 130) and heard == {""})


@settings(max_examples=examples(40), deadline=None)
@given(st.lists(st.integers(0, 60), max_size=8))
def test_what_a_rank_says_is_heard_however_it_is_cut(cuts):
    job = job_of(size=1)
    text = f"hello {job._token} 0 host 17\nmpi\nunfinished\nexit 3\n".encode()
    ends = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    ours, theirs = socket.socketpair()
    with job._selector, ours, theirs:
        ours.setblocking(False)
        key = job._selector.register(ours, selectors.EVENT_READ, _Connection(ours))
        for start, end in itertools.pairwise(ends):
            theirs.sendall(text[start:end])
            job._hear(key)
        rank = job._ranks[0]
        assert (rank.pid, rank.host, rank.status, rank.in_mpi) == (17, "host", 3, True)


def test_connections_that_say_nothing_are_closed():
    job = job_of(RUNS, size=1)
    job._ranks.clear()
    with job._selector, socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        job._selector.register(server, selectors.EVENT_READ)
        (key,) = job._selector.get_map().values()
        callers = [socket.create_connection(server.getsockname()) for _ in range(3)]
        for number in range(3):
            job._hear(key)
            next(key for key in job._selector.get_map().values() if key.data).data.since -= number  # in order
        (ours, *others) = [key.data for key in job._selector.get_map().values() if key.data]
        assert job._note(ours, f"hello {job._token} 0 host 1".split())
        now = max(connection.since for connection in others)
        job._drop_strangers(now)
        assert len(job._selector.get_map()) == 4
        job._drop_strangers(now + 31)
        assert [key.data for key in job._selector.get_map().values() if key.data] == [ours]
        for caller in (ours.socket, *callers):
            caller.close()


def test_strangers_beyond_a_number_are_closed(monkeypatch):
    monkeypatch.setattr(job_module, "_STRANGERS", 1)
    job = job_of(RUNS, size=1)
    pairs = [socket.socketpair() for _ in range(4)]
    with job._selector:
        for number, (ours, _) in enumerate(pairs):
            job._selector.register(ours, selectors.EVENT_READ, _Connection(ours, since=float(number)))
        job._drop_strangers(4.0)
        left = [key.data.since for key in job._selector.get_map().values()]
    assert left == [2.0, 3.0], "the last ones, one of which may be a rank"
    for pair in pairs:
        for end in pair:
            end.close()


def test_addresses_of_this_host():
    assert own_addresses(["127.0.0.2", "no.such.host.invalid"])[0].startswith("127.")
