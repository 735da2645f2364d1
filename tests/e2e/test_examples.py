"""The scripts under examples/, as a user starts them, alone and with two ranks."""

import re
import sys

import pytest

from tests.conftest import ROOT
from tests.launching import mpirun, run

EXAMPLES = ROOT / "examples"


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [0, 2])
@pytest.mark.parametrize(("name", "least"), [("fashion_mnist", 0.95), ("mnist_rmsprop", 0.97)])
def test_on_real_digits(mnist_dir, name, least, ranks):
    """Fashion-MNIST has the files and the shapes of MNIST, which is at hand."""
    arguments = [str(EXAMPLES / f"{name}.py"), "--data-dir", str(mnist_dir), "--epochs", "2"]
    options = {"PYTHONPATH": str(ROOT), "timeout": 240}
    done = mpirun(ranks, *arguments, **options) if ranks else run([sys.executable, *arguments], **options)
    assert (done.code, done.err) == (0, "")
    (accuracy,) = re.findall(r"[Tt]est accuracy: ([0-9.]+)", done.out)  # printed once, whatever the number of ranks
    assert float(accuracy) > least
