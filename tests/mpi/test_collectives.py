"""The MPI communicator."""

import pytest

from tests.conftest import ROOT
from tests.launching import mpirun
from tests.sample import sample

# MPICH takes ranks for those of two nodes, in turn, so that three are 2 and 1.
TWO = {"MPIR_CVAR_NUM_CLIQUES": "2", "UCX_LOG_LEVEL": "error"}  # which warns of what watchdogs sent last


@pytest.mark.parametrize(("ranks", "nodes"), sample([(1, {}), (2, {}), (4, {}), (3, TWO)], 2, first=1))
def test_collectives(ranks, nodes):
    done = mpirun(ranks, str(ROOT / "tests/mpi/scripts/collectives.py"), str(1 + bool(nodes)), **nodes)
    assert (done.code, done.err) == (0, "")
    assert done.out == f"all {ranks} ranks agree\n"
