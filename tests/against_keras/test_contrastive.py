"""Losses whose rows meet give Keras' values, gradients and trainings, on one rank and on several."""

import numpy as np
import pytest

import dptrain as dp
from dptrain.program.gradient import gradients
from dptrain.program.tensor import differentiable
from tests.against_keras.contrastive import BATCHES, LOSSES, VIEW, trained
from tests.launching import mpirun

# Of Keras' own copies of its variables.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


@pytest.mark.parametrize("name", LOSSES)
def test_values_and_gradients(torch_keras, name):
    """Of each row's loss, by autograd and by dptrain."""
    for x, y in BATCHES:
        z = np.tanh(x[:, : 2 * VIEW])
        theirs_z = torch_keras.ops.convert_to_tensor(z).requires_grad_()
        theirs = LOSSES[name](torch_keras.ops, torch_keras.ops.convert_to_tensor(y), theirs_z)
        slopes = np.cos(np.arange(theirs.numel())).reshape(theirs.shape)
        torch_keras.ops.sum(theirs * torch_keras.ops.convert_to_tensor(slopes)).backward()
        ours_z = differentiable(z)
        ours = LOSSES[name](dp.ops, y, ours_z)
        np.testing.assert_allclose(ours, theirs.detach(), rtol=1e-12, atol=1e-13)
        (gradient,) = gradients(dp.ops.sum(ours * slopes), [ours_z])
        np.testing.assert_allclose(gradient, theirs_z.grad, rtol=1e-12, atol=1e-13)


@pytest.fixture(scope="module")
def of_keras(keras):
    """What Keras gives for all trainings."""
    return {key: value for name in LOSSES for key, value in trained(keras, name, jit_compile="auto").items()}


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_trainings(of_keras, tmp_path, ranks):
    file = tmp_path / "values.npz"
    done = mpirun(ranks, "-m", "tests.against_keras.contrastive", str(file))
    assert (done.code, done.err) == (0, "")
    with np.load(file) as values:
        assert values.keys() == of_keras.keys()
        for key, expected in of_keras.items():
            np.testing.assert_allclose(values[key], expected, rtol=1e-11, atol=1e-12, err_msg=key)
