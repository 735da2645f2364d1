"""A rank that is stopped, loops, leaves or calls something else ends the job, with a line that names it."""

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.launching import Finished, find_mpirun, mpirun

SCRIPT = str(ROOT / "tests/mpi/scripts/stuck.py")
# MPICH's ranks are then each on a node of their own, as far as MPI and so dptrain can tell.
APART = {"MPIR_CVAR_NOLOCAL": "1"}
# Or in turn on two: of three, ranks 0 and 2 share one, of which only rank 0 sends to the other.
TWO = {"MPIR_CVAR_NUM_CLIQUES": "2"}


@dataclass(frozen=True)
class Case:
    """What is planted, and what is to be said of it.

    Attributes:
        way: see the script.
        bad: the rank.
        text: what follows host and PID in the last line, as a regular expression.
        ranks: of the job.
        environment: of the job.
        code: that it exits with.
    """

    way: str
    bad: int
    text: str
    ranks: int = 2
    environment: dict[str, str] = field(default_factory=dict)
    code: int = 77


STEP = "training, epoch 1, step 3"
PLACE = r"[\w.]+:\d+ in \S+"
STOPPED = r"has been stopped for \d+ s"
SILENT = r"ended without reporting an error \(os._exit, or a signal\?\)"
ABSENT = r"has not arrived for \d+ s"
DIFFERENT = "the ranks call different methods:"
CALLS = f"{DIFFERENT} rank 0 in an all-reduce of 1 int32"
PARTS = rf"an all-gather of 10000 float64 in parts with the checksum [0-9a-f]{{8}} \({STEP}\)"
END = "at the end of its script: left while rank 0 waits in"
LATE = r"has not reached the end of its script for \d+ s while rank 0 waits there; its process is running"
LATE_AT = {
    "sleep": r"stuck.py:\d+ in <lambda>",
    "thread": r"stuck.py:\d+ in <lambda> of thread 'loader', which is not a daemon",
    "hook": r"stuck.py:\d+ in <lambda>",
}
AFTER = r"\(fit, evaluate, predict, save, ...\) after the end of the script"
CAUGHT = (
    r"start-up: raised an error in an all-gather, which its code caught, while ranks 0, 2 wait there: "
    r"IndexError: list index out of range \(stuck.py:\d+\)"
)
CASES = [
    Case("hook: stop", 1, f"{STEP}, last seen at {PLACE}: {STOPPED} while rank 0 waits in an all-reduce of 1"),
    Case("hook: lock", 0, f"{STEP}, last seen at {PLACE}: {ABSENT} while ranks 1-2 wait in an all-reduce", 3),
    # What another node has last heard of it depends on the moment.
    Case("hook: stop", 2, f".*: {ABSENT} while ranks 0-1 wait in an all-", 3, APART),
    Case("hook: exit 0", 1, STEP + r": SystemExit: 0 \(stuck.py:\d+\)"),
    Case("hook: os exit 0", 1, STEP + r", at os._exit\(0\): left while rank 0 waits in an all-reduce of 1 int32"),
    Case("hook: other call", 1, f"{STEP}, last seen at {PLACE}: {CALLS}"),
    Case("hook: other sum", 1, rf"{STEP}: {CALLS} \({STEP}\), rank 1 in an all-reduce of 100 float64 \({STEP}\)"),
    Case(
        "hook: exit of C", 1, rf"{STEP}, last seen at {PLACE}: {SILENT} while rank 0 waits in an all-reduce of 1 int32"
    ),
    # In groups of two, while the other group goes on.
    Case("gather: stop", 3, rf"{STEP}, last seen at {PLACE}: {STOPPED} while ranks 0-2 wait in an all-gather", 4),
    Case("scatter: exit of C", 0, rf"{STEP}, .*: {SILENT} while rank 1 waits in a reduce-scatter of 10000 float64"),
    Case("scatter: raise", 1, rf"{STEP}: IndexError: list index out of range", code=1),
    Case("exchange: lock", 0, rf"{STEP}, last seen at {PLACE}: {ABSENT} while rank 1 waits in an all-to-all"),
    Case("sum: stop", 1, rf"{STEP}, last seen at {PLACE}: {STOPPED} while ranks 0, 2-3 wait in an all-reduce of 9", 4),
    Case("sum: exit of C", 0, rf"{STEP}, .*: {SILENT} while rank 1 waits in an all-reduce of 9 float32"),
    Case("sum: lock", 1, rf"{STEP}, last seen at {PLACE}: {ABSENT} while rank 0 waits in an all-reduce of 9 float32"),
    Case("sum: raise", 0, rf"{STEP}: IndexError: list index out of range", code=1),
    Case("sum: other size", 1, rf"{STEP}: {DIFFERENT} rank 0 in an all-reduce of 9 .*, rank 1 in an all-reduce of 8 "),
    Case(
        "stage: stop",
        1,
        rf"{STEP}, last seen at {PLACE}: {STOPPED} while rank 0 waits in a send or receive between stages",
    ),
    Case(
        "stage: lock",
        0,
        rf"{STEP}, last seen at {PLACE}: {ABSENT} while ranks 1-2 wait in a send or receive between",
        3,
    ),
    Case(
        "stage: lock",
        1,
        rf"{STEP}, last seen at {PLACE}: {ABSENT} while ranks 0, 2 wait in a send or receive between",
        3,
    ),
    Case("stage: exit of C", 2, rf"{STEP}, .*: {SILENT} while ranks 0-1 wait in a send or receive between stages", 3),
    Case("stage: raise", 0, rf"{STEP}: IndexError: list index out of range", code=70),
    Case(
        "nodes: stop",
        2,
        rf"{STEP}, last seen at {PLACE}: {STOPPED} while ranks 0-1 wait in an all-reduce of 1000",
        3,
        TWO,
    ),
    Case("nodes: exit of C", 0, rf"{STEP}, .*: {SILENT} while .* in an all-reduce of 100000 float32", 3, TWO),
    Case("nodes: other elements", 1, rf"{STEP}.*: {DIFFERENT} .*rank 1 in an all-reduce of 99999 float32", 3, TWO),
    Case(
        "split: stop", 1, rf"{STEP}, last seen at {PLACE}: {STOPPED} while rank 0 waits in a split of the communicator"
    ),
    Case("gather: other counts", 2, rf"{STEP}: {DIFFERENT} rank 2 in {PARTS}, rank 3 in {PARTS};", 4),
    Case(
        "gather: scatter",
        1,
        rf"{STEP}: {DIFFERENT} rank 0 in {PARTS}, rank 1 in a reduce-scatter of 10000 float64 in parts with the",
    ),
    Case("between: exit 3", 1, rf"user code, {END} an all-gather \(evaluate\)", 2, APART),
    Case("save: exit 0", 0, r"saving, at the end of its script: left while rank 1 waits in an all-gather \(saving\)"),
    *(Case(f"end: {deed}", 1, f"user code, last seen at {place}: {LATE}") for deed, place in LATE_AT.items()),
    Case(
        "early hook",
        1,
        r"user code, at stuck.py:\d+ in sleep_early: has finished, but its process has not ended for 12 s",
    ),
    *(Case(f"caught: {deed}", 1, CAUGHT, 3, code=70) for deed in ("sleep", "other call", "exit 0")),
    Case("caught: sleep", 1, CAUGHT, 3, APART, code=70),
    Case(
        "end: destructor sleeps",
        1,
        r"user code: has finished, but its process has not ended for 12 s: a destructor \(__del__\) blocks, or an exit",
    ),
    Case("end: destructor meets", 1, f"user code.*: a collective {AFTER}", code=2),
    Case("end: destructor meets", 0, f"user code.*: a collective {AFTER}", 3, code=2),
    *(
        Case(f"end: {hook} sleeps", 1, f"user code, last seen at {module}.py:.*: {LATE}")
        for hook, module in (("finalizer", "weakref"), ("thread hook", "threading"))
    ),
    *(
        Case(f"end: {hook} meets", 1, f"user code, {END.replace('rank 0', 'rank 1')} an all-gather", code=77)
        for hook in ("finalizer", "thread hook")
    ),
    Case("end: stop", 1, f"user code, last seen at {PLACE}: {STOPPED}"),
    Case("sweep: loop", 1, rf"(training, epoch 2, step \d+|sweep), last seen at {PLACE}: has made no progress "),
    Case("help", 1, rf"start-up, {END} the start of MPI \(start-up\)"),
    Case(
        "start: os exit 0",
        0,
        r"start-up, at os._exit\(0\): left while (ranks 1-2 wait|rank [12] waits) in the start",
        3,
    ),
    Case("before: raise", 0, "start-up: ended before it imported dptrain while rank 1 waits in the start of MPI"),
    Case("before: sleep", 1, rf"start-up: {ABSENT} while rank 0 waits in the start of MPI .*; its process is running"),
    Case("before: stop", 1, rf"start-up: {STOPPED} while rank 0 waits in the start of MPI"),
    Case("start: stop", 1, rf"start-up: {STOPPED} while rank 0 waits in the start of MPI \(fit\)"),
]


