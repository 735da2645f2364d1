"""Arrays of any byte order and strides are read as the numbers that they hold, wherever they come in."""

import numpy as np
import pytest

import dptrain as dp
from dptrain import layers, ops
from tests.programs.memory import WAYS

X = np.arange(24, dtype=np.float32).reshape(8, 3)
Y = X[:, :2] / 8
WEIGHTS = np.arange(1, 9, dtype=np.float32)
OTHER = [">f4", ">f8", ">f2", ">i2", ">i4", ">i8", ">u2"]


def swapped(array: np.ndarray, dtype: str = ">f4") -> np.ndarray:
    return array.astype(dtype)


def model(**options) -> dp.Sequential:
    stack = [layers.Input((3,)), layers.Rescaling(1 / 24), layers.Dense(2, "tanh"), layers.Dense(2)]
    model = dp.Sequential(stack, seed=1)
    model.compile(dp.optimizers.SGD(0.1), "mse", weighted_metrics=["mae"], **options)
    return model


def mapped(tmp_path, array: np.ndarray) -> np.ndarray:
    np.save(tmp_path / "mapped.npy", array)
    return np.load(tmp_path / "mapped.npy", mmap_mode="r")


class Dataset(dp.utils.PyDataset):
    def __init__(self, *parts):
        super().__init__()
        self.parts = parts

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return tuple(part[4 * index : 4 * index + 4] for part in self.parts)


@pytest.mark.parametrize("dtype", OTHER[::2])
def test_prediction(dtype, tmp_path):
    net = model()
    expected = net.predict(X, verbose=0)
    x = swapped(X, dtype)
    for actual in (net.predict(x, verbose=0), net.predict_on_batch(x), net.predict(mapped(tmp_path, x), verbose=0)):
        np.testing.assert_array_equal(actual, expected)
    np.testing.assert_array_equal(net.predict(Dataset(x), verbose=0), expected)
    batches = ((x[at : at + 4],) for at in (0, 4))
    np.testing.assert_array_equal(net.predict(batches, verbose=0, steps=2), expected)
    np.testing.assert_allclose(net(x), expected, atol=1e-6)


def test_evaluation():
    net = model()
    expected = net.evaluate(X, Y, sample_weight=WEIGHTS, verbose=0)
    parts = [swapped(array) for array in (X, Y, WEIGHTS)]
    assert net.evaluate(*parts[:2], sample_weight=parts[2], verbose=0) == expected
    assert net.test_on_batch(*parts) == net.test_on_batch(X, Y, WEIGHTS)
    assert net.evaluate(Dataset(*parts), verbose=0) == net.evaluate(Dataset(X, Y, WEIGHTS), verbose=0)


@pytest.mark.parametrize("kind", ["arrays", "maps", "generator", "number", "eager", "on_batch"])
def test_training(kind, tmp_path):
    def trained(x, y, weights):
        net = model(run_eagerly=kind == "eager")
        if kind == "generator":
            batches = ((x[at : at + 4], y[at : at + 4], weights[at : at + 4]) for at in (0, 4))
            net.fit(batches, steps_per_epoch=2, shuffle=False, validation_data=(x, y, weights), verbose=0)
        elif kind == "number":
            net.fit(Dataset(x, y, weights), verbose=0, shuffle=False)
        elif kind == "on_batch":
            net.train_on_batch(x, y, weights)
        else:
            net.fit(x, y, 4, sample_weight=weights, validation_data=(x, y, weights), verbose=0)
        return [*net.get_weights(), *([] if kind == "on_batch" else net.history.history.values())]

    x = swapped(X)
    x = mapped(tmp_path, x) if kind == "maps" else x
    for actual, expected in zip(trained(x, swapped(Y), swapped(WEIGHTS)), trained(X, Y, WEIGHTS), strict=True):
        np.testing.assert_array_equal(actual, expected)


def test_labels_and_their_weights():
    def trained(labels):
        net = dp.Sequential([layers.Input((3,)), layers.Dense(4, "softmax")], seed=1)
        net.compile("sgd", "sparse_categorical_crossentropy", metrics=["accuracy"])
        net.fit(X, labels, class_weight={0: 2.0, 3: 0.5}, verbose=0)
        return net.get_weights()[0]

    labels = np.arange(8) % 4
    for dtype in (">i2", ">i8", ">f4"):
        np.testing.assert_array_equal(trained(labels.astype(dtype)), trained(labels))


