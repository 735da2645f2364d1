"""Functional models and subclasses: branches, shared layers, several inputs and outputs, models in models."""

import numpy as np
import pytest

import dptrain as dp
from dptrain import layers, ops
from dptrain.errors import ConfigError, DataError

RNG = np.random.default_rng(0)


def weights_of(model: dp.Model) -> list[np.ndarray]:
    return model.get_weights()


def test_a_chain_is_the_sequential():
    x, y = RNG.standard_normal((20, 4)), RNG.integers(0, 3, 20)
    inputs = dp.Input((4,))
    hidden = layers.Dense(6, "tanh")(inputs)
    model = dp.Model(inputs, layers.Dense(3, "softmax")(layers.Dropout(0.3)(hidden)), seed=1)
    stack = [dp.Input((4,)), layers.Dense(6, "tanh"), layers.Dropout(0.3), layers.Dense(3, "softmax")]
    twin = dp.Sequential(stack, seed=1)
    assert (model.name, twin.name) == ("functional", "sequential")
    histories = []
    for net in (model, twin):
        net.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"], dtype="float64")
        histories.append(net.fit(x, y, batch_size=8, epochs=3, verbose=0, validation_split=0.2).history)
    assert histories[0] == histories[1]
    for mine, other in zip(weights_of(model), weights_of(twin), strict=True):
        np.testing.assert_array_equal(mine, other)
    assert [weight._path for weight in model.weights] == [weight._path for weight in twin.weights]
    assert [type(layer).__name__ for layer in model.layers] == ["InputLayer", "Dense", "Dropout", "Dense"]
    np.testing.assert_allclose(model(x).numpy(), model.predict(x), rtol=1e-12)


def test_a_network_may_be_deeper_than_python_calls():
    x = inputs = dp.Input((3,))
    for _ in range(1200):
        x = layers.ReLU()(x)
    model = dp.Model(inputs, x)
    model.compile("sgd", "mse", jit_compile=False)
    data = RNG.standard_normal((2, 3)).astype(np.float32)
    np.testing.assert_array_equal(model.predict(data, verbose=0), np.maximum(data, 0))


def test_branches_and_ops_between_layers():
    x = RNG.standard_normal((7, 4))
    inputs = dp.Input((4,))
    a, b = layers.Dense(3, name="a")(inputs), layers.Dense(3, "relu", name="b")(inputs)
    joined = layers.Concatenate()([layers.Add()([a, b]), a * 2 - ops.exp(b)])
    model = dp.Model(inputs, joined, seed=2)
    assert model.output_shape == (None, 6)
    ka, _, kb, _ = weights_of(model)
    left, right = x.astype(np.float32) @ ka, np.maximum(x.astype(np.float32) @ kb, 0)
    expected = np.concatenate([left + right, left * 2 - np.exp(right)], axis=1)
    np.testing.assert_allclose(model.predict(x), expected, rtol=1e-5, atol=1e-6)


def test_a_shared_layer_has_one_set_of_weights():
    left, right = dp.Input((4,), name="left"), dp.Input((4,), name="right")
    shared = layers.Dense(3, "tanh")
    model = dp.Model([left, right], layers.Subtract()([shared(left), shared(right)]), seed=3)
    assert model.count_params() == 15
    x = RNG.standard_normal((9, 4))
    np.testing.assert_array_equal(model.predict([x, x]), 0)
    model.compile(dp.optimizers.SGD(0.1), "mse", dtype="float64")
    z, y = RNG.standard_normal((9, 4)), RNG.standard_normal((9, 3))
    kernel, bias = weights_of(model)
    model.train_on_batch([x, z], y)
    a, b = np.tanh(x @ kernel + bias), np.tanh(z @ kernel + bias)
    dy = 2 * (a - b - y) / y.size
    gradient = x.T @ (dy * (1 - a**2)) - z.T @ (dy * (1 - b**2))
    np.testing.assert_allclose(weights_of(model)[0], kernel - 0.1 * gradient, rtol=1e-12)