def launch(case: Case, folder: Path, warning: str = "0", timeout: str = "3") -> Finished:
    limits = {"DPTRAIN_STALL_WARNING": warning, "DPTRAIN_STALL_TIMEOUT": timeout}
    # Before dptrain is imported, or when Python ends, which forks do not let it.
    fresh = case.way.startswith("before: ") or case.way.endswith((" sleeps", " meets"))
    arguments = (SCRIPT, case.way, str(case.bad))
    return mpirun(case.ranks, *arguments, cwd=folder, fresh=fresh, **limits, **case.environment)


@pytest.fixture(scope="module")
def done(request, once) -> dict[int, Finished]:
    """How the jobs of this run's tests ended, some at a time: they wait for the most part."""
    find_mpirun()
    tests = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    numbers = [item.callspec.params["number"] for item in tests if "number" in item.callspec.params]

    def launch_all(folder: Path) -> dict[int, Finished]:
        with ThreadPoolExecutor(6) as pool:
            return dict(zip(numbers, pool.map(lambda number: launch(CASES[number], folder), numbers), strict=True))

    return once("stuck", launch_all)


# Every run takes a case of kinds of calls: in steps, groups, sums, hand-overs, on nodes, before and after them.
OFTEN = ("hook", "gather", "sum", "stage", "nodes", "before", "end")
KINDS = {case.way.partition(":")[0]: number for number, case in reversed(list(enumerate(CASES)))}
IN_EVERY_RUN = {KINDS[kind] for kind in OFTEN}


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(
            number,
            id=f"{case.way}, {case.bad}",
            marks=[] if number in IN_EVERY_RUN else pytest.mark.long,
        )
        for number, case in enumerate(CASES)
    ],
)
def test_a_rank_that_keeps_the_others_waiting_ends_the_job_and_is_named(done, number):
    case, job = CASES[number], done[number]
    assert job.code == case.code, job.err
    assert len(job.messages) == 1, job.err
    pid = "" if case.way == "before: raise" else r" pid \d+"
    either = ("hook: other sum", "gather: other counts", "gather: scatter", "sum: other size")
    both_named = case.way in (*either, "end: finalizer meets", "end: thread hook meets")
    bad = r"\d" if both_named else case.bad  # both see it, and either may say who is odd
    assert re.match(rf"dptrain: rank {bad}/{case.ranks} host \S+{pid} {case.text}", job.messages[0]), job.err


