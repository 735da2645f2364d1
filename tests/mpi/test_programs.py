"""Programs placed on real ranks, of which some have no row."""

import sys
from pathlib import Path

import numpy as np

from tests.launching import mpirun, run

SCRIPT = str(Path(__file__).parent / "scripts" / "programs.py")


def test_ranks_compute_what_one_computes():
    alone = run([sys.executable, SCRIPT])
    assert alone.code == 0, alone.err
    expected = [float(word) for word in alone.out.split()]
    assert len(expected) == 4
    for ranks in (2, 7):
        done = mpirun(ranks, SCRIPT)
        assert done.code == 0, done.err
        np.testing.assert_allclose([float(word) for word in done.out.split()], expected, rtol=1e-10)
