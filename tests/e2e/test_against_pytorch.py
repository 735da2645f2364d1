"""The first losses against PyTorch's, from the same weights and batches."""

import numpy as np
import pytest

import dptrain as dp
from dptrain.data.strokes import generate

torch = pytest.importorskip("torch", reason="needs the extra 'peers'")

STEPS, BATCH = 50, 32


class Losses(dp.callbacks.Callback):
    """Keeps the loss of every single batch."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, batch: int, logs=None) -> None:
        self.values.append(logs["loss"])
        self.model.reset_metrics()


def pytorch_losses(x: np.ndarray, y: np.ndarray, weights: list[np.ndarray], optimizer: str) -> list[float]:
    model = torch.nn.Sequential(torch.nn.Linear(784, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    with torch.no_grad():
        for parameter, weight in zip(model.parameters(), weights, strict=True):
            parameter.copy_(torch.from_numpy(weight.T.copy()))
    if optimizer == "adam":
        update = torch.optim.Adam(model.parameters(), lr=1e-3)
    else:
        update = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(STEPS):
        part = slice(step * BATCH, (step + 1) * BATCH)
        images = torch.from_numpy(x[part].reshape(BATCH, 784)).float() / 255
        loss = torch.nn.functional.cross_entropy(model(images), torch.from_numpy(y[part].astype(np.int64)))
        update.zero_grad()
        loss.backward()
        # PyTorch adds epsilon after correcting the second moment's bias, Keras and dptrain before.
        update.param_groups[0]["eps"] = 1e-7 / np.sqrt(1 - 0.999 ** (step + 1))
        update.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_first_50_losses(optimizer):
    x, y, _, _ = generate(STEPS * BATCH, 1)
    model = dp.Sequential(
        [
            dp.layers.Rescaling(1 / 255, input_shape=(28, 28)),
            dp.layers.Flatten(),
            dp.layers.Dense(128, activation="relu"),
            dp.layers.Dense(10, activation="softmax"),
        ]
    )
    chosen = dp.optimizers.Adam(1e-3) if optimizer == "adam" else dp.optimizers.SGD(0.1, momentum=0.9)
    model.compile(chosen, "sparse_categorical_crossentropy", dtype="float32")
    expected = pytorch_losses(x, y, [w.astype(np.float32) for w in model.get_weights()], optimizer)
    losses = Losses()
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[losses])
    assert len(losses.values) == STEPS
    assert losses.values[-1] < 0.8 * losses.values[0]
    np.testing.assert_allclose(losses.values, expected, rtol=1e-5)