def test_who_is_slow_within_the_limit_is_warned_of_and_goes_on(tmp_path):
    job = launch(Case("hook: slow", 1, ""), tmp_path, warning="1", timeout="20")
    assert job.code == 0, job.err
    # On a busy machine a rank may be late at the start as well.
    lines = [line for line in job.err.splitlines() if " start-up" not in line]
    assert len(lines) == 2, "one an epoch"
    for line in lines:
        assert line.startswith("dptrain: rank 1/2 host ")
        assert line.endswith("(a warning)")
    assert job.out.count("trained") == 2  # two ranks' writes, in any order


def test_programs_of_mpi_of_which_some_ranks_use_dptrain_are_left_alone(tmp_path):
    """Ranks may import it, end early and end MPI themselves, as long as none waits for another in dptrain."""
    script = tmp_path / "own.py"
    script.write_text(
        "import sys, time\nfrom mpi4py import MPI\nworld = MPI.COMM_WORLD\n"
        "if world.rank == 2:\n    world.Barrier(); sys.exit()\n"
        "import dptrain as dp\n"
        "if world.rank == 1:\n    world.Barrier(); MPI.Finalize(); sys.exit()\n"
        "time.sleep(2.5)\nworld.Barrier()\nprint('done')\n"
    )
    job = mpirun(3, str(script), cwd=tmp_path, fresh=True, DPTRAIN_STALL_TIMEOUT="1")
    assert (job.code, job.out, job.err) == (0, "done\n", "")


def test_a_rank_may_end_late_and_end_mpi_itself_and_nothing_is_left_in_shared_memory(tmp_path):
    script = tmp_path / "late.py"
    script.write_text(
        "import os, time\nfrom mpi4py import MPI\nfrom dptrain.comm import current\n"
        "from dptrain.runtime.watch import watchdog\ncomm = current(); comm.barrier()\n"
        "path = watchdog._watchdog._table.path\npaths = set(comm.allgather(path))\n"
        "if comm.rank == 0:\n    print(len(paths), os.path.exists(path), path)\n"
        "if comm.rank == 1:\n    time.sleep(3); MPI.Finalize()\n"
    )
    job = mpirun(2, str(script), cwd=tmp_path, fresh=True, DPTRAIN_STALL_TIMEOUT="2")
    assert (job.code, job.err) == (0, "")
    files, segments, path = job.out.split()
    assert (files, segments) == ("1", "True"), "one for all ranks"
    assert not Path(path).exists()


TAKEN = """
import os, sys
opened, ranks = os.open, sys.argv[1].split(",")

def refusing(path, flags, *rest, **named):  # as where a neighbour has made the file
    if str(path).startswith("/dev/shm/dptrain-") and flags & os.O_CREAT and not flags & os.O_EXCL:
        raise PermissionError(13, "Permission denied", path)
    return opened(path, flags, *rest, **named)

if (os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"]) in ranks:
    os.open = refusing
import signal
from dptrain.comm import current
current().barrier()
if current().rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
current().barrier()
"""


@pytest.mark.parametrize("ranks", ["0,1,2", pytest.param("1", marks=pytest.mark.long)])
def test_who_has_taken_the_jobs_file_does_not_turn_the_watchdog_off(tmp_path, ranks):
    limits = {"DPTRAIN_STALL_WARNING": "0", "DPTRAIN_STALL_TIMEOUT": "3"}
    job = mpirun(3, "-c", TAKEN, ranks, cwd=tmp_path, fresh=True, **limits)
    assert job.code == 77, job.err
    (line,) = job.messages
    assert re.match(rf"dptrain: rank 1/3 host \S+ pid (\d+) start-up.*: {STOPPED} while ranks 0, 2 wait", line)
