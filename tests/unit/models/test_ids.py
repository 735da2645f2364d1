"""Ids are exact in every policy, also where `Input` says no type: half precision knows no odd number above 256."""

import numpy as np
import pytest

import dptrain as dp
from dptrain import layers, mixed_precision, ops
from tests.sample import sample

NUMBER = 300
IDS = np.arange(NUMBER).reshape(-1, 1)


@pytest.fixture(params=sample(["mixed_bfloat16", "float32", "mixed_float16", "bfloat16"], 2))
def policy(request):
    mixed_precision.set_global_policy(request.param)
    return request.param


def table(**options):
    """Return an embedding of n as n // 2, which half precision holds."""
    return layers.Embedding(NUMBER, 1, lambda shape, dtype=None: np.arange(NUMBER)[:, None] // 2, **options)


class Own(layers.Layer):
    def __init__(self, part=lambda x: x, **options):
        super().__init__(**options)
        self.part, self.table = part, table()

    def call(self, x):
        return self.table(self.part(x))


class OwnModel(dp.Model):
    def __init__(self):
        super().__init__()
        self.table = table()

    def call(self, x):
        return self.table(x)


def functional(*stack):
    inputs = x = layers.Input((1,))
    for layer in stack:
        x = layer(x)
    return dp.Model(inputs, layers.Flatten()(x))


def joined():
    inputs = layers.Input((1,))
    return dp.Model(inputs, layers.Flatten()(Own()(layers.Concatenate()([inputs[:, :1], inputs])[:, 1:])))


def moved_by_operations():
    inputs = layers.Input((1,))
    parts = ops.split(ops.concatenate([ops.reshape(inputs, (-1, 1)), inputs[:, None, 0]], axis=1), 2, axis=-1)
    return dp.Model(inputs, layers.Flatten()(Own()(ops.transpose(ops.flip(parts[1], 1), (0, 1)))))


MODELS = {
    "functional": lambda: functional(table()),
    "sequential": lambda: dp.Sequential([layers.Input((1,)), table(), layers.Flatten()]),
    "without an input": lambda: dp.Sequential([table(), layers.Flatten()]),
    "nested": lambda: functional(functional(table())),
    "nested twice": lambda: functional(dp.Sequential([layers.Input((1,)), functional(table())])),
    "moved": lambda: functional(layers.Reshape((1, 1)), layers.Flatten(), table()),
    "own layer": lambda: functional(Own()),
    "part in an own layer": lambda: functional(Own(lambda x: x[:, :1])),
    "behind what moves": lambda: functional(layers.Reshape((1, 1)), layers.Flatten(), Own()),
    "joined": joined,
    "moved by operations": moved_by_operations,
    "function": lambda: functional(layers.Lambda(lambda x: x[:, :1]), table()),
    "subclass": OwnModel,
    "subclass in a model": lambda: functional(OwnModel()),
}
AS_FLOATS = {
    "functional": MODELS["functional"],
    "sequential": MODELS["sequential"],
    "nested": MODELS["nested"],
    "without autocast": lambda: functional(Own(autocast=False)),
    "own layer": lambda: functional(Own()),
    "subclass": OwnModel,
}


def looked_up(model, ids, policy):
    model.compile("sgd", "mse", dtype=policy)
    for result in (model.predict(ids, verbose=0), model(ids), model.predict(iter([(ids,)]), verbose=0, steps=1)):
        yield np.asarray(result, np.float32).ravel()


@pytest.mark.parametrize("name", MODELS)
def test_integers(name, policy):
    for dtype in ("int64",) if policy != "mixed_bfloat16" else ("int64", "int32", "uint16", ">i4"):
        for result in looked_up(MODELS[name](), IDS.astype(dtype), policy):
            np.testing.assert_array_equal(result, IDS.ravel() // 2)


@pytest.mark.parametrize("name", AS_FLOATS)
def test_floating_point_numbers(name, policy):
    for result in looked_up(AS_FLOATS[name](), IDS.astype(np.float32), policy):
        np.testing.assert_array_equal(result, IDS.ravel() // 2)


def test_the_row_of_each_id_is_trained(policy):
    model = functional(table())
    model.compile(dp.optimizers.SGD(100.0), "mae", dtype=policy)
    ids = np.array([[257], [259], [261]])
    model.fit(ids, np.full((3, 1), 1e4), batch_size=3, verbose=0)
    changed = np.flatnonzero(np.asarray(model.get_weights()[0], np.float32).ravel() != np.arange(NUMBER) // 2)
    assert changed.tolist() == [257, 259, 261]


@pytest.mark.parametrize("name", ["functional", "own layer"])
def test_an_exported_program_has_the_same_rows(name, policy, tmp_path):
    model = MODELS[name]()
    model.export(tmp_path / "net.dpt", format="program")
    result = dp.saving.load_program(tmp_path / "net.dpt")(IDS)
    np.testing.assert_array_equal(np.asarray(result, np.float32).ravel(), IDS.ravel() // 2)


def test_large_ids_do_not_become_float32():
    numbers = np.array([[2**24], [2**24 + 1], [2**24 + 3]])
    lookup = layers.IntegerLookup(vocabulary=numbers.ravel().tolist())
    predictions = functional(lookup).predict(numbers, verbose=0)
    assert predictions.ravel().tolist() == [1, 2, 3]


def test_categories_and_bins(policy):
    ids = np.array([[257], [259]])
    encoded = functional(layers.CategoryEncoding(NUMBER, "one_hot")).predict(ids, verbose=0)
    assert np.asarray(encoded, np.float32).argmax(1).tolist() == [257, 259]
    for x in (ids, ids.astype(np.float32)):
        binned = functional(layers.Discretization([256.5, 258.0, 260.0])).predict(x, verbose=0)
        assert binned.ravel().tolist() == [1, 2]


def test_what_computes_does_so_in_half_precision():
    mixed_precision.set_global_policy("mixed_bfloat16")
    try:
        inputs = layers.Input((4, 4, 1))
        model = dp.Model(inputs, [layers.AveragePooling2D()(inputs), layers.Rescaling(0.1)(inputs)])
    finally:
        mixed_precision.set_global_policy("float32")
    x = np.arange(16, dtype=np.uint8).reshape(1, 4, 4, 1)
    for of_integers, of_floats in zip(
        model.predict(x, verbose=0), model.predict(x.astype("f4"), verbose=0), strict=True
    ):
        np.testing.assert_array_equal(of_integers, of_floats)
    assert ops.convert_to_tensor(model(x)[0]).dtype.name == "bfloat16"