def two_and_two() -> dp.Model:
    image, words = dp.Input((4,), name="image"), dp.Input((3,), name="words")
    merged = layers.Concatenate()([layers.Dense(5, "tanh")(image), layers.Dense(2, "tanh")(words)])
    kind = layers.Dense(3, "softmax", name="kind")(merged)
    size = layers.Dense(1, name="size")(merged)
    return dp.Model([image, words], [kind, size], seed=4)


def data(rows: int = 22) -> tuple[np.ndarray, ...]:
    return (
        RNG.standard_normal((rows, 4)),
        RNG.standard_normal((rows, 3)),
        RNG.integers(0, 3, rows),
        RNG.standard_normal(rows),
    )


def expected_losses(model: dp.Model, image, words, kind, size) -> tuple[float, float, float]:
    p, s = model.predict([image, words])
    accuracy = (p.argmax(1) == kind).mean()
    return -np.log(p[np.arange(len(kind)), kind]).mean(), ((s[:, 0] - size) ** 2).mean(), accuracy


@pytest.mark.parametrize("form", [False, True])
def test_several_inputs_and_outputs(form):
    image, words, kind, size = data()
    model = two_and_two()
    loss = {"kind": "sparse_categorical_crossentropy", "size": "mse"}
    weights, metrics = {"kind": 1.0, "size": 0.5}, {"kind": ["accuracy"], "size": ["mae"]}
    if not form:
        loss, weights, metrics = (list(option.values()) for option in (loss, weights, metrics))
    model.compile("adam", loss, weights, metrics, dtype="float64")
    x = {"words": words, "image": image} if form else [image, words]
    y = {"size": size, "kind": kind} if form else [kind, size]
    ce, mse, accuracy = expected_losses(model, image, words, kind, size)
    logs = model.evaluate(x, y, batch_size=8, verbose=0, return_dict=True)
    assert list(logs) == ["loss", "kind_loss", "size_loss", "kind_accuracy", "size_mae"]
    values = [logs[key] for key in ("loss", "kind_loss", "size_loss", "kind_accuracy")]
    np.testing.assert_allclose(values, [ce + 0.5 * mse, ce, mse, accuracy], rtol=1e-7)
    history = model.fit(x, y, batch_size=8, epochs=12, verbose=0, validation_data=(x, y)).history
    assert list(history) == [*logs, *(f"val_{key}" for key in logs)]
    assert history["loss"][-1] < history["loss"][0]
    total = np.array(history["kind_loss"]) + 0.5 * np.array(history["size_loss"])
    np.testing.assert_allclose(history["loss"], total, rtol=1e-12)
    outputs = model.predict(x)
    assert [tensor.shape for tensor in outputs] == [(22, 3), (22, 1)]


def test_sample_weights_of_several_outputs():
    image, words, kind, size = data()
    model = two_and_two()
    model.compile("sgd", ["sparse_categorical_crossentropy", "mse"], dtype="float64")
    p, s = model.predict([image, words])
    w = RNG.uniform(0.5, 2, 22)
    ce, mse = -np.log(p[np.arange(22), kind]), (s[:, 0] - size) ** 2
    logs = model.evaluate([image, words], [kind, size], sample_weight=w, verbose=0)
    np.testing.assert_allclose(logs[0], (w * ce).mean() + (w * mse).mean(), rtol=1e-7)
    for batch_weights in ([w, np.ones(22)], {"size": np.ones(22), "kind": w}, {"kind": w}):
        logs = model.evaluate([image, words], [kind, size], sample_weight=batch_weights, verbose=0)
        np.testing.assert_allclose(logs[0], (w * ce).mean() + mse.mean(), rtol=1e-7)


def test_an_output_without_a_loss():
    """Whose layer has no gradient, which is warned of, as in Keras."""
    image, words, kind, _ = data()
    model = two_and_two()
    model.compile("sgd", {"kind": "sparse_categorical_crossentropy"}, dtype="float64")
    before = weights_of(model)
    with pytest.warns(UserWarning, match=r"Gradients do not exist for variables \['size/kernel', 'size/bias'\]"):
        model.fit([image, words], {"kind": kind}, verbose=0)
    changed = [not np.array_equal(old, new) for old, new in zip(before, weights_of(model), strict=True)]
    assert changed == [True] * 6 + [False] * 2


