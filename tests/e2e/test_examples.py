"""The scripts under examples/, as a user starts them, alone and with two ranks."""

import functools
import re

import numpy as np
import pytest

from tests.conftest import ROOT
from tests.emulated import emulated_ranks, inside_emulator
from tests.launching import python

EXAMPLES = ROOT / "examples"


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [0, 2])
@pytest.mark.parametrize(("name", "least"), [("fashion_mnist", 0.95), ("mnist_rmsprop", 0.97)])
def test_on_real_digits(mnist_dir, name, least, ranks):
    """Fashion-MNIST has the files and the shapes of MNIST, which is at hand.

    Compiled, since two ranks that compute by NumPy take three times the CPU time.
    """
    arguments = [str(EXAMPLES / f"{name}.py"), "--data-dir", str(mnist_dir), "--epochs", "2"]
    done = python(ranks, *arguments, PYTHONPATH=str(ROOT), timeout=240, DPTRAIN_JIT_COMPILE=None)
    assert (done.code, done.err) == (0, "")
    (accuracy,) = re.findall(r"[Tt]est accuracy: ([0-9.]+)", done.out)  # printed once, whatever the number of ranks
    assert float(accuracy) > least


@functools.cache
def started(ranks: int, name: str, *arguments: str) -> list[str]:
    """Return the lines that an example prints."""
    done = python(ranks, str(EXAMPLES / f"{name}.py"), *arguments, PYTHONPATH=str(ROOT), timeout=120)
    assert (done.code, done.err) == (0, "")
    return done.out.splitlines()


def test_two_models_trained_in_turn():
    options = ["--dtype", "float64", "--steps", "5", "--width", "4"]
    alone, *together = (started(ranks, "gan", *options) for ranks in (0, 2, 3))
    assert together == [alone, alone]
    losses = [[float(one) for one in re.findall(r"_loss ([0-9.]+)", line)] for line in alone[:-1]]
    assert np.array(losses).shape == (4, 2)
    assert 0 < losses[-1][0] < losses[0][0] < 0.8  # the discriminator learns


@pytest.mark.parametrize("name", ["siamese", "distillation"])
def test_models_of_several_towers(name):
    options = ["--dtype", "float64", "--images", "120", "--epochs", "3", "--width", "4"]
    alone, together = (started(ranks, name, *options) for ranks in (0, 2))
    assert together == alone
    losses = [float(one) for one in re.findall(r": loss ([0-9.]+)", "\n".join(alone))]
    assert len(losses) == 3
    assert 0 < losses[-1] < 0.95 * losses[0]


@pytest.mark.parametrize(("name", "most"), [("custom_layer", 0.2), ("custom_op", 0.05)])
def test_a_layer_and_an_op_of_ones_own(name, most):
    alone, together = (started(ranks, name) for ranks in (0, 2))
    assert together == alone
    (loss,) = re.findall(r"loss: .* -> ([0-9.]+)", "\n".join(alone))
    assert float(loss) < most


def test_an_ensemble_is_better_calibrated_than_its_members():
    options = ["--members", "3", "--epochs", "4", "--samples", "2000"]
    alone, together = (started(ranks, "ensemble", *options) for ranks in (0, 2))
    scores = [[float(one) for one in re.findall(r" (\d\.\d+)", line)] for line in alone[-3:-1]]
    (_, member, _), (accuracy, ensemble, _) = scores
    assert ensemble < member  # as the logarithm is concave
    assert accuracy > 0.6
    assert together[-4:] == alone[-4:]


@pytest.mark.skipif(inside_emulator(), reason="starts the emulator itself")
@pytest.mark.parametrize("ranks", [0, 2])
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("gan", ["--steps", "2", "--epochs", "2", "--width", "2"]),
        ("custom_layer", ["--epochs", "1"]),
        ("custom_op", ["--epochs", "1"]),
        ("siamese", ["--epochs", "1", "--images", "40", "--width", "1"]),
    ],
)
def test_on_the_emulated_gpu(name, arguments, ranks):
    """Queues are executed in random orders that the streams allow: models of one step must share theirs."""
    cpu = started(0, name, *arguments)
    options = {"EMULATOR_DEVICES": "2", "EMULATOR_STREAMS": "random"}
    done = emulated_ranks(ranks, str(EXAMPLES / f"{name}.py"), "--device", "cuda", *arguments, **options)
    assert (done.code, done.err) == (0, "")
    cuda = done.out.splitlines()
    assert len(cuda) == len(cpu)
    for one, other in zip(cuda, cpu, strict=True):
        if one.startswith("checked:"):
            assert "cuda float32" in one
            assert other in one or "gradient" in other
        else:
            mine, others = ([float(number) for number in re.findall(r"-?\d+\.\d*", line)] for line in (one, other))
            assert mine == pytest.approx(others, abs=0.0101)
