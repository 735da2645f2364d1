"""Steps of a user's own on a GPU or the emulator: the numbers of the built-in step."""

import numpy as np
import pytest

import dptrain as dp


class OwnSteps(dp.Sequential):
    def train_step(self, data):
        return super().train_step(data)

    def test_step(self, data):
        return super().test_step(data)


@pytest.mark.usefixtures("cuda_backend")
def test_weights_penalties_states_and_batch_normalization():
    rng = np.random.default_rng(0)
    x, weights = rng.standard_normal((19, 5)), rng.uniform(0.5, 2, 19)
    y = (x[:, :1] > 0).astype(np.float64)
    results = []
    for kind in (dp.Sequential, OwnSteps):
        model = kind(
            [
                dp.layers.Dense(6, "tanh", kernel_regularizer="l2", input_shape=(5,)),
                dp.layers.BatchNormalization(),
                dp.layers.Dropout(0.2),
                dp.layers.Dense(1, "sigmoid", bias_regularizer="l1"),
            ],
            seed=1,
        )
        model.compile(
            dp.optimizers.Adam(0.01, clipnorm=1.0),
            "binary_crossentropy",
            metrics=["accuracy", dp.metrics.Precision(name="precision")],
            weighted_metrics=["mae"],
            device="cuda",
            share_gpu=True,
        )
        history = model.fit(x, y, batch_size=8, epochs=2, sample_weight=weights, verbose=0, validation_data=(x, y))
        results.append((history.history, model.get_weights()))
    (history, parameters), (own_history, own_parameters) = results
    assert list(own_history) == list(history)
    for key, other in history.items():
        np.testing.assert_allclose(own_history[key], other, rtol=1e-5, err_msg=key)
    for parameter, other in zip(own_parameters, parameters, strict=True):
        np.testing.assert_allclose(parameter, other, rtol=1e-5, atol=1e-6)
