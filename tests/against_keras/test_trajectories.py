"""A few whole trainings, step by step compiled by either library: those that every run of the tests compares.

`tests/e2e/test_keras_on_jax.py` starts them with Keras on JAX. The other files here look at much more, and take longer.
"""

import numpy as np
import pytest

from tests.sample import sample

pytestmark = pytest.mark.filterwarnings("ignore")  # Keras'

rng = np.random.default_rng(0)
X = rng.standard_normal((40, 6))
IMAGES = rng.standard_normal((40, 8, 8, 2))
LABELS = rng.integers(0, 3, 40)
TARGETS = rng.standard_normal((40, 2))


def classifier(k):
    model = k.Sequential([k.Input((6,)), k.layers.Dense(5, "relu"), k.layers.Dense(3, "softmax")])
    return model, k.optimizers.Adam(0.01), "sparse_categorical_crossentropy", (X, LABELS), {"metrics": ["accuracy"]}


def normalized(k):
    layers = [
        k.layers.Dense(5, "tanh", kernel_regularizer=k.regularizers.L2(0.01)),
        k.layers.BatchNormalization(),
        k.layers.LayerNormalization(),
        k.layers.Dense(2),
    ]
    rate = k.optimizers.schedules.CosineDecay(0.05, 9)
    optimizer = k.optimizers.SGD(rate, momentum=0.9, nesterov=True, clipnorm=1.0)
    return k.Sequential([k.Input((6,)), *layers]), optimizer, "mse", (X, TARGETS), {"metrics": ["mae"]}


def pictures(k):
    layers = [
        k.layers.Conv2D(4, 3, padding="same", activation="relu"),
        k.layers.MaxPooling2D(),
        k.layers.Flatten(),
        k.layers.Dense(3),
    ]
    loss = k.losses.SparseCategoricalCrossentropy(from_logits=True)
    return k.Sequential([k.Input((8, 8, 2)), *layers]), k.optimizers.RMSprop(0.01), loss, (IMAGES, LABELS), {}


def branches(k):
    left, right = k.Input((6,), name="left"), k.Input((6,), name="right")
    shared = k.layers.Dense(4, "gelu")
    joined = k.layers.Concatenate()([shared(left), shared(right)])
    heads = k.layers.Dense(3, "softmax", name="kind"), k.layers.Dense(2, name="size")
    outputs = {"kind": heads[0](joined), "size": heads[1](joined)}
    options = {"loss_weights": {"kind": 1.0, "size": 0.5}, "metrics": {"kind": ["accuracy"]}}
    loss = {"kind": "sparse_categorical_crossentropy", "size": "huber"}
    data = {"left": X, "right": X[::-1].copy()}, {"kind": LABELS, "size": TARGETS}
    return k.Model([left, right], outputs), k.optimizers.AdamW(0.01, weight_decay=0.01), loss, data, options


@pytest.mark.parametrize("build", sample([classifier, normalized, pictures, branches], 2, first=1))
def test_losses_metrics_and_weights(keras, build):
    import dptrain as dp

    keras.utils.set_random_seed(0)
    histories, weights = [], []
    for k in (keras, dp):
        model, optimizer, loss, (x, y), options = build(k)
        if not weights:
            # A model of dptrain is float32 until `compile` says otherwise: begin both at numbers that it can hold.
            weights.append([np.asarray(weight, "float32").astype("float64") for weight in model.get_weights()])
        model.set_weights(weights[0])
        model_options = {"dtype": "float64"} if k is dp else {"jit_compile": "auto"}
        model.compile(optimizer, loss, **options, **model_options)
        history = model.fit(*(x, y), batch_size=16, epochs=3, shuffle=False, verbose=0, validation_data=(x, y))
        histories.append(history.history)
        weights.append([np.asarray(weight) for weight in model.get_weights()])
    theirs, ours = histories
    assert ours.keys() == theirs.keys()
    for name, values in theirs.items():
        np.testing.assert_allclose(ours[name], values, rtol=1e-7, atol=1e-9, err_msg=name)
    for before, mine, reference in zip(*weights[:1], weights[2], weights[1], strict=True):
        assert not np.array_equal(before, reference)
        np.testing.assert_allclose(mine, reference, rtol=1e-7, atol=1e-9)
