"""Inputs with lengths that are None: of any size, and rows that are fixed."""

import collections
import copy
import itertools
import json
import operator
import pickle

import numpy as np
import pytest

from dptrain import Input, KerasTensor, Model, Sequential, layers, ops
from dptrain.errors import ConfigError, DataError
from dptrain.models import clone_model, load_model
from dptrain.train import programs

RNG = np.random.default_rng(0)


def samples(*shape):
    return RNG.normal(size=shape).astype(np.float32)


def of_sequences():
    inputs = Input((None, 8))
    x = layers.Dense(6, activation="tanh")(inputs)
    x = layers.LayerNormalization()(x)
    return Model(inputs, layers.Dense(2)(ops.mean(x, axis=1)))


def of_images():
    return Sequential(
        [
            Input((None, None, 3)),
            layers.Conv2D(4, 3, padding="same", activation="relu"),
            layers.AveragePooling2D(),
            layers.BatchNormalization(),
            layers.Conv2D(5, 3, strides=2),
            layers.GlobalAveragePooling2D(),
            layers.Dense(2),
        ]
    )


class Pooled(Model):
    def __init__(self, **options):
        super().__init__(**options)
        self.dense = layers.Dense(2)

    def call(self, inputs):
        return self.dense(ops.max(inputs, axis=1))


@pytest.mark.parametrize(("make", "shapes"), [(of_sequences, [(5, 8), (9, 8)]), (of_images, [(9, 12, 3), (16, 10, 3)])])
def test_models_train_and_predict_on_every_size(make, shapes):
    model = make()
    assert model.input_shape == (None,) * len(shapes[0]) + shapes[0][-1:]
    assert model.output_shape == (None, 2)
    model.compile("sgd", "mse", jit_compile=False)
    for shape in (*shapes, shapes[0]):
        x, y = samples(10, *shape), samples(10, 2)
        model.fit(x, y, batch_size=4, verbose=0)
        predictions = model.predict(x, verbose=0)
        assert predictions.shape == (10, 2)
        np.testing.assert_allclose(predictions, np.asarray(model(x)), atol=1e-6)
        expected = np.mean((predictions - y) ** 2)
        np.testing.assert_allclose(model.evaluate(x, y, verbose=0), expected, rtol=1e-5)
    with pytest.raises(DataError, match=r"model expects samples of shape \(.*None.*\), data has samples of shape"):
        model.predict(samples(10, *shapes[0][:-1], 5), verbose=0)


def test_one_size_is_trained_as_without_none():
    x, y = samples(10, 5, 8), samples(10, 2)
    results = []
    for length in (None, 5):
        inputs = Input((length, 8))
        pooled = layers.GlobalAveragePooling2D()(layers.Reshape((-1, 1, 8))(layers.Dense(8)(inputs)))
        model = Model(inputs, layers.Dense(2)(pooled), seed=3)
        model.compile("adam", "mse", jit_compile=False)
        model.fit(x, y, batch_size=4, verbose=0, shuffle=False)
        results.append(model.get_weights())
    for actual, other in zip(*results, strict=True):
        np.testing.assert_array_equal(actual, other)


