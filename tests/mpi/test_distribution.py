"""A mesh over the ranks that mpirun has started."""

from tests.conftest import ROOT
from tests.launching import in_turn

SCRIPT = str(ROOT / "tests/mpi/scripts/distribution.py")


def test_two_ranks_are_two_devices(tmp_path):
    cases = {"no question": [SCRIPT], "two": [SCRIPT, "2"], "three": [SCRIPT, "3"], "all rank 0": [SCRIPT, "2", "0"]}
    done = in_turn(2, cases, tmp_path / "on 2", limit=30)
    for case in ("no question", "two"):
        assert (done[case].code, done[case].err) == (0, "")
        shown = "['cpu:0', 'cpu:1'] 2 {'batch': 2, 'model': 1}"
        assert done[case].out.splitlines() == [f"rank 0: {shown}", f"rank 1: {shown}"]
    assert (done["three"].code, done["all rank 0"].code) == (2, 2)
    assert "; use mpirun -n 3 python script.py" in done["three"].messages[0]
    (line,) = done["all rank 0"].messages
    assert line.startswith("dptrain: rank 1/2 ")
    assert line.endswith(": process_id = 0, but this process is rank 1 of 2; leave process_id out")
