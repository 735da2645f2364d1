"""Logits of large vocabularies are computed in chunks of positions, with the numbers of whole ones."""

import numpy as np
import pytest

import dptrain as dp
from dptrain import layers, ops
from dptrain.program.body import has_body
from dptrain.train import chunking, programs

ROWS, POSITIONS, FEATURES, CLASSES = 5, 12, 4, 40


class Tied(layers.Layer):
    """Scores by the transposed table of its ids' vectors, of a bounded size."""

    def build(self, input_shape):
        self.table = self.add_weight((CLASSES, FEATURES), name="table")

    def call(self, ids):
        x = ops.take(self.table, ids, axis=0)
        return 3 * ops.tanh(ops.matmul(ops.tanh(x), ops.transpose(self.table)) / 3)


def functional(head):
    inputs = dp.Input((POSITIONS,), dtype="int32")
    x = layers.LayerNormalization()(layers.Embedding(CLASSES, FEATURES)(inputs))
    return dp.Model(inputs, head(x))


def two_heads():
    inputs = dp.Input((POSITIONS,), dtype="int32")
    x = layers.Embedding(CLASSES, FEATURES)(inputs)
    return dp.Model(inputs, {"a": layers.Dense(CLASSES)(x), "b": layers.Dense(CLASSES, use_bias=False)(ops.tanh(x))})


MODELS = {
    "dense": lambda: functional(layers.Dense(CLASSES)),
    "softmax": lambda: functional(layers.Dense(CLASSES, "softmax")),
    "einsum": lambda: functional(layers.EinsumDense("btf,fc->btc", (None, CLASSES), bias_axes="c")),
    "tied": lambda: dp.Sequential([layers.Input((POSITIONS,), dtype="int32"), Tied()]),
    "shared": lambda: dp.Sequential([layers.Input((POSITIONS,), dtype="int32"), Tied(), layers.Softmax()]),
}


def smooth(y, logits):
    targets = ops.one_hot(ops.cast(y, "int32"), CLASSES) * 0.9 + 0.1 / CLASSES
    return ops.categorical_crossentropy(targets, logits, from_logits=True)


def with_z_loss(y, logits):
    entropy = ops.sparse_categorical_crossentropy(y, logits, from_logits=True)
    return entropy + 0.01 * ops.square(ops.logsumexp(logits, -1))


def focal(y, logits):
    entropy = ops.sparse_categorical_crossentropy(y, logits, from_logits=True)
    return ops.square(1 - ops.exp(-entropy)) * entropy


def cauchy(y, logits):
    target = ops.one_hot(ops.cast(y, "int32"), CLASSES)
    return ops.mean(ops.log1p(ops.square(logits - target)), -1)


ENTROPY = dp.losses.SparseCategoricalCrossentropy
LOSSES = {
    "entropy": lambda: ENTROPY(from_logits=True),
    "probabilities": lambda: ENTROPY(),
    "ignored class": lambda: ENTROPY(from_logits=True, ignore_class=3),
    "sum": lambda: ENTROPY(from_logits=True, reduction="sum"),
    "smooth": lambda: smooth,
    "z": lambda: with_z_loss,
    "focal": lambda: focal,
    "cauchy": lambda: cauchy,
}


@pytest.fixture
def loops(monkeypatch):
    """For each step that is traced, the steps of its loops over chunks."""
    traced = []

    def counted(program, replicas=1):
        new = chunking.with_chunked_logits(program, replicas)
        traced.append(list({t.node: t.attributes["length"] for t in new.tensors if has_body(t)}.values()))
        return new

    monkeypatch.setattr(programs, "with_chunked_logits", counted)
    monkeypatch.setattr(chunking, "LEAST_LOGITS", 1)
    monkeypatch.setattr(chunking, "CHUNK", ROWS * CLASSES * 4)
    return traced


def train(model_name, loss, *, dtype="float64", rows=ROWS, jit_compile=False, **options):
    """Return history and weights of two epochs, of a whole batch and a smaller one, and an evaluation."""
    dp.utils.set_random_seed(0)
    rng = np.random.default_rng(0)
    x, y = (rng.integers(0, CLASSES, (rows + 3, POSITIONS)) for _ in range(2))
    weight = rng.random((rows + 3, POSITIONS)).astype(dtype)
    model = MODELS[model_name]()
    model.compile(
        dp.optimizers.Adam(0.01, global_clipnorm=1.0),
        loss,
        device="cpu",
        dtype=dtype,
        jit_compile=jit_compile,
        **options,
    )
    history = model.fit(x, y, batch_size=rows, epochs=2, verbose=0, sample_weight=weight, shuffle=False).history
    values = [*history.values(), model.evaluate(x, y, batch_size=rows, verbose=0)]
    return [np.ravel(value) for value in (*values, *model.get_weights())]


