"""Files on N ranks: rank 0 reads and writes, all ranks have what it read, and its failure."""

import importlib.util

import pytest

from tests.conftest import ROOT
from tests.launching import mpirun

SCRIPT = str(ROOT / "tests" / "mpi" / "scripts" / "files.py")


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("whole", ["", ".keras"])
def test_rank_0_writes_and_reads_for_all(tmp_path, ranks, whole):
    if whole and importlib.util.find_spec("h5py") is None:
        pytest.skip("Keras' files need the extra 'keras-files'")
    done = mpirun(ranks, SCRIPT, str(tmp_path), whole, "nothing")
    assert (done.code, done.out, done.err) == (0, "same\n", "")
    assert [path.name for path in tmp_path.iterdir()] == [f"model{whole}" if whole else "w.safetensors"]


@pytest.mark.parametrize(("wrong", "code", "message"), [("write", 74, "No such file"), ("read", 65, "not found")])
def test_a_failure_of_rank_0_is_everybodys(tmp_path, wrong, code, message):
    done = mpirun(3, SCRIPT, str(tmp_path), "", wrong)
    assert done.code == code
    (line,) = done.messages
    assert message in line
    assert str(tmp_path) in line
    assert "rank 0" in line
