"""The MPI communicator."""

import pytest

from tests.conftest import ROOT
from tests.launching import mpirun


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_collectives(ranks):
    done = mpirun(ranks, str(ROOT / "tests/mpi/scripts/collectives.py"))
    assert (done.code, done.err) == (0, "")
    assert done.out == f"all {ranks} ranks agree\n"