def test_dictionaries_of_inputs_and_outputs():
    a, b = dp.Input((2,), name="first"), dp.Input((2,), name="second")
    model = dp.Model({"a": a, "b": b}, {"sum": layers.Add()([a, b]), "diff": layers.Subtract()([a, b])})
    x = {"b": RNG.standard_normal((5, 2)), "a": RNG.standard_normal((5, 2))}
    predictions = model.predict(x)
    assert set(predictions) == {"sum", "diff"}
    np.testing.assert_allclose(predictions["sum"], x["a"] + x["b"], rtol=1e-6)
    np.testing.assert_allclose(model(x)["diff"].numpy(), x["a"] - x["b"], rtol=1e-5, atol=1e-6)


def test_models_in_models():
    inputs = dp.Input((4,))
    encoder = dp.Model(inputs, layers.Dense(2, "tanh")(inputs), name="encoder")
    decoder = dp.Sequential([dp.Input((2,)), layers.Dense(4)], name="decoder")
    whole_inputs = dp.Input((4,))
    model = dp.Model(whole_inputs, decoder(encoder(whole_inputs)), seed=5)
    assert [layer.name for layer in model.layers[1:]] == ["encoder", "decoder"]
    assert [weight._path for weight in model.weights] == [
        "encoder/dense/kernel",
        "encoder/dense/bias",
        "decoder/dense/kernel",
        "decoder/dense/bias",
    ]
    x = RNG.standard_normal((30, 4))
    model.compile("adam", "mse", dtype="float64")
    encoder.trainable = False
    before = encoder.get_weights()
    losses = model.fit(x, x, batch_size=10, epochs=20, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    np.testing.assert_array_equal(encoder.get_weights()[0], before[0])
    np.testing.assert_allclose(model.predict(x), decoder.predict(encoder.predict(x)), rtol=1e-6)


def test_a_model_of_a_models_hidden_layer():
    model = dp.Sequential([dp.Input((4,)), layers.Dense(3, "tanh", name="hidden"), layers.Dense(2)])
    model.build()
    features = dp.Model(model.inputs, model.get_layer("hidden").output)
    x = RNG.standard_normal((6, 4)).astype(np.float32)
    kernel, bias = model.get_weights()[:2]
    np.testing.assert_allclose(features.predict(x), np.tanh(x @ kernel + bias), rtol=1e-5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda a, b: dp.Model(a, layers.Add()([a, b])), "`inputs` not connected to `outputs`"),
        (lambda a, b: dp.Model([a, b], layers.Concatenate(axis=1)([a, layers.Flatten()(b)])).get_layer("x"), "No such"),
        (lambda a, b: layers.Dense(3)(a) if a > 0 else None, "not known while a step is traced|no value|symbolic"),
    ],
)
def test_graphs_that_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make(dp.Input((2,)), dp.Input((2,)))


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (lambda d: [d[0]], lambda d: [d[2], d[3]], r"x: The structure of `inputs` doesn't match.* Received: 1 arrays"),
        (lambda d: {"image": d[0]}, lambda d: [d[2], d[3]], r"doesn't match.*Received: a dictionary with \['image'\]"),
        (lambda d: [d[0], d[1][:5]], lambda d: [d[2], d[3]], "Data cardinality is ambiguous.*'x' sizes: 22, 5"),
        (lambda d: [d[1], d[0]], lambda d: [d[2], d[3]], r"model expects 4 features of shape \(4,\), data has 3"),
        (lambda d: [d[0], d[1]], lambda d: d[2], "y: The structure of"),
        (lambda d: [d[0], d[1]], lambda d: [d[2] + 1, d[3]], r"label 3 at index \d+; 3 classes allow 0-2"),
    ],
)
def test_data_of_another_structure(x, y, message):
    model, arrays = two_and_two(), data()
    model.compile("sgd", ["sparse_categorical_crossentropy", "mse"])
    with pytest.raises(DataError, match=message):
        model.fit(x(arrays), y(arrays), verbose=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"loss": {"kinds": "mse"}},
            "In the dict argument `loss`, key 'kinds' does not correspond to",
        ),
        ({"loss": ["mse"]}, "it should have as many entries as the model has outputs"),
        ({"loss": ["mse", "mse"], "metrics": {"x": "mae"}}, "argument `metrics`, key 'x' does not correspond"),
    ],
)
def test_losses_of_other_outputs(arguments, message):
    with pytest.raises(ConfigError, match=message):
        two_and_two().compile("sgd", **arguments)