def compare(loops, monkeypatch, *arguments, rtol=1e-11, length=3, **options):
    """Train in chunks and whole."""
    chunked = train(*arguments, **options)
    assert loops[0] == ([length] if length else [])  # of the training
    monkeypatch.setattr(chunking, "LEAST_LOGITS", 1 << 60)
    for a, b in zip(chunked, train(*arguments, **options), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("model", MODELS)
def test_a_training_in_chunks_equals_one_of_whole_logits(loops, monkeypatch, model, compiled):
    loss = ENTROPY(from_logits=model not in ("softmax", "shared"))
    metrics = ["accuracy", dp.metrics.SparseCategoricalCrossentropy(from_logits=model not in ("softmax", "shared"))]
    compare(loops, monkeypatch, model, loss, jit_compile=compiled, metrics=metrics)


@pytest.mark.parametrize("loss", LOSSES)
def test_all_losses_of_positions_are_computed_in_chunks(loops, monkeypatch, loss):
    compare(loops, monkeypatch, "softmax" if loss == "probabilities" else "dense", LOSSES[loss]())


@pytest.mark.parametrize("dtype", ["mixed_bfloat16", "mixed_float16", "float32"])
def test_types(loops, monkeypatch, dtype):
    dp.config.set_dtype_policy(dtype)
    compare(
        loops,
        monkeypatch,
        "dense",
        ENTROPY(from_logits=True),
        dtype="float32",
        rtol=1e-5 if dtype == "float32" else 2e-2,
    )


def feedback(y, logits):
    return with_z_loss(y, logits) * ops.square(ops.mean(logits))


def across(y, logits):
    return with_z_loss(y, logits - ops.mean(logits, 1, keepdims=True))


def sorted_logits(y, logits):
    return ops.mean(ops.sort(logits, -1)[..., ::2], -1)


@pytest.mark.parametrize("loss", [feedback, across, sorted_logits])
def test_logits_that_must_meet_stay_whole(loops, monkeypatch, loss):
    compare(loops, monkeypatch, "dense", loss, length=None)


class Total(dp.metrics.Metric):
    """The sum over batches of what a function makes of the logits, and its sum."""

    def __init__(self, reduce):
        super().__init__(name="total", dtype="float64")
        self.reduce, self.total = reduce, self.add_variable((), name="total")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(ops.sum(ops.cast(self.reduce(y_pred), "float64")))

    def result(self):
        return self.total.value


@pytest.mark.sample(1)
@pytest.mark.parametrize("axis", [0, 1, (0, 1), (0, 2), None], ids=str)
@pytest.mark.parametrize("name", ["sum", "max", "argmax", "any"])
def test_what_is_reduced_beside_the_loss_is_right(loops, monkeypatch, name, axis):
    """In chunks or whole: a greatest element over positions, say, is no sum of those of chunks."""
    if name == "argmax" and (isinstance(axis, tuple) or axis == 0):
        pytest.skip("of a single axis of a row")

    def trained():
        metrics = [Total(lambda logits: getattr(ops, name)(logits > 0.1 if name == "any" else logits, axis))]
        return train("dense", ENTROPY(from_logits=True), metrics=metrics)

    chunked = trained()
    monkeypatch.setattr(chunking, "LEAST_LOGITS", 1 << 60)
    for a, b in zip(chunked, trained(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-11)


def test_predicted_logits_stay_whole(loops):
    model = MODELS["dense"]()
    model.compile(loss=ENTROPY(from_logits=True))
    assert model.predict(np.zeros((ROWS, POSITIONS), int), verbose=0).shape == (ROWS, POSITIONS, CLASSES)
    assert loops == [[]]


def test_each_output_has_a_loop(loops, monkeypatch):
    monkeypatch.setitem(MODELS, "two", two_heads)
    loss = {"a": ENTROPY(from_logits=True), "b": focal}

    def trained():
        dp.utils.set_random_seed(0)
        x = np.random.default_rng(0).integers(0, CLASSES, (ROWS, POSITIONS))
        model = two_heads()
        model.compile("sgd", loss, dtype="float64")
        return model.fit(x, {"a": x, "b": x}, batch_size=ROWS, epochs=2, verbose=0).history["loss"]

    chunked = trained()
    assert loops == [[3, 3]]
    monkeypatch.setattr(chunking, "LEAST_LOGITS", 1 << 60)
    np.testing.assert_allclose(chunked, trained(), rtol=1e-12)


@pytest.mark.parametrize(
    ("least", "chunk", "length"), [(1, 12, None), (1, 4, 3), (1, 6, 2), (1, 5, 3), (10**9, 4, None)]
)
def test_sizes(loops, monkeypatch, least, chunk, length):
    monkeypatch.setattr(chunking, "LEAST_LOGITS", least)
    monkeypatch.setattr(chunking, "CHUNK", ROWS * CLASSES * chunk)
    compare(loops, monkeypatch, "dense", ENTROPY(from_logits=True), length=length)
