"""Limits, and what a watchdog does with what it sees."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from dptrain.errors import AgreedError, MismatchError
from dptrain.runtime.failure import Phase
from dptrain.runtime.launch import children
from dptrain.runtime.launch.launcher import LaunchInfo
from dptrain.runtime.watch import records, watchdog
from dptrain.runtime.watch.hang_detection import Limits
from dptrain.runtime.watch.records import Collective, RecordTable, State
from dptrain.runtime.watch.watchdog import Watchdog
from tests.launching import python


@pytest.fixture
def pair(tmp_path, monkeypatch):
    """The watchdog of rank 0, the record of rank 1, and what is printed and how the job is ended."""
    table = RecordTable(str(tmp_path / "job"), 2)
    own_record = records.look_up(os.getpid())
    assert own_record is not None
    for record in table.records:
        record.claim(os.getpid(), own_record.started)
        record.state = State.JOINED
        Phase("training").show(*record.phase_memory)
    messages: list[object] = []
    monkeypatch.setattr(watchdog, "abort", messages.append)
    dog = Watchdog(LaunchInfo("MPICH", 2, 0, 2), table)
    monkeypatch.setattr(dog, "_print", messages.append)
    return dog, table.records[1], messages


def look(dog, seconds):
    """Let a watchdog look on for that long, by its own clock."""
    dog._look()
    for _ in range(round(seconds * 5)):
        dog._awake += 0.2
        dog._look()


def test_a_peer_that_leaves_while_this_rank_waits_ends_the_job(pair):
    dog, peer, messages = pair
    peer.state, peer.place = State.LEFT, "the end of its script"
    look(dog, 5)
    assert messages == [], "nobody waits"
    with dog.record.collective(Collective.ALL_REDUCE, 8, "f"):
        look(dog, 0.8)
        assert messages == []
        look(dog, 0.4)
    line, code = messages[:2]
    assert str(line).startswith("dptrain: rank 1/2 host ")
    assert f"pid {os.getpid()} " in str(line)
    assert "at the end of its script: left while rank 0 waits in an all-reduce of 8 float32" in str(line)
    assert code == 77


@pytest.mark.parametrize(
    ("position", "kind", "count", "dtype", "differs"),
    [
        (1, Collective.ALL_REDUCE, 9, "f", True),
        (1, Collective.ALL_REDUCE, 8, "d", True),
        (1, Collective.ALL_REDUCE, 8, "f", False),
        (1, Collective.REDUCE_SCATTER, 8, "f", True),
        (1, Collective.ALL_GATHER, 0, "\0", False),  # who is in another call stays there, and is found by looking
        (0, Collective.ALL_REDUCE, 9, "f", False),
        (3, Collective.ALL_REDUCE, 9, "f", False),
    ],
)
def test_what_ranks_meet_in_otherwise_is_found_before_mpi_does_it(pair, position, kind, count, dtype, differs):
    dog, peer, _ = pair
    ring = dog.ring([0, 1])
    for _ in range((position + 1) // 2):
        peer.collective(kind, count, dtype).__enter__()
        if position > 1:
            peer.__exit__()
            position -= 2
    with dog.record.collective(Collective.ALL_REDUCE, 8, "f"):
        if not differs:
            ring.check()
            return
        expected = (
            r"rank 0 in an all-reduce of 8 float32 \(training\), rank 1 in an? (all-re|re)duc.* \d float(32|64) \(tr"
        )
        with pytest.raises(MismatchError, match=expected) as caught:
            ring.check()
    assert caught.value.exit_code == 77


def test_a_peer_that_does_not_come_is_warned_of_once_and_then_ends_the_job(pair):
    dog, _, messages = pair
    dog.limits = Limits(warning=2, timeout=4)
    with dog.record.collective(Collective.ALL_GATHER):
        look(dog, 3)
        (warning,) = messages
        assert str(warning).endswith("(a warning)")
        assert "its process is running and has used" in str(warning)
        look(dog, 1.2)
    assert messages[2] == 77


def test_progress_of_the_peer_is_no_stall(pair):
    dog, peer, messages = pair
    dog.limits = Limits(warning=1, timeout=2)
    for _ in range(10):
        with dog.record.collective(Collective.ALL_GATHER):
            look(dog, 0.8)
            with peer.collective(Collective.ALL_GATHER):
                look(dog, 0.2)
    assert messages == []


def test_a_judge_that_slept_itself_counts_a_moment_only(pair, monkeypatch):
    """As where all ranks are stopped and go on later."""
    dog, _, messages = pair
    dog.limits = Limits(warning=0, timeout=50)
    times = iter([0.0, 1000.0, 2000.0, 3000.0])
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: next(times))
    waiting_states = iter([False, False, False, True])
    monkeypatch.setattr(dog, "_sleep", lambda pause: next(waiting_states))
    with dog.record.collective(Collective.ALL_GATHER):
        dog._watch()
    assert dog._awake == 3.0
    assert messages == []


def test_what_another_node_tells_is_judged_as_what_is_seen_here(pair):
    dog, peer, messages = pair
    box: dict[int, list[bytes]] = {0: [], 1: []}

    class Post(watchdog.Post):
        def __init__(self, rank):
            self.rank = rank

        def send(self, rank, message):
            box[rank].append(message)

        def received(self):
            mail, box[self.rank] = box[self.rank], []
            return [(1 - self.rank, message) for message in mail]

        def arrive(self):
            return lambda: True

    other = Watchdog(LaunchInfo("MPICH", 2, 1, 2), dog._table)
    for each in (dog, other):
        each._here, each._leaders, each._post = [each.launch.rank], (0, 1), Post(each.launch.rank)
    dog.limits = Limits(warning=0, timeout=6)
    dog.record.collective(Collective.ALL_GATHER).__enter__()
    for _ in range(10):
        look(dog, 0.2)
        look(other, 0.2)
    assert messages == []
    look(dog, 5)  # without a word of the other
    assert "nothing has been heard from" in str(messages[0])
    messages.clear()
    dog._finding = None
    peer.state = State.LEFT
    look(other, 1)
    look(dog, 0.2)
    assert "left while rank 0 waits in an all-gather" in str(messages[0])


def test_who_is_on_another_node_and_never_heard_from_is_named(pair, monkeypatch):
    class Post(watchdog.Post):
        def send(self, rank, message):
            pass

        def received(self):
            return []

        def arrive(self):
            return lambda: True

    dog, _, messages = pair
    monkeypatch.setattr(os, "_exit", os._exit)  # `joined` replaces it
    dog.limits = Limits(warning=0, timeout=2)
    dog.record.collective(Collective.START).__enter__()
    dog.joined([0], {0: ("here", os.getpid()), 1: ("there", 4711)}, Post())
    with dog.record.collective(Collective.ALL_GATHER):
        look(dog, 3)
    assert str(messages[0]).startswith("dptrain: rank 1/2 host there pid 4711 ")
    assert "nothing has been heard from there" in str(messages[0])
    assert messages[1] == 77


def test_leaving_waits_for_the_others_and_removes_the_file(pair):
    dog, _, _ = pair
    answers = iter([False, False, True])

    class Post(watchdog.Post):
        def send(self, rank, message):
            raise AssertionError("there is one node")

        def received(self):
            return []

        def arrive(self):
            return lambda: next(answers)

    dog._post = Post()
    dog._thread = threading.Thread(target=dog._watch)
    dog._thread.start()
    dog.leave("the end of its script")
    assert next(answers, None) is None
    dog._thread.join(60)
    assert not dog._thread.is_alive()
    assert dog.record.state == State.LEFT
    assert not os.path.exists(dog._table.path)
    dog.leave("again")
    assert dog.record.place == "the end of its script"


def test_limits_come_from_the_environment_where_they_are_not_given(pair, monkeypatch):
    dog, _, _ = pair
    monkeypatch.setattr(watchdog, "_watchdog", dog)
    watchdog.limit(environ={})
    assert dog.limits == Limits(60, 300)
    environment = {"DPTRAIN_STALL_WARNING": "5", "DPTRAIN_STALL_TIMEOUT": " 7.5 "}
    watchdog.limit(environ=environment)
    assert dog.limits == Limits(5, 7.5)
    watchdog.limit(0, 9, environ=environment)
    assert dog.limits == Limits(0, 9)
    for wrong in ("-1", "soon", "nan", "inf"):
        with pytest.raises(
            AgreedError, match=f"DPTRAIN_STALL_TIMEOUT = '{wrong}': expected seconds, or 0 for no limit"
        ):
            watchdog.limit(environ={"DPTRAIN_STALL_TIMEOUT": wrong})


@pytest.mark.parametrize(
    ("ranks", "cores", "seconds"), [(2, 1, 0.2), (64, 64, 0.2), (128, 128, 0.4), (16, 2, 0.2), (100, 2, 1.25)]
)
def test_many_ranks_look_at_each_other_less_often(ranks, cores, seconds):
    assert watchdog.seconds_between_looks(ranks, cores) == seconds


class Beside:
    """Ranks of a node as threads; `exchange(rank)` is the collective of one of them."""

    def __init__(self, ranks):
        self._barrier, self._given = threading.Barrier(ranks), [None] * ranks

    def exchange(self, rank):
        def exchange(fact):
            self._given[rank] = fact
            self._barrier.wait(60)
            facts = list(self._given)
            self._barrier.wait(60)
            return facts

        return exchange


def shared(dogs):
    """Let watchdogs of ranks of a node agree on a table; return what each has to say."""
    beside = Beside(len(dogs))
    with ThreadPoolExecutor(len(dogs)) as pool:
        return list(pool.map(lambda dog: dog.share_table(beside.exchange(dog.launch.rank)), dogs))


@pytest.mark.parametrize("without", [[0], [1], [0, 2], [0, 1, 2]])
def test_ranks_whose_file_somebody_has_taken_move_to_a_drawn_one(tmp_path, monkeypatch, without):
    monkeypatch.setattr(records, "FOLDER", str(tmp_path))
    path, process = str(tmp_path / "job"), records.look_up(os.getpid())
    dogs = []
    for rank in range(3):
        table = RecordTable("" if rank in without else path, 3)
        table.records[rank].claim(os.getpid(), process.started)
        dogs.append(Watchdog(LaunchInfo("MPICH", 3, rank, 3), table, launcher=(7, 8)))
        look(dogs[-1], 0.4)
    held = [dog.record for dog in dogs]
    assert shared(dogs) == ["", "", ""]
    (path,) = {dog._table.path for dog in dogs}
    assert [entry.name for entry in tmp_path.iterdir()] == [os.path.basename(path)]
    for dog, record in zip(dogs, held, strict=True):
        assert dog.record is record
        record.place = f"rank {dog.launch.rank}"
        assert [other.records[dog.launch.rank].place for other in dogs] == [record.place] * 3
    assert shared(dogs) == ["", "", ""]
    assert {dog._table.path for dog in dogs} == {path}, "they have one"


def test_ranks_that_cannot_watch_each_other_say_so(monkeypatch, capfd, tmp_path):
    monkeypatch.setattr(records, "FOLDER", str(tmp_path / "missing"))
    for name, value in {"PMI_SIZE": "2", "PMI_RANK": "0", children.VARIABLE: ""}.items():
        monkeypatch.setenv(name, value)
    dog = Watchdog(LaunchInfo("MPICH", 2, 0, 2), RecordTable("", 2), launcher=(7, 8))
    monkeypatch.setattr(watchdog, "_watchdog", dog)
    watchdog.share_table(lambda fact: [fact])
    line = capfd.readouterr().err
    assert line.startswith(f"dptrain: warning: {tmp_path}/missing: No such file or directory: the ranks cannot watch")
    look(dog, 2000)


def test_a_process_alone_has_no_watchdog(monkeypatch):
    monkeypatch.delenv("PMI_SIZE", raising=False)
    before = set(threading.enumerate())
    watchdog.enlist()
    with watchdog.joining(environ={}):
        watchdog.leave("nothing")
    assert set(threading.enumerate()) <= before
    assert watchdog._watchdog is None


@pytest.mark.parametrize("positions", [(0, 0, 0), (1, 1, 3), (8, 5, 6), (7, 2, 9), (2, 11, 10)])
def test_ranks_that_abandon_a_step_go_on_from_one_position_behind_all_of_theirs(tmp_path, positions):
    """Each may have been in another of the step's collectives, or between two."""
    table = RecordTable(str(tmp_path / "job"), 3)
    dogs = [Watchdog(LaunchInfo("MPICH", 3, rank, 3), table) for rank in range(3)]
    for record, position in zip(table.records, positions, strict=True):
        record.move_to(position)
    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(lambda dog: dog.abandon_step(20.0), dogs)) == [True] * 3
    (after,) = {record.position for record in table.records}
    assert after > max(positions)
    assert after % 2 == 0, "in no collective"


def test_a_rank_that_does_not_abandon_its_step_keeps_others_from_going_on(tmp_path):
    table = RecordTable(str(tmp_path / "job"), 2)
    assert not Watchdog(LaunchInfo("MPICH", 2, 0, 2), table).abandon_step(0.05)
    assert not Watchdog(LaunchInfo("MPICH", 4, 1, 2), table).abandon_step(20.0), "ranks of other nodes are not seen"


GARBAGE = """
import faulthandler, gc, threading
from dptrain.runtime.watch import watchdog
faulthandler.dump_traceback_later(60, exit=True)
gc.set_threshold(1)
for _ in range(100):
    cycle = {"local": threading.local()}
    cycle["self"] = cycle
    del cycle
    assert watchdog._place()
print(gc.isenabled())
"""


def test_garbage_of_the_main_thread_does_not_stop_its_watchdog():
    assert python(0, "-c", GARBAGE, fresh=True).out == "True\n"