# Subclasses


class Residual(dp.Model):
    """Says in a weight how often it was called in training."""

    def __init__(self, units: int, **options):
        super().__init__(**options)
        self.first, self.last = layers.Dense(units, "tanh"), layers.Dense(2)
        self.blocks = [layers.Dense(units, "tanh") for _ in range(2)]
        self.dropout = layers.Dropout(0.4)

    def call(self, inputs, training=False):
        x = self.first(inputs)
        for block in self.blocks:
            x = x + block(x)
        if training:
            x = self.dropout(x)
        return self.last(x)


def test_a_subclass_with_a_call():
    x, y = RNG.standard_normal((24, 4)), RNG.standard_normal((24, 2))
    model = Residual(6, seed=7)
    model.compile("adam", "mse", metrics=["mae"], dtype="float64")
    history = model.fit(x, y, batch_size=8, epochs=5, verbose=0, validation_data=(x, y)).history
    assert list(history) == ["loss", "mae", "val_loss", "val_mae"]
    assert history["val_loss"][-1] < history["val_loss"][0]
    first, first_bias, last, last_bias, *rest = model.get_weights()
    assert [weight._path.rpartition("/")[0] for weight in model.weights[::2]] == [
        "dense",
        "dense_1",
        "dense_2",
        "dense_3",
    ]
    hidden = np.tanh(x @ first + first_bias)
    for kernel, bias in (rest[:2], rest[2:]):
        hidden = hidden + np.tanh(hidden @ kernel + bias)
    np.testing.assert_allclose(model.predict(x), hidden @ last + last_bias, rtol=1e-10)
    assert not np.array_equal(model(x, training=True).numpy(), model.predict(x))
    twin = Residual(6, seed=7)
    twin.build((None, 4))
    assert twin.count_params() == model.count_params()
    with pytest.raises(NotImplementedError, match="does not have a `call"):
        dp.Model()(x)


def test_a_subclass_with_several_inputs_and_a_dictionary_of_outputs():
    class Two(dp.Model):
        def __init__(self):
            super().__init__(seed=1)
            self.dense = layers.Dense(2)

        def call(self, inputs):
            return {"a": self.dense(inputs["left"]), "b": self.dense(inputs["right"])}

    x = {"left": RNG.standard_normal((8, 3)), "right": RNG.standard_normal((8, 3))}
    y = {"b": RNG.standard_normal((8, 2)), "a": RNG.standard_normal((8, 2))}
    model = Two()
    model.compile("sgd", {"a": "mse", "b": "mae"}, dtype="float64")
    logs = model.fit(x, y, verbose=0).history
    assert list(logs) == ["loss", "a_loss", "b_loss"]
    predictions = model.predict(x)
    kernel, bias = model.get_weights()
    np.testing.assert_allclose(predictions["b"], x["right"] @ kernel + bias, rtol=1e-12)


@pytest.mark.filterwarnings("ignore:The model does not have any trainable weights")
def test_trainable_reaches_parts_and_comes_back():
    x, y = RNG.standard_normal((8, 4)), RNG.standard_normal((8, 2))
    model = Residual(3, seed=1)
    model.compile("sgd", "mse", dtype="float64")
    model.fit(x, y, verbose=0)
    model.blocks[0].trainable = False
    before = model._named_weights()
    model.fit(x, y, verbose=0)
    changed = {path: not np.array_equal(weight, before[path]) for path, weight in model._named_weights().items()}
    assert [path for path, moved in changed.items() if not moved] == ["dense_2/kernel", "dense_2/bias"]
    model.trainable = False
    assert model.trainable_weights == []
    model.trainable = True
    assert len(model.trainable_weights) == 8


