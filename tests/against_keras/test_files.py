"""Files of weights and whole models, between dptrain and the real Keras 3, both ways."""

import numpy as np
import pytest

import dptrain as dp
from dptrain.errors import DataError

pytest.importorskip("h5py", reason="Keras' files need the extra 'keras-files'")

# Keras on PyTorch gives rise to it wherever it turns a variable into an array.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

RNG = np.random.default_rng(5)
X = RNG.random((24, 4, 3))
Y = np.arange(24) % 3
CPU = {"device": "cpu", "jit_compile": False}


@pytest.fixture(scope="module", autouse=True)
def _dtype_policy_of_the_others(keras):
    yield
    keras.config.set_dtype_policy("float64")


OPTIMIZERS = {
    "adam": lambda module: module.optimizers.Adam(0.01, beta_1=0.8),
    "rmsprop": lambda module: module.optimizers.RMSprop(0.003),
    "sgd": lambda module: module.optimizers.SGD(0.1),
    "momentum": lambda module: module.optimizers.SGD(0.05, momentum=0.9),
    "several": lambda module: module.optimizers.MultiOptimizer(
        module.optimizers.OptimizerMap(
            module.optimizers.Adam(0.01), {"(.*/)?first/.*": module.optimizers.SGD(0.05, momentum=0.9)}
        )
    ),
}


def with_keras(keras, optimizer: str = "adam", *, steps: int = 5, dropout: float = 0.0, dtype: str = "float64"):
    """A Keras model with two layers of a class, names of its own, and some training behind it."""
    keras.config.set_dtype_policy(dtype)
    try:
        model = keras.Sequential(
            [
                keras.layers.Input((4, 3)),
                keras.layers.Rescaling(2.0, offset=-1.0),
                keras.layers.Flatten(),
                keras.layers.Dense(5, activation="tanh", name="first"),
                keras.layers.Dropout(dropout),
                keras.layers.Dense(4),
                keras.layers.Activation("relu"),
                keras.layers.Dense(3, activation="softmax"),
            ]
        )
        model.compile(OPTIMIZERS[optimizer](keras), "sparse_categorical_crossentropy", metrics=["accuracy"])
        train(model, steps)
    finally:
        keras.config.set_dtype_policy("float32")
    return model


def with_dptrain(optimizer: str = "adam", *, steps: int = 5, dtype: str = "float64") -> dp.Sequential:
    model = dp.Sequential(
        [
            dp.layers.Rescaling(2.0, offset=-1.0, input_shape=(4, 3)),
            dp.layers.Flatten(),
            dp.layers.Dense(5, "tanh", name="first"),
            dp.layers.Dense(4),
            dp.layers.Activation("relu"),
            dp.layers.Dense(3, "softmax"),
        ]
    )
    model.compile(
        OPTIMIZERS[optimizer](dp), "sparse_categorical_crossentropy", metrics=["accuracy"], dtype=dtype, **CPU
    )
    train(model, steps)
    return model


def train(model, steps: int) -> None:
    """Train for some steps of 8 samples, always in the same order."""
    for step in range(steps):
        rows = slice(8 * (step % 3), 8 * (step % 3) + 8)
        model.fit(X[rows], Y[rows], batch_size=8, epochs=1, verbose=0, shuffle=False)


def predictions(model) -> np.ndarray:
    return np.asarray(model.predict(X, verbose=0) if not isinstance(model, dp.Sequential) else model.predict(X))


def assert_same(a, b, tolerance: float = 1e-12) -> None:
    np.testing.assert_allclose(predictions(a), predictions(b), rtol=0, atol=tolerance)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_keras_model_is_loaded_and_trains_on_as_in_keras(keras, tmp_path, optimizer):
    theirs = with_keras(keras, optimizer)
    theirs.save(tmp_path / "model.keras")
    ours = dp.models.load_model(tmp_path / "model.keras", **CPU)
    assert_same(ours, theirs)
    train(ours, 7)
    train(theirs, 7)
    assert_same(ours, theirs, 1e-9)
    assert ours.evaluate(X, Y, verbose=0) == pytest.approx(theirs.evaluate(X, Y, verbose=0), rel=1e-9)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_model_of_ours_is_loaded_by_keras_and_trains_on_there(keras, tmp_path, optimizer):
    ours = with_dptrain(optimizer)
    ours.save(tmp_path / "model.keras")
    theirs = keras.models.load_model(tmp_path / "model.keras")
    assert int(theirs.optimizer.iterations) == 5
    assert_same(ours, theirs)
    train(ours, 7)
    train(theirs, 7)
    assert_same(ours, theirs, 1e-9)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_from_keras_takes_weights_and_optimizer(keras, optimizer):
    theirs = with_keras(keras, optimizer)
    ours = dp.from_keras(theirs, **CPU)
    assert_same(ours, theirs)
    train(ours, 7)
    train(theirs, 7)
    assert_same(ours, theirs, 1e-9)