def test_ops_on_symbolic_tensors_are_run_on_real_ones():
    x = Input((None, 8))
    n = ops.shape(x)[1]
    results = {
        "mean": ops.mean(x, axis=1),
        "of the number": x / n,
        "flat": ops.reshape(x, (-1, 8)),
        "halves": ops.reshape(x, (x.shape[0], n * 2, 4)),
        "ravelled": ops.reshape(x, (ops.shape(x)[0], -1)),
        "part": x[:, 1:4],
        "steps": x[:, 1::2],
        "last": x[:, -1],
        "zeros": ops.zeros_like(x[:, :3]),
        "twice": ops.concatenate([x, x[:, 1:]], axis=1),
        "products": ops.matmul(x, ops.transpose(x, (0, 2, 1))),
        "conv": ops.reshape(ops.conv(ops.expand_dims(x, -1), np.ones((3, 3, 1, 1), np.float32), 2, "same"), (-1, 4)),
        "layer": ops.reshape(layers.Conv2D(1, 2)(ops.expand_dims(x, -1)), (-1, 7)),
    }
    model = Model(x, results)
    assert [str(results[name].shape) for name in ("flat", "halves", "ravelled", "twice")] == [
        *("(None, 8)", "(None, None, 4)", "(None, None)", "(None, None, 8)")
    ]
    for length in (2, 5):
        a = samples(3, length, 8)
        result = {name: np.asarray(value) for name, value in model(a).items()}
        np.testing.assert_allclose(result["mean"], a.mean(axis=1), rtol=1e-5)
        np.testing.assert_allclose(result["of the number"], a / length, rtol=1e-6)
        np.testing.assert_array_equal(result["flat"], a.reshape(-1, 8))
        np.testing.assert_array_equal(result["halves"], a.reshape(3, -1, 4))
        np.testing.assert_array_equal(result["ravelled"], a.reshape(3, -1))
        np.testing.assert_array_equal(result["part"], a[:, 1:4])
        np.testing.assert_array_equal(result["steps"], a[:, 1::2])
        np.testing.assert_array_equal(result["last"], a[:, -1])
        np.testing.assert_array_equal(result["zeros"], np.zeros_like(a[:, :3]))
        np.testing.assert_array_equal(result["twice"], np.concatenate([a, a[:, 1:]], 1))
        np.testing.assert_allclose(result["products"], a @ a.transpose(0, 2, 1), atol=1e-5)
        assert result["conv"].shape == (3 * -(-length // 2), 4)
        assert result["layer"].shape == (3 * (length - 1), 7)


def test_a_layer_may_ask_for_the_number():
    class Loop(layers.Layer):
        def call(self, x):
            total = x[:, 0]
            for place in range(1, x.shape[1]):
                total = total + x[:, place]
            return total

    inputs = Input((None, 8))
    model = Model(inputs, [Loop()(inputs), layers.Lambda(lambda x: ops.flip(x, 1))(inputs)])
    assert model.output_shape == [(None, 8), (None, None, 8)]
    for length in (2, 5):
        a = samples(3, length, 8)
        summed, flipped = model.predict(a, verbose=0)
        np.testing.assert_allclose(summed, a.sum(axis=1), rtol=1e-5)
        np.testing.assert_array_equal(flipped, a[:, ::-1])


def test_subclassed_and_nested_models():
    inner = of_sequences()
    inputs = Input((None, 8))
    pooled = Pooled()
    outer = Model(inputs, inner(layers.Dense(8)(inputs)) + pooled(inputs))
    copy = clone_model(outer)
    assert outer.output_shape == copy.output_shape == (None, 2)
    copy.set_weights(outer.get_weights())
    for length in (3, 6):
        x = samples(4, length, 8)
        expected = np.asarray(outer(x))
        np.testing.assert_allclose(copy.predict(x, verbose=0), expected, atol=1e-6)
        assert pooled.predict(x, verbose=0).shape == (4, 2)
    model = Pooled()
    model.build((None, None, 8))
    assert model.compute_output_shape((None, None, 8)) == (None, 2)


@pytest.mark.sample(4)
@pytest.mark.parametrize("make", [of_sequences, of_images])
def test_files_and_summaries(make, tmp_path, capsys):
    model = make()
    model.summary()
    assert str(model.layers[-2].output.shape) in capsys.readouterr().out
    model.save(tmp_path / "m.keras")
    loaded = load_model(tmp_path / "m.keras")
    assert loaded.input_shape == model.input_shape
    x = samples(3, *(n or 11 for n in model.input_shape[1:]))
    np.testing.assert_array_equal(model.predict(x, verbose=0), loaded.predict(x, verbose=0))


def test_layers_that_need_the_number_refuse():
    with pytest.raises(
        ConfigError, match=r"fully-defined \(no `None` dimensions\).*shape=\(None, 4\) .*'dense/kernel'"
    ):
        layers.Dense(4)(layers.Flatten()(Input((None, 3))))
    with pytest.raises(ConfigError, match="not known outside a step"):
        int(ops.shape(Input((None, 3)))[1])
    model = of_sequences()
    with pytest.raises(ConfigError, match="not supported: exporting"):
        model.export("x")


def test_fixed_rows():
    inputs = Input((8,), batch_size=4)
    assert inputs.shape == (4, 8)
    model = Model(inputs, layers.Dense(2)(ops.reshape(inputs, (4, 2, 4)))[:, 0])
    assert (model.input_shape, model.output_shape) == ((4, 8), (4, 2))
    assert clone_model(model).input_shape == (4, 8)
    assert Input(batch_shape=(4, None)).shape == (4, None)
    with pytest.raises(ConfigError, match="cannot pass both `batch_size` and `batch_shape`"):
        Input(batch_size=4, batch_shape=(4, 8))
    with pytest.raises(ConfigError, match="not supported: exporting a model with a fixed batch_size, 4"):
        model.export("x")
    model.compile("sgd", "mse", jit_compile=False)
    x, y = samples(8, 8), samples(8, 2)
    model.fit(x, y, verbose=0)
    model.evaluate(x, y, verbose=0)
    assert model.predict(x, verbose=0).shape == (8, 2)
    assert model.predict_on_batch(x[:4]).shape == (4, 2)
    for run in (
        lambda: model(x[:3]),
        lambda: model.predict(x[:6], verbose=0),
        lambda: model.fit(x[:6], y[:6], verbose=0),
    ):
        with pytest.raises(
            ConfigError, match=r"Expected shape \(4, 8\), but input has incompatible shape.*must have 4 rows"
        ):
            run()


def test_batches_of_a_generator_may_differ_in_length():
    model = of_sequences()
    model.compile("sgd", "mse", jit_compile=False)

    def batches(lengths):
        for length in lengths:
            yield samples(4, length, 8), samples(4, 2)

    losses = model.fit(batches((3, 5, 3, 7)), steps_per_epoch=4, shuffle=False, verbose=0).history["loss"]
    assert np.isfinite(losses).all()
    predictions = model.predict(((samples(4, n, 8),) for n in (3, 4)), steps=2, verbose=0)
    assert predictions.shape == (8, 2)


@pytest.mark.parametrize("traced", [False, True])
def test_a_step_is_traced_for_each_number_of_rows_only_where_it_asks(monkeypatch, traced):
    inputs = Input((None, 8))
    pooled = layers.Lambda(lambda x: ops.mean(x, axis=1) / (int(x.shape[0]) if traced else x.shape[0]))(inputs)
    model = Model(inputs, layers.Dense(2)(pooled))
    model.compile("sgd", "mse", jit_compile=False)
    traces = []
    step = model.train_step
    monkeypatch.setattr(model, "train_step", lambda data: (traces.append(data[0].shape), step(data))[1])
    x, y = samples(10, 5, 8), samples(10, 2)
    model.fit(x, y, batch_size=4, epochs=2, verbose=0)  # batches of 4, 4 and 2
    assert len(traces) == (2 if traced else 1)
    pooled = x[:3].mean(axis=1) @ model.get_weights()[0] / 3 + model.get_weights()[1]
    np.testing.assert_allclose(model.predict_on_batch(x[:3]), pooled, atol=1e-5)


@pytest.mark.parametrize(
    ("limits", "kept"),
    [({}, 79), ({"_MAX_TENSORS": 100}, 64), ({"_MAX_SMALL": 70}, 70)],
    ids=["small", "large", "many"],
)
def test_programs_of_the_last_sizes_are_kept(monkeypatch, limits, kept):
    for name, limit in limits.items():
        monkeypatch.setattr(programs, name, limit)
    model = of_sequences()
    model.compile("sgd", "mse", jit_compile=False)
    for length in range(1, 80):
        model.predict_on_batch(samples(2, length, 8))
    assert len(model._programs._placed) == len(model._programs._any_size_cache) == kept
    assert len(model._programs._prepared) <= 32


CROP = {"top_cropping": 0, "left_cropping": 1, "target_height": 2, "target_width": 3}
# What asks for lengths, of one tensor (rows, None, 4), beside NumPy.
ASKING = {
    "flip": (lambda x: ops.flip(x, 1), lambda a: a[:, ::-1]),
    "roll": (lambda x: ops.roll(x, 1, axis=1), lambda a: np.roll(a, 1, axis=1)),
    "rot90": (lambda x: ops.rot90(x, axes=(1, 2)), lambda a: np.rot90(a, axes=(1, 2))),
    "trace": (lambda x: ops.trace(x, axis1=1, axis2=2), lambda a: np.trace(a, axis1=1, axis2=2)),
    "sort": (lambda x: ops.sort(x, axis=1), lambda a: np.sort(a, axis=1)),
    "argsort": (lambda x: ops.argsort(x, axis=1), lambda a: np.argsort(a, axis=1)),
    "median": (lambda x: ops.median(x, axis=1), lambda a: np.median(a, axis=1)),
    "quantile": (lambda x: ops.quantile(x, 0.3, axis=1), lambda a: np.quantile(a, 0.3, axis=1)),
    "prod": (lambda x: ops.prod(x, axis=1), lambda a: np.prod(a, axis=1)),
    "tril": (lambda x: ops.tril(x, k=1), lambda a: np.tril(a, 1)),
    "crop_images": (
        lambda x: ops.image.crop_images(ops.expand_dims(x, -1), **CROP),
        lambda a: a[:, :2, 1:, None],
    ),
    "extract_sequences": (
        lambda x: ops.extract_sequences(ops.transpose(x, (0, 2, 1)), 2, 1),
        lambda a: np.stack([a[:, n : n + 2].transpose(0, 2, 1) for n in range(a.shape[1] - 1)], 2),
    ),
    "conv": (
        lambda x: ops.conv(x, np.ones((2, 4, 1), np.float32)),
        lambda a: (a[:, 1:] + a[:, :-1]).sum(-1, keepdims=True),
    ),
}


@pytest.mark.parametrize("name", ASKING)
def test_ops_that_ask_for_lengths_become_nodes_of_the_graph(name, tmp_path):
    function, expected = ASKING[name]
    inputs = Input((None, 4))
    model = Model(inputs, ops.cast(function(inputs), "float32") * 2)
    assert [type(layer).__name__ for layer in model.layers] == ["InputLayer"]
    model.save(tmp_path / "model.keras")
    for made in (model, clone_model(model), load_model(tmp_path / "model.keras")):
        for length in (3, 6):
            a = samples(2, length, 4)
            assert made.output_shape == tuple(
                n if n == 4 or (axis and n == model.output_shape[axis]) else None
                for axis, n in enumerate(model.output_shape)
            )
            np.testing.assert_allclose(made.predict(a, verbose=0), 2.0 * expected(a), rtol=1e-5, atol=1e-6)


def test_what_such_ops_are_called_on_stays_in_the_graph(tmp_path):
    inputs = Input((None, 4))
    deep = layers.Dense(4, name="dense")(ops.flip(layers.Dense(4, name="first")(inputs), axis=1))
    model = Model(inputs, [ops.dot_product_attention(*[ops.expand_dims(deep, 2)] * 3), ops.unstack(deep, 4, axis=2)[1]])
    assert [layer.name for layer in model.layers[1:]] == ["first", "dense"]
    assert model.output_shape == [(None, None, 1, 4), (None, None)]
    model.save(tmp_path / "model.keras")
    a = samples(2, 5, 4)
    for actual, kept in zip(load_model(tmp_path / "model.keras").predict(a), model.predict(a), strict=True):
        np.testing.assert_array_equal(actual, kept)
    model.compile("sgd", ["mse", "mse"])
    before = model.get_weights()[0]
    model.fit(a, [a[:, :, None], a[:, :, 0]], verbose=0)
    assert not np.array_equal(model.get_weights()[0], before)


def test_the_first_error_of_an_op_is_that_of_its_arguments():
    x = Input((None, 4))
    with pytest.raises(ConfigError, match="axis"):
        ops.flip(x, axis=5)
    scanned = ops.associative_scan(lambda a, b: a + b, x, axis=1)
    model = Model(x, scanned)
    np.testing.assert_allclose(model(np.ones((1, 3, 4), np.float32))[0, :, 0], [1, 2, 3])
    with pytest.raises(ConfigError, match="operation 'associative_scan' in a file"):
        model.to_json()


def test_as_many_outputs_as_an_unknown_length_are_refused():
    x = Input((None, 4))
    for call in (lambda: ops.unstack(x, axis=1), lambda: layers.Lambda(lambda a: ops.unstack(a, axis=1))(x)):
        with pytest.raises(ConfigError):
            call()
    assert len(ops.unstack(x, axis=2)) == 4


UNKNOWN = {
    "rfft": (lambda x: ops.concatenate(ops.rfft(x), -1), lambda x: (np.fft.rfft(x).real, np.fft.rfft(x).imag)),
    "top_k": (lambda x: ops.concatenate(ops.top_k(x, 2)[:1], -1), lambda x: (np.sort(x)[..., :-3:-1],)),
    "linspace": (lambda x: ops.linspace(x, 2 * x, 3, axis=-1), lambda x: (np.linspace(x, 2 * x, 3, axis=-1),)),
    "linspace, without the end": (
        lambda x: ops.linspace(x, 2.0, 4, endpoint=False, axis=1),
        lambda x: (np.linspace(x, 2.0, 4, endpoint=False, axis=1),),
    ),
    "logspace": (lambda x: ops.logspace(x, x + 1, 2, axis=1), lambda x: (np.logspace(x, x + 1, 2, axis=1),)),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_ops_on_unknown_lengths(name):
    function, expected = UNKNOWN[name]
    inputs = Input((None,))
    model = Model(inputs, function(inputs))
    for length in (4, 7):
        x = samples(3, length)
        reference = np.concatenate(expected(x), -1)
        np.testing.assert_allclose(model.predict(x, verbose=0), reference, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(function(ops.convert_to_tensor(x)), reference, rtol=1e-5, atol=1e-6)


def test_attention_of_unknown_lengths():
    query, key, value = (Input((None, 2, 3)) for _ in range(3))
    model = Model([query, key, value], ops.dot_product_attention(query, key, value))
    q, k, v = samples(2, 5, 2, 3), samples(2, 4, 2, 3), samples(2, 4, 2, 3)
    expected = ops.dot_product_attention(q, k, v)
    np.testing.assert_allclose(model.predict([q, k, v], verbose=0), expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(ConfigError, match="incompatible"):
        ops.dot_product_attention(q, k, v[:, :3])


def test_joined_tensors_have_the_lengths_that_any_of_them_knows():
    rows, unknown = KerasTensor((None, 3)), KerasTensor((None, None))
    for first, second in ((rows, unknown), (unknown, rows)):
        assert ops.vstack([first, second]).shape == (None, 3)
        assert ops.dstack([first, second]).shape == (None, 3, 2)
        assert ops.concatenate([first, second], 0).shape == (None, 3)
        assert ops.stack([first, second]).shape == (2, None, 3)
        assert ops.concatenate([ops.ones((4, 3)), first], 1).shape[0] == 4
    a, b = Input((None, 3)), Input((None, None))
    model = Model([a, b], ops.concatenate([a, b], 1))
    x, y = samples(2, 4, 3), samples(2, 5, 3)
    np.testing.assert_array_equal(model.predict([x, y], verbose=0), np.concatenate([x, y], 1))
    assert model.output_shape == (None, None, 3)


def test_unknown_lengths_are_none_where_a_model_is_made():
    sequences = Input((None, 8))
    for x in (sequences, sequences + 1, layers.Dense(8)(sequences), sequences[:, 1:], KerasTensor((None, None, 8))):
        rows, length, width = x.shape
        assert (rows is None, length is None, width) == (True, True, 8)
        assert [n is None for n in x.shape] == [True, True, False]
        for shape in (x.shape[:2], tuple(x.shape), (*x.shape, 3), x.shape + (3,), [x.shape[0]], [x.shape[-2]]):  # noqa: RUF005
            assert shape[0] is None
        assert ((3,) + x.shape)[1] is None  # noqa: RUF005
        assert x.shape == (None, None, 8)
        assert isinstance(x.shape, tuple)
        assert str(x.shape) == "(None, None, 8)"
    assert Input(()).shape[-1] is None
    lengths = ops.shape(sequences)  # to compute with
    assert lengths == (None, None, 8)
    assert lengths[1] is not None
    assert Input((3,), batch_size=4).shape[0] == 4


# What can be done with a tuple, as users' code does it.
READINGS = {
    "parts": lambda s: [s[:], s[::-1], s[0], s[-2], next(iter(s)), *itertools.islice(s, 1)],
    "copies": lambda s: [tuple(s), [*s], (*s, 1), copy.copy(s), copy.deepcopy(s), pickle.loads(pickle.dumps(s))],
    "sums": lambda s: [operator.add(s, (1,)), operator.add((1,), s), s + s, sum((s, (1,)), ()), [1].__iadd__(s)],
    "multiples": lambda s: [s * 2, 2 * s, s * 0, operator.mul(s, 2)],
    "orders": lambda s: [tuple(reversed(s)), sorted(s, key=str), max(s, key=str)],
    "pairs": lambda s: [*enumerate(s), *zip(s, s, strict=True), *itertools.chain(s, s)],
    "identities": lambda s: [[length is None for length in s], list(map(operator.is_, s, [None] * 3))],
    "arguments": lambda s: [(lambda a, *b: (a, b))(*s), operator.itemgetter(1, 2)(s)],
    "sets": lambda s: [{*s} == {None, 8}, dict.fromkeys(s), {(None, None, 8): 1}[s], hash(s), collections.Counter(s)],
    "comparisons": lambda s: [s == (None, None, 8), s != (None, None, 8), None in s, s.count(None), s.index(8), len(s)],
    "texts": lambda s: [str(s), repr(s), f"{s}", "{} {}".format(*s), json.dumps(s)],
    "arrays": lambda s: [np.array(s, object).tolist(), [n if n is not None else -1 for n in s]],
}


def without_types(value):
    """Return a value with lists for tuples, whose elements show their type."""
    if isinstance(value, list | tuple):
        return [without_types(part) for part in value]
    return type(value), value


@pytest.mark.parametrize("name", READINGS)
def test_a_shape_is_a_plain_tuple_where_a_model_is_made(name):
    read, plain = READINGS[name], (None, None, 8)
    assert without_types(read(Input((None, 8)).shape)) == without_types(read(plain))


def test_no_method_of_tuples_is_forgotten():
    from dptrain.program.shapes import OpenShape

    # These compare or describe, by the elements' own methods, or give no elements.
    others = {name for name in dir(object) if name not in ("__hash__",)} | {"__class_getitem__", "__len__"}
    others |= {"__contains__", "count", "index", "__getnewargs__"}
    assert set(dir(tuple)) - others <= set(vars(OpenShape))


class Halving(layers.Layer):
    def call(self, x):
        assert not any(n is None for n in x.shape)  # steps know their lengths
        return ops.reshape(x, (x.shape[0], x.shape[1] // 2, -1))


def test_none_is_a_length_of_the_tensor_itself(tmp_path):
    x = Input((None, 8))
    mean = ops.mean(x, 1)
    outputs = [
        ops.reshape(x, (x.shape[0], -1, 4)),
        ops.reshape(x, (x.shape[0], x.shape[1], 2, 4)),
        ops.reshape(mean, (mean.shape[0], -1)),
        ops.broadcast_to(mean, (mean.shape[0], 8)),
        ops.broadcast_to(ops.ones((1, 8)), (x.shape[0], 8)) + mean,
        ops.zeros((x.shape[0], 8)) + mean,
        ops.full((x.shape[0], 8), 2.0) * mean,
        Halving()(x),
    ]
    model = Model(x, outputs)
    data = samples(3, 6, 8)
    means = data.mean(1)
    expected = [data.reshape(3, -1, 4), data.reshape(3, 6, 2, 4), means, means, means + 1, means, 2 * means]
    expected.append(data.reshape(3, 3, 16))
    for result, reference in zip(model.predict(data, verbose=0), expected, strict=True):
        np.testing.assert_allclose(result, reference, rtol=1e-5, atol=1e-6)
    model.save(tmp_path / "m.keras")
    again = load_model(tmp_path / "m.keras", custom_objects={"Halving": Halving})
    for result, reference in zip(again.predict(data, verbose=0), expected, strict=True):
        np.testing.assert_allclose(result, reference, rtol=1e-5, atol=1e-6)
    for call in (
        lambda: ops.zeros((3, x.shape[1])),
        lambda: ops.reshape(ops.ones((4, 2)), (2, None)),
        lambda: Model(x, layers.Lambda(lambda t: ops.zeros((None, 3)))(x)),
    ):
        with pytest.raises(ConfigError, match=r"the length None at axis .* take it from `ops.shape\(x\)`"):
            call()


def test_a_number_of_parts_is_passed_where_a_length_is_unknown():
    x = Input((None, 2))
    model = Model(x, ops.unstack(x, 3, axis=1))
    data = samples(4, 3, 2)
    for part, expected in zip(model.predict(data, verbose=0), np.unstack(data, axis=1), strict=True):
        np.testing.assert_array_equal(part, expected)
    with pytest.raises(ConfigError, match=r"num=3, but axis 1 .* has length 5"):
        model.predict(samples(4, 5, 2), verbose=0)


@pytest.mark.parametrize("method", ["linear", "lower", "higher", "midpoint", "nearest"])
@pytest.mark.parametrize("ignores_nan", [False, True])
def test_quantiles_of_computed_fractions(method, ignores_nan):
    function = ops.nanquantile if ignores_nan else ops.quantile
    reference = np.nanquantile if ignores_nan else np.quantile
    x, fractions = samples(3, 7), np.array([0.0, 0.3, 0.5, 1.0], np.float32)
    x[1, 2] = np.nan
    values = Input((None,))
    q = Input(batch_shape=(4,))
    model = Model([values, q], function(values, ops.sqrt(q * q), axis=-1, method=method, keepdims=True))
    expected = reference(x, fractions, axis=-1, method=method, keepdims=True)
    np.testing.assert_allclose(model([x, fractions]), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(function(x, fractions, -1, method, True), expected, rtol=1e-5, atol=1e-6)
    outside = np.array([-0.1, 0.5, 1.1, np.nan], np.float32)
    computed = layers.Lambda(lambda t: ops.transpose(function(t, outside + ops.min(t * t, (0, 1)) * 0, -1, method)))
    is_nan = np.isnan(Model(values, computed(values)).predict(x[:1], verbose=0))
    np.testing.assert_array_equal(is_nan[0], [True, False, True, True])


@pytest.mark.parametrize(("start", "stop"), [(1.0, 1000.0), (-2.0, -8.0)])
@pytest.mark.parametrize("endpoint", [True, False])
def test_geometric_series_of_computed_ends(start, stop, endpoint):
    first = Input((3,))
    model = Model(first, ops.geomspace(first, stop, 4, endpoint, axis=1))
    x = np.linspace(start, start * 2, 6, dtype=np.float32).reshape(2, 3)
    expected = np.geomspace(x, stop, 4, endpoint, axis=1)
    np.testing.assert_allclose(model.predict(x, verbose=0), expected, rtol=1e-5)
    np.testing.assert_allclose(ops.geomspace(x, stop, 4, endpoint, axis=1), expected, rtol=1e-5)


def test_loops_over_unknown_lengths():
    x = Input((None, 3))
    steps = ops.transpose(x, (1, 0, 2))
    total, _ = ops.scan(lambda carry, part: (carry + part, carry), ops.zeros_like(x[:, 0]), steps)
    model = Model(x, [total, ops.transpose(ops.map(lambda part: part * 2, steps), (1, 0, 2))])
    for length in (4, 6):
        data = samples(2, length, 3)
        results = model.predict(data, verbose=0)
        np.testing.assert_allclose(results[0], data.sum(1), rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(results[1], data * 2)


class Positions(layers.Layer):
    """Adds something from a table of positions, which has `longest` rows."""

    def __init__(self, longest, add):
        super().__init__()
        self.longest, self.add = longest, add
        self.table = layers.Embedding(longest, 4)
        self.weight = self.add_weight((longest, 4))

    def call(self, x):
        return self.add(self, x)


def refusing(layer, x):
    if x.shape[1] > layer.longest:
        raise ValueError("too long")
    return x + layer.weight[: x.shape[1]]


TABLES = {
    "embedding": lambda layer, x: x + layer.table(ops.arange(ops.shape(x)[1])),
    "weight": lambda layer, x: x + layer.weight[: x.shape[1]],
    "array": lambda layer, x: x + np.ones((layer.longest, 4), np.float32)[: x.shape[1]],
    "taken": lambda layer, x: x + ops.take(layer.weight, ops.arange(x.shape[1]), axis=0),
    "refused by the user": refusing,
}


@pytest.mark.parametrize("longest", [5, 20, 100, 300])
@pytest.mark.parametrize("name", TABLES)
def test_tables_of_positions_may_be_short(name, longest):
    """Where a layer asks for an unknown length it is tried with some, which the table may not have."""
    inputs = Input((None, 4))
    layer = Positions(longest, TABLES[name])
    model = Model(inputs, layer(inputs))
    assert model.output_shape == (None, None, 4)
    x = samples(2, 5, 4)
    np.testing.assert_allclose(model.predict(x, verbose=0), layer(x), rtol=1e-6)
    with pytest.raises((ConfigError, DataError, ValueError)):
        model.predict(samples(2, longest + 1, 4), verbose=0)


@pytest.mark.parametrize(
    ("make", "length"),
    [
        (lambda: layers.Conv1D(3, 400), 450),
        (lambda: layers.AveragePooling1D(300), 600),
        (lambda: layers.Cropping1D((300, 300)), 604),
        (lambda: layers.STFTSpectrogram(frame_length=512, frame_step=128, fft_length=512), 1024),
        (lambda: layers.Lambda(lambda x: ops.extract_sequences(x[:, :, 0], 1024, 256)), 2048),
    ],
)
def test_windows_may_be_long(make, length):
    inputs = Input((None, 1))
    layer = make()
    model = Model(inputs, layer(inputs))
    x = samples(2, length, 1)
    result = model.predict(x, verbose=0)
    np.testing.assert_allclose(result, layer(x), rtol=1e-4, atol=1e-4)
    assert model.output_shape[:2] == (None, None)
    assert result.shape[2:] == model.output_shape[2:]


def test_what_no_length_fits_says_why_at_first():
    calls = []

    def mismatched(x):
        calls.append(x.shape[1])
        return ops.reshape(x, (-1, int(x.shape[1]) * 7 + 1))

    with pytest.raises(ConfigError, match="reshape"):
        layers.Lambda(mismatched)(Input((None, 4)))
    assert len(calls) > 3


def length(x):
    return ops.shape(x)[1]


# What asks for a length, outside of layers.
OF_LENGTHS = {
    "numbers": lambda x, i: x + ops.cast(ops.arange(length(x)), "float32")[:, None],
    "numbers of a type": lambda x, i: x * ops.expand_dims(ops.arange(length(x), dtype="float32"), 1),
    "numbers from 1": lambda x, i: x * ops.arange(1, length(x) + 1, dtype="float32")[None, :, None],
    "numbers after": lambda x, i: x + ops.cast(ops.arange(length(x), 2 * length(x)), "float32")[:, None],
    "numbers of rows": lambda x, i: x + ops.cast(ops.arange(ops.shape(x)[0]), "float32")[:, None, None],
    "mirrored": lambda x, i: ops.pad(x, ((0, 0), (1, 2), (0, 0)), mode="reflect"),
    "wrapped": lambda x, i: ops.pad(x, ((0, 0), (2, 0), (0, 0)), mode="wrap"),
    "taken": lambda x, i: ops.take_along_axis(x, i, axis=1),
    "frames": lambda x, i: ops.stft(ops.repeat(x[:, :, 0], 8, axis=1), 8, 4, 8)[0],
    "decoded": lambda x, i: ops.ctc_decode(x, ops.sum(ops.ones_like(i[:, :, 0]), 1))[1],
}


@pytest.mark.parametrize("name", OF_LENGTHS)
def test_ops_outside_of_layers_ask_for_lengths(name, tmp_path):
    inputs = [Input((None, 3)), Input((None, 3), dtype="int32")]
    model = Model(inputs, OF_LENGTHS[name](*inputs))
    model.save(tmp_path / "m.keras")
    loaded = load_model(tmp_path / "m.keras")
    for rows, n in ((2, 4), (3, 5)):
        x, i = samples(rows, n, 3), RNG.integers(0, n, (rows, n, 3)).astype(np.int32)
        expected = OF_LENGTHS[name](ops.convert_to_tensor(x), ops.convert_to_tensor(i))
        for predicting in (model, loaded):
            np.testing.assert_allclose(predicting.predict([x, i], verbose=0), expected, rtol=1e-5, atol=1e-5)


def test_numbers_with_a_step_of_an_unknown_length_are_refused():
    with pytest.raises(ConfigError, match="not known outside a step"):
        ops.arange(0, length(Input((None, 3))), 2)