def test_a_subclass_is_built_when_its_weights_are_there():
    class Own(dp.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(3)

        def call(self, inputs):
            return self.dense(inputs)

    model = Own()
    model.build()
    assert not model.built
    model.build((None, 2))
    assert model.built
    assert [weight.shape for weight in model.weights] == [(2, 3), (3,)]

    class Building(Own):
        def build(self, input_shape):
            self.dense.build(input_shape)

    building = Building()
    building.build((None, 4))
    assert building.built
    assert building.predict(np.zeros((5, 4)), verbose=0).shape == (5, 3)


def tower(seed=0):
    return dp.Sequential([dp.layers.Dense(4, input_shape=(4,)), dp.layers.Dense(4)], seed=seed)


def nested(kind):
    """Return a model of two towers that were built alone from one seed, and a layer of its own."""
    first, second, head = tower(seed=dp.utils.default_seed()), tower(seed=dp.utils.default_seed()), dp.layers.Dense(4)
    for block in (first, second):
        block.build()
    if kind == "functional":
        x = dp.Input((4,))
        return dp.Model(x, dp.layers.add([first(x), head(second(x))]), seed=dp.utils.default_seed())
    model = dp.Sequential([head, first, second], seed=dp.utils.default_seed())
    model.build((None, 4))
    return model


@pytest.mark.parametrize("kind", ["functional", "sequential"])
def test_models_of_one_seed_begin_with_other_weights_in_a_third(kind):
    kernels = [weight.numpy().tobytes() for weight in nested(kind).weights if weight.name == "kernel"]
    assert len(set(kernels)) == len(kernels) == 5
    assert kernels == [weight.numpy().tobytes() for weight in nested(kind).weights if weight.name == "kernel"]
    dp.utils.set_random_seed(3)
    try:
        assert not set(kernels) & {weight.numpy().tobytes() for weight in nested(kind).weights}
    finally:
        dp.utils.set_random_seed(0)


def test_weights_that_somebody_has_set_stay_in_another_model():
    first, second, alone = tower(), tower(), tower()
    second.set_weights(first.get_weights())
    x = dp.Input((4,))
    dp.Model(x, second(first(x)))
    for model in (first, second):
        for weight, other in zip(model.get_weights(), alone.get_weights(), strict=True):
            np.testing.assert_array_equal(weight, other)


def test_a_model_of_inner_tensors_has_the_layers_between_them():
    entry = dp.Input((3,))
    first = layers.Dense(4, name="first")(entry)
    second = ops.relu(first) * 2.0
    outputs = layers.Dense(2, name="last")(layers.Dense(5, name="middle")(second))
    whole = dp.Model(entry, outputs)
    x = np.random.default_rng(1).normal(size=(6, 3)).astype(np.float32)
    hidden = dp.Model(entry, first)(x).numpy()
    for inner, values in ((first, hidden), (second, np.maximum(hidden, 0) * 2)):
        model = dp.Model(inner, outputs)
        assert [layer.name for layer in model.layers][-2:] == ["middle", "last"]
        assert "first" not in [layer.name for layer in model.layers]
        assert (len(model.weights), model.input_shape) == (4, (None, 4))
        np.testing.assert_allclose(model.predict(values, verbose=0), whole.predict(x, verbose=0), rtol=1e-5)
        restored = dp.Model.from_config(model.get_config())
        restored.set_weights(model.get_weights())
        np.testing.assert_array_equal(restored.predict(values, verbose=0), model.predict(values, verbose=0))


def test_tuples_of_inputs_and_outputs_stay_tuples_in_a_configuration():
    a, b = dp.Input((3,)), dp.Input((2,))
    outputs = ({"x": a * 2}, [b + 1, a])
    model = dp.Model((a, b), outputs)
    again = dp.Model.from_config(model.get_config())
    result = again((np.ones((1, 3)), np.ones((1, 2))))
    assert [type(part) for part in (result, *result)] == [tuple, dict, list]
