"""Steps read nothing back from the device, so that the host never waits in one: it reads once an epoch."""

import numpy as np
import pytest

import dptrain as dp
from dptrain.backend.base import Backend
from dptrain.backend.cpu.backend import NumpyBackend
from tests.ops.conftest import no_cuda

L, O = dp.layers, dp.optimizers  # noqa: E741 - short names for a table


class OwnSteps(dp.Sequential):
    """The built-in step, written by a user."""

    def train_step(self, data):
        return super().train_step(data)


CASES = {
    "adam": (dp.Sequential, lambda: O.Adam(0.01)),
    "clipped norms": (dp.Sequential, lambda: O.SGD(O.schedules.CosineDecay(0.1, 50), momentum=0.9, clipnorm=0.1)),
    "clipped norm of all": (dp.Sequential, lambda: O.RMSprop(global_clipnorm=0.1, centered=True)),
    "accumulated": (dp.Sequential, lambda: O.AdamW(gradient_accumulation_steps=2, amsgrad=True, clipvalue=0.1)),
    "own steps": (OwnSteps, lambda: O.Adam(0.01)),
}


def readings(monkeypatch: pytest.MonkeyPatch, backend: type[Backend], device: str, case: str, steps: int) -> int:
    """Return how often the host waits for the device in an epoch of so many steps."""
    kind, optimizer = CASES[case]
    rng = np.random.default_rng(0)
    x, y, weights = rng.standard_normal((4 * steps, 5)), rng.integers(0, 3, 4 * steps), rng.random(4 * steps)
    stack = [L.Dense(6, "relu", input_shape=(5,), kernel_regularizer="l2"), L.BatchNormalization(), L.Dropout(0.2)]
    model = kind([*stack, L.Dense(3, "softmax")])
    model.compile(
        optimizer(),
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
        weighted_metrics=["accuracy"],
        device=device,
        jit_compile=False,
    )
    count = 0

    def counted(name: str):
        original = getattr(backend, name)

        def method(*arguments, **named):
            nonlocal count
            count += 1
            return original(*arguments, **named)

        return method

    with monkeypatch.context() as patch:
        for name in ("download", "write", *(("_wait",) if device == "cuda" else ())):
            patch.setattr(backend, name, counted(name))
        model.fit(x, y, batch_size=4, sample_weight=weights, verbose=0)
    return count


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_an_epoch_reads_as_often_whatever_its_steps(monkeypatch, device, case):
    backend: type[Backend] = NumpyBackend
    if device == "cuda":
        if reason := no_cuda():
            pytest.skip(reason)
        from dptrain.backend.cuda.backend import CudaBackend

        backend = CudaBackend
    few, many = (readings(monkeypatch, backend, device, case, steps) for steps in (2, 9))
    assert few == many > 0
