"""The scripts under examples/, as a user starts them, alone and with two ranks."""

import functools
import re

import pytest

from tests.conftest import ROOT
from tests.emulated import emulated_ranks, inside_emulator
from tests.launching import python

EXAMPLES = ROOT / "examples"


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [0, 2])
@pytest.mark.parametrize(("name", "least"), [("fashion_mnist", 0.95), ("mnist_rmsprop", 0.97)])
def test_on_real_digits(mnist_dir, name, least, ranks):
    """Fashion-MNIST has the files and the shapes of MNIST, which is at hand."""
    arguments = [str(EXAMPLES / f"{name}.py"), "--data-dir", str(mnist_dir), "--epochs", "2"]
    done = python(ranks, *arguments, PYTHONPATH=str(ROOT), timeout=240)
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
    alone, together = (started(ranks, "gan", "--dtype", "float64") for ranks in (0, 2))
    assert together == alone
    (data, made), (data_deviation, made_deviation) = (
        [[float(number) for number in part.split()] for part in re.findall(r"\[(.*?)\]", line)] for line in alone[-2:]
    )
    for axis in range(2):  # at first the made samples are around 0
        assert abs(made[axis] - data[axis]) < 0.4
        assert abs(made_deviation[axis] - data_deviation[axis]) < 0.3


@pytest.mark.parametrize(("name", "most"), [("custom_layer", 0.2), ("custom_op", 0.05)])
def test_a_layer_and_an_op_of_ones_own(name, most):
    alone, together = (started(ranks, name) for ranks in (0, 2))
    assert together == alone
    (loss,) = re.findall(r"loss: .* -> ([0-9.]+)", "\n".join(alone))
    assert float(loss) < most


@pytest.mark.skipif(inside_emulator(), reason="starts the emulator itself")
@pytest.mark.parametrize("ranks", [0, 2])
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("gan", ["--samples", "300", "--epochs", "2"]),
        ("custom_layer", ["--epochs", "1"]),
        ("custom_op", ["--epochs", "1"]),
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