def test_float32_models(keras, tmp_path):
    theirs = with_keras(keras, dtype="float32")
    theirs.save(tmp_path / "theirs.keras")
    loaded = dp.models.load_model(tmp_path / "theirs.keras", **CPU)
    assert loaded.predict(X).dtype == np.float32
    assert_same(loaded, theirs, 1e-6)
    ours = with_dptrain(dtype="float32")
    ours.save(tmp_path / "ours.keras")
    assert_same(keras.models.load_model(tmp_path / "ours.keras"), ours, 1e-6)


def test_a_layer_without_bias(keras, tmp_path):
    layers = [keras.layers.Input((4, 3)), keras.layers.Flatten(), keras.layers.Dense(2, use_bias=False)]
    theirs = keras.Sequential([*layers, keras.layers.Dense(3)])
    theirs.save(tmp_path / "model.keras")
    assert_same(dp.models.load_model(tmp_path / "model.keras"), theirs, 1e-6)
    assert_same(dp.from_keras(theirs), theirs, 1e-6)


def test_weights_of_ours_are_loaded_by_keras(keras, tmp_path):
    ours, theirs = with_dptrain(), with_keras(keras, steps=1)
    ours.save_weights(tmp_path / "ours.weights.h5")
    theirs.load_weights(tmp_path / "ours.weights.h5")
    assert_same(ours, theirs)
    assert int(theirs.optimizer.iterations) == 5


def test_weights_of_keras_are_loaded(keras, tmp_path):
    # Keras' model has a Dropout more, which has no weights
    ours, theirs = with_dptrain(steps=1), with_keras(keras)
    theirs.save_weights(tmp_path / "theirs.weights.h5")
    ours.load_weights(tmp_path / "theirs.weights.h5")
    assert_same(ours, theirs)
    train(ours, 7)
    train(theirs, 7)
    assert_same(ours, theirs, 1e-9)  # the optimizer's state has come as well: it had been in use


def test_the_layout_is_keras_own(keras, tmp_path):
    """The same names, shapes and dtypes, whoever writes."""
    import h5py

    def content(path) -> dict[str, object]:
        datasets: dict[str, object] = {}
        with h5py.File(path) as file:
            file.visititems(
                lambda name, item: datasets.__setitem__(
                    name, (item.shape, item.dtype) if isinstance(item, h5py.Dataset) else sorted(item.attrs)
                )
            )
        return datasets

    ours, theirs = with_dptrain(), with_keras(keras)
    ours.save_weights(tmp_path / "ours.weights.h5")
    theirs.save_weights(tmp_path / "theirs.weights.h5")
    expected = content(tmp_path / "theirs.weights.h5")
    assert {name: value for name, value in expected.items() if "dropout" not in name} == content(
        tmp_path / "ours.weights.h5"
    )


def test_a_configuration_goes_both_ways(keras):
    ours = with_dptrain()
    theirs = keras.models.model_from_json(ours.to_json())
    assert [type(layer).__name__ for layer in theirs.layers] == [type(layer).__name__ for layer in ours.layers]
    rebuilt = dp.Sequential.from_config(theirs.get_config())
    assert rebuilt.get_config()["layers"] == dp.Sequential.from_config(ours.get_config()).get_config()["layers"]
    assert [w.shape for w in rebuilt.get_weights()] == [w.shape for w in ours.get_weights()]


def test_an_unused_optimizer_starts_afresh(keras, tmp_path):
    theirs = with_keras(keras, steps=0)
    theirs.save(tmp_path / "model.keras")
    ours = dp.models.load_model(tmp_path / "model.keras", **CPU)
    train(ours, 4)
    train(theirs, 4)
    assert_same(ours, theirs, 1e-9)


