"""The state of a training on a GPU: its digests are those of the CPU, and its copy comes back."""

import numpy as np

from dptrain.backend.cpu.digest import Digests
from dptrain.program.tensor import Variable


def test_digests_are_those_of_the_cpu_and_a_copy_comes_back(cuda_backend):
    rng = np.random.default_rng(0)
    values = [rng.normal(size=size).astype(np.float32) for size in (1, 3, 512, 1025, (257, 129))]
    values += [rng.normal(size=7), np.int64(5), np.array([True, False, True]), np.zeros((0, 3), np.float32)]
    values = [np.asarray(value) for value in values]
    variables = [Variable(value, f"v{number}") for number, value in enumerate(values)]
    snapshot = cuda_backend.snapshot(variables)
    expected = Digests(values, False)()
    np.testing.assert_array_equal(snapshot.digests(), expected)
    assert snapshot.take()
    for place, wrong in ((-1, np.nan), (2, np.inf), (1026, -np.inf)):
        changed = values[4].copy()
        changed.reshape(-1)[place] = wrong
        variables[4].assign(changed)
        digests = snapshot.digests()
        np.testing.assert_array_equal(digests, [*expected[:4], Digests([changed], False)()[0], *expected[5:]])
        assert digests[:, 1].tolist() == [0, 0, 0, 0, 1, 0, 0, 0, 0]
    snapshot.restore()
    np.testing.assert_array_equal(snapshot.digests(), expected)
    for variable, value in zip(variables, values, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)


def test_a_copy_that_takes_too_much_memory_is_not_made(cuda_backend, monkeypatch):
    monkeypatch.setattr("dptrain.backend.cuda.snapshot._COPY", 0.0)
    snapshot = cuda_backend.snapshot([Variable(np.zeros(4, np.float32), "v")])
    assert not snapshot.take()
    assert snapshot.digests().shape == (1, 2)
