"""Scripts that share a launch: each has its own outcome, whatever becomes of the others."""

import pytest

from tests.launching import Finished, in_turn
from tests.sample import sample

SCRIPT = """
import os, sys, time
import dptrain as dp
from dptrain.comm import current
way, rank = sys.argv[1], dp.rank()
current().barrier()
if rank == 0:
    print(way, sys.argv[2:], os.getpid(), flush=True)
if way == "agrees":
    current().agree("lunch", lambda: 1 / (dp.world_size() - 1 - rank))
if way == "raises" and rank == dp.world_size() - 1:
    raise KeyError("not this one")
if way == "hangs":
    time.sleep(600 if rank == 0 else 15)
current().barrier()
if way == "exits":
    sys.exit(65)
if way == "warns":
    print("from rank", rank, file=sys.stderr)
"""


@pytest.mark.long
@pytest.mark.parametrize("ranks", sample([0, 3], 2, first=1))
def test_each_script_has_its_own_outcome(tmp_path, ranks):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    ways = ["first", "agrees", "second", "raises", "warns", "hangs" if ranks else "exits", "last"]
    cases = {way: [str(script), way, "more"] for way in ways}
    done = in_turn(ranks, cases, tmp_path / "in turn", limit=10)
    assert list(done) == ways
    process = {}
    for way in ways:
        said, process[way] = done[way].out.splitlines()[0].rsplit(" ", 1)
        assert said == f"{way} ['more']"
    for way in ("first", "second", "last"):
        assert (done[way].code, done[way].err) == (0, "")
    assert process["first"] == process["agrees"] == process["second"] == process["raises"]
    assert done["agrees"].code == (70 if ranks else 1)
    assert done["agrees"].err.count("dptrain.errors.AgreedError: ZeroDivisionError: division by zero") == 1
    if ranks:
        assert process["warns"] != process["raises"]
    assert done["raises"].code == 1
    assert "KeyError: 'not this one'" in done["raises"].err
    assert (done["warns"].code, done["warns"].out.count("\n")) == (0, 1)
    assert done["warns"].err.splitlines() == [f"from rank {rank}" for rank in range(max(ranks, 1))]
    if not ranks:
        assert (done["exits"].code, done["exits"].err) == (65, "")
    else:
        assert done["hangs"].code != 0
        assert "Timeout (0:00:10)!" in done["hangs"].err
        assert 'script.py", line 14 in <module>' in done["hangs"].err


def test_a_notice_of_a_compilation_elsewhere_is_no_part_of_what_a_script_says():
    notices = (
        "dptrain: waiting for process 7, which compiles a.so\ndptrain: waiting for another process, which compiles b\n"
    )
    assert Finished(0, "", f"first\n{notices}dptrain: waiting for process 7, which trains\n").err == (
        "first\ndptrain: waiting for process 7, which trains\n"
    )