def test_objects_instead_of_names(keras, tmp_path):
    theirs = with_keras(keras, steps=0)
    theirs.compile(
        keras.optimizers.Adam(0.02),
        keras.losses.SparseCategoricalCrossentropy(),
        metrics=[keras.metrics.SparseCategoricalAccuracy(name="right")],
    )
    theirs.save(tmp_path / "model.keras")
    ours = dp.models.load_model(tmp_path / "model.keras", **CPU)
    history = ours.fit(X, Y, batch_size=8, verbose=0)
    assert list(history.history) == ["loss", "right"]
    ours.save(tmp_path / "ours.keras")
    reloaded = keras.models.load_model(tmp_path / "ours.keras")
    assert_same(ours, reloaded)
    assert set(reloaded.evaluate(X, Y, verbose=0, return_dict=True)) == {"loss", "right"}


def test_a_chain_made_by_the_functional_api(keras):
    inputs = keras.Input((4, 3), dtype="float64")
    hidden = keras.layers.Flatten(dtype="float64")(inputs)
    outputs = keras.layers.Dense(2, activation="sigmoid", dtype="float64")(hidden)
    chain = keras.Model(inputs, outputs)
    assert_same(dp.from_keras(chain, **CPU), chain, 1e-6)

    branch = keras.Model(inputs, [outputs, keras.layers.Dense(1, dtype="float64")(hidden)])
    added = keras.layers.Dense(2, dtype="float64")(hidden)
    merged = keras.Model(inputs, keras.layers.Subtract(dtype="float64")([outputs, added]))
    for theirs in (branch, merged):
        ours, x = dp.from_keras(theirs, **CPU), X[:5]
        for mine, expected in zip(
            ours(x) if theirs is branch else [ours(x)], theirs(x) if theirs is branch else [theirs(x)], strict=True
        ):
            np.testing.assert_allclose(mine, keras.ops.convert_to_numpy(expected), atol=1e-6)


def functional(module, **options):
    """Several inputs and outputs, a shared layer, a model in the model, an op, in Keras or dptrain.

    Layers have different names even in different models: Keras on PyTorch takes weights of one path for one.
    """
    layers = module.layers
    a, b = layers.Input((4, 3), name="a", **options), layers.Input((5,), name="b", **options)
    shared = layers.Dense(4, activation="tanh", name="shared")
    inner_input = layers.Input((4,), **options)
    inner = module.Model(inner_input, layers.BatchNormalization()(layers.Dense(4, name="within")(inner_input)))
    first = inner(shared(layers.Dense(5)(layers.Flatten()(a))))
    total = layers.Add()([first, inner(shared(b))]) * first
    stack = module.Sequential([layers.Dense(3, name="last"), layers.Activation("softmax")])
    model = module.Model([a, b], [stack(total), layers.Dense(1, name="size")(total)])
    compiled = {} if module is not dp else {"dtype": "float64", **CPU}
    losses = ["sparse_categorical_crossentropy", "mse"]
    model.compile(module.optimizers.Adam(0.01), losses, loss_weights=[1.0, 0.5], **compiled)
    return model


INPUTS = [X, RNG.random((24, 5))]
TARGETS = [Y, X[:, 0, :1]]


def assert_same_outputs(a, b, tolerance: float = 1e-9) -> None:
    for output, expected in zip(a.predict(INPUTS, verbose=0), b.predict(INPUTS, verbose=0), strict=True):
        np.testing.assert_allclose(np.asarray(output), np.asarray(expected), rtol=0, atol=tolerance)


@pytest.fixture
def theirs(keras):
    keras.config.set_dtype_policy("float64")
    return functional(keras, dtype="float64")


def fit(model) -> None:
    model.fit(INPUTS, TARGETS, batch_size=8, epochs=2, verbose=0, shuffle=False)


def test_a_functional_model_of_keras_is_loaded_and_trains_on(theirs, tmp_path):
    fit(theirs)
    theirs.save(tmp_path / "model.keras")
    ours = dp.models.load_model(tmp_path / "model.keras", **CPU)
    assert_same_outputs(ours, theirs)
    assert_same_outputs(dp.from_keras(theirs, **CPU), theirs)
    for model in (ours, theirs):
        fit(model)
    assert_same_outputs(ours, theirs)


def test_a_functional_model_of_ours_is_loaded_by_keras_and_trains_on(keras, tmp_path):
    ours = functional(dp)
    fit(ours)
    ours.save(tmp_path / "model.keras")
    theirs = keras.models.load_model(tmp_path / "model.keras")
    assert_same_outputs(ours, theirs)
    for model in (ours, theirs):
        fit(model)
    assert_same_outputs(ours, theirs)