def test_dictionaries_and_data_frames():
    pandas = pytest.importorskip("pandas")
    a, b = layers.Input((3,), name="a"), layers.Input((3,), name="b")
    net = dp.Model({"a": a, "b": b}, layers.Dense(2)(layers.Concatenate()([a, b])), seed=1)
    expected = net.predict({"a": X, "b": 2 * X}, verbose=0)
    np.testing.assert_array_equal(net.predict({"a": swapped(X), "b": swapped(2 * X, ">f8")}, verbose=0), expected)
    net = model()
    expected = net.predict(X, verbose=0)
    frame = pandas.DataFrame({name: swapped(X)[:, number] for number, name in enumerate("pqr")})
    np.testing.assert_array_equal(net.predict(frame, verbose=0), expected)


@pytest.mark.parametrize("dtype", OTHER)
def test_tensors_and_variables(dtype):
    x = swapped(X, dtype)
    for tensor in (
        ops.convert_to_tensor(x),
        ops.convert_to_tensor(x, dtype),
        dp.Variable(x, dtype=dtype),
        ops.add(x, 0),
    ):
        assert tensor.dtype.isnative
        np.testing.assert_array_equal(tensor, X)
    variable = dp.Variable(np.zeros_like(X))
    variable.assign(x)
    np.testing.assert_array_equal(variable, X)
    tracked = dp.layers.Layer().add_weight(shape=X.shape, initializer=lambda shape, dtype=None: x)
    assert tracked.dtype.isnative
    np.testing.assert_array_equal(tracked, X)


def test_weights_that_are_set_and_weights_that_a_step_reads():
    net = model()
    values = net.get_weights()
    expected = net.predict(X, verbose=0)
    other = model()
    other.set_weights([swapped(value * 0) for value in values])
    other.set_weights([swapped(value) for value in values])
    np.testing.assert_array_equal(other.predict(X, verbose=0), expected)


def test_layers_that_learn_from_data():
    plain, other = layers.Normalization(), layers.Normalization()
    plain.adapt(X)
    other.adapt(swapped(X))
    np.testing.assert_array_equal(other(swapped(X)), plain(X))
    normalization = layers.Normalization(mean=swapped(X[0]), variance=swapped(X[1]))
    np.testing.assert_array_equal(normalization(X), layers.Normalization(mean=X[0], variance=X[1])(X))
    edges = layers.Discretization(bin_boundaries=swapped(np.float32([4, 9, 16])))
    np.testing.assert_array_equal(edges(swapped(X)), layers.Discretization(bin_boundaries=[4, 9, 16])(X))
    plain, other = layers.Discretization(num_bins=3), layers.Discretization(num_bins=3)
    plain.adapt(X)
    other.adapt(swapped(X))
    np.testing.assert_array_equal(other(X), plain(X))
    table = swapped(np.arange(6).reshape(3, 2))
    embedding = layers.Embedding(3, 2, embeddings_initializer=lambda shape, dtype=None: table)
    np.testing.assert_array_equal(embedding(np.array([2, 0], ">i4")), [[4, 5], [0, 1]])


def test_an_exported_program(tmp_path):
    net = model()
    net.export(tmp_path / "net.dpt", format="program")
    program = dp.saving.load_program(tmp_path / "net.dpt")
    np.testing.assert_array_equal(program(swapped(X)), program(X))


def test_a_model_that_is_built_by_its_first_batch():
    net = dp.Sequential([layers.Dense(2)], seed=1)
    net.compile("sgd", "mse")
    net.fit(swapped(X, ">i4"), swapped(Y), verbose=0)
    built = dp.Sequential([layers.Dense(2)], seed=1)
    built.compile("sgd", "mse")
    built.fit(X.astype("i4"), Y, verbose=0)
    np.testing.assert_array_equal(net.get_weights()[0], built.get_weights()[0])


@pytest.mark.parametrize("layout", WAYS)
def test_however_arrays_lie_in_memory(layout):
    def trained(change):
        net = model()
        x, y, weights = map(change, (X, Y, WEIGHTS))
        net.fit(x, y, 4, sample_weight=weights, verbose=0)
        net.fit(Dataset(x, y, weights), verbose=0, shuffle=False)
        net.fit(iter([(x, y, weights)]), verbose=0, shuffle=False, steps_per_epoch=1)
        return [*net.get_weights(), net.predict(x, verbose=0), net.predict_on_batch(x), net(x).numpy()]

    for actual, expected in zip(trained(WAYS[layout]), trained(np.copy), strict=True):
        np.testing.assert_array_equal(actual, expected)