def test_the_configuration_of_a_functional_model_is_keras_own(keras, theirs):
    ours = dp.Model.from_config(theirs.get_config())
    assert [layer.name for layer in ours.layers] == [layer.name for layer in theirs.layers]
    assert [w.shape for w in ours.get_weights()] == [w.shape for w in theirs.get_weights()]
    rebuilt = keras.Model.from_config(ours.get_config())
    assert [layer.name for layer in rebuilt.layers] == [layer.name for layer in theirs.layers]


def subclassed(module):
    """Layers before and behind "layers" in the alphabet, hidden and in nested containers, in Keras or dptrain."""
    layers = module.layers

    class Blocks(layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = [[layers.Dense(3), layers.Dense(4)], {"b": (layers.Dense(3),), "a": [[layers.Dense(3)]]}]

        def call(self, inputs):
            (first, second), head = self.blocks
            return head["a"][0][0](head["b"][0](second(first(inputs))))

    class Tower(module.Model):
        def __init__(self) -> None:
            super().__init__()
            self.zed, self._hidden, self.first = layers.Dense(2), layers.Dense(3), layers.Dense(4)
            self.many = [layers.Dense(3), layers.Dropout(0.5), layers.Dense(3)]
            self.nested = ([Blocks()], {"b": [layers.Dense(4), layers.Dense(3)], "a": ({"c": layers.Dense(3)},)})

        def call(self, inputs, training=False):
            outputs = self._hidden(self.first(inputs))
            for layer in self.many:
                outputs = layer(outputs)
            (blocks,), head = self.nested
            for layer in (blocks, *head["b"], head["a"][0]["c"]):
                outputs = layer(outputs)
            return self.zed(outputs)

    model = Tower()
    model(RNG.random((2, 4)).astype("float32"))
    return model


def test_the_layout_of_a_subclassed_model_is_keras_own(keras, tmp_path):
    import h5py

    ours, theirs = subclassed(dp), subclassed(keras)
    names: list[list[str]] = [[], []]
    for path, model, weight_names in (("ours", ours, names[0]), ("theirs", theirs, names[1])):
        model.save_weights(tmp_path / f"{path}.weights.h5")
        with h5py.File(tmp_path / f"{path}.weights.h5") as file:
            file.visit(weight_names.append)
    assert [name for name in names[0] if "seed_generator" not in name] == names[1]
    ours.load_weights(tmp_path / "theirs.weights.h5")
    x = RNG.random((5, 4)).astype("float32")
    np.testing.assert_allclose(ours(x).numpy(), keras.ops.convert_to_numpy(theirs(x)), rtol=1e-5)
    theirs.load_weights(tmp_path / "ours.weights.h5")


def test_a_layer_in_two_models_of_a_model_is_one_in_keras_too(keras, tmp_path):
    inputs, outer = dp.Input((3,)), dp.Input((3,))
    hidden = dp.layers.Dense(4, name="hidden")(inputs)
    base = dp.Model(inputs, dp.layers.Dense(2)(hidden), name="base")
    ours = dp.Model(outer, [base(outer), dp.Model(base.input, hidden, name="extractor")(outer)])
    ours.save(tmp_path / "m.keras")
    theirs = keras.models.load_model(tmp_path / "m.keras")
    assert len(theirs.weights) == len(ours.weights) == 4
    x = RNG.random((5, 3)).astype("float32")
    for output, expected in zip(ours.predict(x, verbose=0), theirs.predict(x, verbose=0), strict=True):
        np.testing.assert_allclose(output, expected, rtol=1e-5)


def test_what_dptrain_does_not_have_is_named(keras, tmp_path):
    def refused(layers: list, *, ending: str = "model.keras", **compiled) -> str:
        model = keras.Sequential([keras.layers.Input((4, 3)), *layers])
        if compiled:
            model.compile(**compiled)
        model.save(tmp_path / ending)
        with pytest.raises(DataError) as caught:
            dp.models.load_model(tmp_path / ending)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    layers = keras.layers
    assert "dtype" in refused([layers.Flatten(dtype="int16")])
    assert "a Python lambda" in refused([layers.Lambda(lambda x: x)])

    @keras.saving.register_keras_serializable("mine")
    class Descent(keras.optimizers.SGD):
        pass

    error = refused([layers.Flatten(), layers.Dense(1)], optimizer=Descent(), loss="mse")
    assert "Descent" in error
    assert "compile=False" in error

    @keras.saving.register_keras_serializable("mine")
    class Dense(keras.layers.Layer):
        def call(self, x):
            return x

    assert "mine>Dense" in refused([Dense()])
