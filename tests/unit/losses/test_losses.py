"""Losses: names and configurations, values against NumPy in float64, gradients, weights, and any number of ranks."""

import numpy as np
import pytest

import dptrain as dp
from dptrain import losses, ops
from dptrain.errors import ConfigError
from dptrain.losses import LOSSES, SparseCategoricalCrossentropy
from dptrain.program.dims import Dim
from dptrain.program.execute import evaluate
from dptrain.program.gradient import gradients
from dptrain.program.program import trace
from dptrain.program.sharding.messages import count
from dptrain.program.sharding.placement import place
from dptrain.program.tensor import Variable, constant, differentiable
from dptrain.registry.names import snake_case
from dptrain.registry.serialization import custom_object_scope
from tests.unit.program.virtual_ranks import run_on_ranks

UNUSUAL = {
    "SparseCategoricalCrossentropy": {"from_logits": True, "ignore_class": -1, "reduction": "sum"},
    "CategoricalCrossentropy": {"from_logits": True, "label_smoothing": 0.1, "name": "other"},
    "BinaryCrossentropy": {"label_smoothing": 0.2, "reduction": "mean_with_sample_weight"},
    "Huber": {"delta": 2.0},
    "CosineSimilarity": {"axis": 1},
    "Circle": {"gamma": 3.0, "margin": 0.2, "remove_diagonal": False, "reduction": "sum"},
}
RNG = np.random.default_rng(0)
ROWS, C = 11, 4


def softmax(z):
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


# Targets and outputs: values, one-hot and shares of classes, labels, yes and no, and probabilities.
Z = RNG.normal(size=(ROWS, C))
VALUES, LABELS = RNG.normal(size=(ROWS, C)), RNG.integers(0, C, ROWS)
ONE_HOT, SHARES = np.eye(C)[LABELS], RNG.dirichlet(np.ones(C), ROWS)
BINARY, P = (RNG.random((ROWS, C)) < 0.4) * 1.0, softmax(Z)
SIGMOID = 1 / (1 + np.exp(-Z))
POSITIVE, WANTED = np.abs(Z) + 0.1, np.abs(VALUES) + 0.1
E = Z - VALUES
OF_LABEL = -np.log(P)[np.arange(ROWS), LABELS]


def binary(t, p):
    return -(t * np.log(p) + (1 - t) * np.log(1 - p)).mean(-1)


# Loss, targets, outputs, and each sample's loss.
CASES = {
    "squared": (losses.MeanSquaredError, VALUES, Z, (E**2).mean(-1)),
    "absolute": (losses.MeanAbsoluteError, VALUES, Z, np.abs(E).mean(-1)),
    "percentage": (losses.MeanAbsolutePercentageError, WANTED, Z, 100 * (np.abs(Z - WANTED) / WANTED).mean(-1)),
    "logarithmic": (
        losses.MeanSquaredLogarithmicError,
        WANTED,
        POSITIVE,
        ((np.log1p(WANTED) - np.log1p(POSITIVE)) ** 2).mean(-1),
    ),
    "huber": (
        lambda **o: losses.Huber(0.6, **o),
        VALUES,
        Z,
        np.where(np.abs(E) <= 0.6, E**2 / 2, 0.6 * np.abs(E) - 0.18).mean(-1),
    ),
    "log cosh": (losses.LogCosh, VALUES, Z, np.log(np.cosh(E)).mean(-1)),
    "cosine": (
        losses.CosineSimilarity,
        VALUES,
        Z,
        -(VALUES * Z).sum(-1) / np.linalg.norm(VALUES, axis=-1) / np.linalg.norm(Z, axis=-1),
    ),
    "hinge": (losses.Hinge, 2 * BINARY - 1, Z, np.maximum(1 - (2 * BINARY - 1) * Z, 0).mean(-1)),
    "hinge, 0 and 1": (losses.Hinge, BINARY, Z, np.maximum(1 - (2 * BINARY - 1) * Z, 0).mean(-1)),
    "squared hinge": (losses.SquaredHinge, BINARY, Z, (np.maximum(1 - (2 * BINARY - 1) * Z, 0) ** 2).mean(-1)),
    "categorical hinge": (
        losses.CategoricalHinge,
        ONE_HOT,
        Z,
        np.maximum(1 + ((1 - ONE_HOT) * Z).max(-1) - (ONE_HOT * Z).sum(-1), 0),
    ),
    "divergence": (losses.KLDivergence, SHARES, P, (SHARES * np.log(SHARES / P)).sum(-1)),
    "poisson": (losses.Poisson, WANTED, POSITIVE, (POSITIVE - WANTED * np.log(POSITIVE + 1e-7)).mean(-1)),
    "binary": (losses.BinaryCrossentropy, BINARY, SIGMOID, binary(BINARY, SIGMOID)),
    "binary, logits": (
        lambda **o: losses.BinaryCrossentropy(True, 0.2, **o),
        BINARY,
        Z,
        binary(0.8 * BINARY + 0.1, SIGMOID),
    ),
    "categorical": (losses.CategoricalCrossentropy, ONE_HOT, 3 * P, OF_LABEL),
    "categorical, smoothed": (
        lambda **o: losses.CategoricalCrossentropy(label_smoothing=0.2, **o),
        SHARES,
        P,
        -((0.8 * SHARES + 0.2 / C) * np.log(P)).sum(-1),
    ),
    "categorical, logits": (lambda **o: losses.CategoricalCrossentropy(True, **o), ONE_HOT, Z, OF_LABEL),
    "sparse": (SparseCategoricalCrossentropy, LABELS, 2 * P, OF_LABEL),
    "sparse, a column of labels": (SparseCategoricalCrossentropy, LABELS[:, None], P, OF_LABEL),
    "sparse, logits": (lambda **o: SparseCategoricalCrossentropy(True, **o), LABELS, Z, OF_LABEL),
}
RIGHT = np.where(BINARY == 1, SIGMOID, 1 - SIGMOID)
OF_CLASS = P[np.arange(ROWS), LABELS]
FOUND, MISSED, WRONG = (SIGMOID * BINARY).sum(-1), ((1 - SIGMOID) * BINARY).sum(-1), (SIGMOID * (1 - BINARY)).sum(-1)
CASES |= {
    "focal binary": (
        lambda **o: losses.BinaryFocalCrossentropy(True, 0.3, 1.5, **o),
        BINARY,
        SIGMOID,
        (np.where(BINARY == 1, 0.3, 0.7) * (1 - RIGHT) ** 1.5 * -np.log(RIGHT)).mean(-1),
    ),
    "focal binary, logits": (
        lambda **o: losses.BinaryFocalCrossentropy(from_logits=True, **o),
        BINARY,
        Z,
        ((1 - RIGHT) ** 2 * -np.log(RIGHT)).mean(-1),
    ),
    "focal categorical": (
        lambda **o: losses.CategoricalFocalCrossentropy(0.4, 1.5, **o),
        ONE_HOT,
        P,
        0.4 * (1 - OF_CLASS) ** 1.5 * -np.log(OF_CLASS),
    ),
    "generalized": (
        lambda **o: losses.CategoricalGeneralizedCrossEntropy(0.7, **o),
        LABELS,
        P,
        (1 - OF_CLASS**0.7) / 0.7,
    ),
    "dice of each sample": (
        lambda **o: losses.Dice(axis=-1, **o),
        BINARY,
        SIGMOID,
        1 - 2 * FOUND / (BINARY.sum(-1) + SIGMOID.sum(-1) + 1e-7),
    ),
    "tversky of each sample": (
        lambda **o: losses.Tversky(0.3, 0.8, axis=-1, **o),
        BINARY,
        SIGMOID,
        1 - FOUND / (FOUND + 0.3 * MISSED + 0.8 * WRONG + 1e-7),
    ),
}
WEIGHTS = np.where(RNG.random(ROWS) < 0.3, 0.0, RNG.random(ROWS))


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients(case):
    make, target, output, expected = CASES[case]
    np.testing.assert_allclose(make(reduction=None)(target, output), expected, rtol=1e-7)
    source = differentiable(output)
    loss = make()(target, source, WEIGHTS)
    np.testing.assert_allclose(loss, (WEIGHTS * expected).sum() / ROWS, rtol=1e-7)
    (actual,) = gradients(loss, [source])
    direction = np.random.default_rng(3).normal(size=output.shape)
    ends = [float(make()(target, output + step * direction, WEIGHTS)) for step in (1e-6, -1e-6)]
    np.testing.assert_allclose(np.sum(actual.numpy() * direction), (ends[0] - ends[1]) / 2e-6, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("shards", [[4, 4, 3], [0, 11]], ids=str)
@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "mean_with_sample_weight", "sum", "none"])
@pytest.mark.parametrize("case", CASES)
def test_ranks_compute_what_one_computes(case, reduction, shards):
    make, target, output, _ = CASES[case]
    loss, w = make(reduction=reduction), Variable(np.ones(C), "w")

    def step(y_true, x, weights):
        value = loss(y_true, x * w, weights)
        value.backward()
        return {"loss": value, "gradient": w.value.grad}

    values = {"y_true": target, "x": output, "weights": WEIGHTS}
    program = trace(step, {name: ((Dim.rows(ROWS), *value.shape[1:]), value.dtype) for name, value in values.items()})
    full, _ = evaluate(program, values)
    placed, starts = place(program), np.cumsum([0, *shards])
    # Whether all targets are 0 or 1 must be known first; the sum of the weights then does not wait either.
    signed = case in ("hinge, 0 and 1", "squared hinge", "hinge")
    assert count(placed) == 1 + signed * (1 + (reduction == "mean_with_sample_weight"))
    for rank, (outputs, _) in enumerate(run_on_ranks(placed, values, shards, dict.fromkeys(values, 0))[0]):
        own_rows = slice(starts[rank], starts[rank + 1]) if reduction == "none" else ()
        np.testing.assert_allclose(outputs["loss"], full["loss"][own_rows], rtol=1e-12)
        np.testing.assert_allclose(outputs["gradient"], full["gradient"], rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("shards", [[11], [4, 4, 3], [0, 11]], ids=str)
@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (losses.Dice, 1 - 2 * FOUND.sum() / (BINARY.sum() + SIGMOID.sum())),
        (lambda: losses.Tversky(0.3, 0.8), 1 - FOUND.sum() / (FOUND.sum() + 0.3 * MISSED.sum() + 0.8 * WRONG.sum())),
    ],
)
def test_the_overlap_of_a_whole_batch(make, expected, shards):
    """One number of the global batch, on any number of ranks: a quotient of sums, not a mean of ranks' quotients."""
    w = Variable(np.ones(C), "w")

    def step(y_true, x):
        value = make()(y_true, x * w)
        value.backward()
        return {"loss": value, "gradient": w.value.grad}

    values = {"y_true": BINARY, "x": SIGMOID}
    program = trace(step, {name: ((Dim.rows(ROWS), C), "float64") for name in values})
    full, _ = evaluate(program, values)
    np.testing.assert_allclose(full["loss"], expected, rtol=1e-6)
    for n in range(C):
        ends = [float(make()(BINARY, SIGMOID * (1 + h * np.eye(C)[n]))) for h in (1e-6, -1e-6)]
        np.testing.assert_allclose(full["gradient"][n], (ends[0] - ends[1]) / 2e-6, rtol=1e-6)
    for outputs, _ in run_on_ranks(place(program), values, shards, dict.fromkeys(values, 0))[0]:
        np.testing.assert_allclose(outputs["loss"], full["loss"], rtol=1e-12)
        np.testing.assert_allclose(outputs["gradient"], full["gradient"], rtol=1e-11)


def circle(labels, x, gamma, margin, itself):
    d = np.maximum(1 - x @ x.T, 0)
    same_label, results = labels[:, None] == labels, []
    for n in range(len(x)):
        near, far = same_label[n] & (itself | (np.arange(len(x)) != n)), ~same_label[n]
        a = gamma * (d[n] + margin) * (d[n] - margin)
        b = gamma * np.maximum(1 + margin - d[n], 0) * (1 - margin - d[n])
        results.append(np.log1p(np.exp(a[near]).sum() * np.exp(b[far]).sum()))
    return np.array(results)


UNIT = Z / np.linalg.norm(Z, axis=1, keepdims=True)
# The label 6 is that of one sample alone, whose loss is 0 where it is no pair with itself.
OF_PAIRS = np.where(np.arange(ROWS) == 5, 6, LABELS * 10**10)


@pytest.mark.parametrize("itself", [False, True])
def test_pairs_of_the_global_batch(itself):
    """Each sample is compared with those of all ranks, also by a rank that has none; no pair, no part in the mean."""
    w = Variable(np.linspace(0.8, 1.2, C), "w")
    expected = circle(OF_PAIRS, UNIT * w.numpy(), 3, 0.3, itself)
    counted = expected > 0
    assert np.all(counted) == itself
    results = {
        "sum_over_batch_size": (WEIGHTS * expected).sum() / counted.sum(),
        "mean_with_sample_weight": (WEIGHTS * expected).sum() / (WEIGHTS * counted).sum(),
        "none": WEIGHTS * expected,
    }

    def step(y_true, x, weights):
        values_by_name = {}
        for reduction in results:
            values_by_name[reduction] = losses.Circle(3, 0.3, not itself, reduction)(y_true, x * w, weights)
        values_by_name["sum_over_batch_size"].backward()
        return values_by_name | {"gradient": w.value.grad}

    values = {"y_true": OF_PAIRS, "x": UNIT, "weights": WEIGHTS}
    program = trace(step, {name: ((Dim.rows(ROWS), *value.shape[1:]), value.dtype) for name, value in values.items()})
    full, _ = evaluate(program, values)
    for name, value in results.items():
        np.testing.assert_allclose(full[name], value, rtol=1e-12)
    for n in range(C):
        ends = [circle(OF_PAIRS, UNIT * (w.numpy() + h * np.eye(C)[n]), 3, 0.3, itself) for h in (1e-6, -1e-6)]
        slope = (WEIGHTS * (ends[0] - ends[1])).sum() / 2e-6 / counted.sum()
        np.testing.assert_allclose(full["gradient"][n], slope, rtol=1e-6)
    for shards in ([11], [4, 0, 7], [0, 11]):
        starts = np.cumsum([0, *shards])
        for rank, (outputs, _) in enumerate(run_on_ranks(place(program), values, shards, dict.fromkeys(values, 0))[0]):
            for name, value in full.items():
                own_rows = slice(starts[rank], starts[rank + 1]) if name == "none" else ()
                np.testing.assert_allclose(outputs[name], value[own_rows], rtol=1e-11, atol=1e-14)


def test_pairs_with_other_references():
    loss = losses.circle(LABELS[:3], UNIT[:3], LABELS, UNIT, gamma=3, margin=0.3)
    np.testing.assert_allclose(loss, circle(LABELS, UNIT, 3, 0.3, False)[:3], rtol=1e-12)


def test_training_on_pairs():
    """Compiled as eagerly; labels may be any numbers, and pairs are those of a batch, also in an evaluation."""
    trained = []
    for eager in (False, True):
        model = dp.Sequential([dp.layers.Dense(C, input_shape=(C,)), dp.layers.UnitNormalization()], seed=1)
        model.compile(dp.optimizers.Adam(0.05), "Circle", dtype="float64", run_eagerly=eager)
        model.fit(Z, OF_PAIRS, batch_size=8, epochs=2, verbose=0)
        trained.append(model)
    for weight, other in zip(*(model.get_weights() for model in trained), strict=True):
        np.testing.assert_allclose(weight, other, rtol=1e-10, atol=1e-13)
    x, expected = model(Z).numpy(), []
    for rows in (slice(8), slice(8, ROWS)):
        per_sample = circle(OF_PAIRS[rows], x[rows], 80, 0.4, False)
        expected.append(per_sample.sum() / max((per_sample > 0).sum(), 1))
    results = model.evaluate(Z, OF_PAIRS, batch_size=8, verbose=0)
    np.testing.assert_allclose(results, np.average(expected, weights=[8, ROWS - 8]), rtol=1e-9)


@pytest.mark.parametrize(
    "case", [name for name in CASES if name.split()[0] in ("focal", "generalized", "dice", "tversky")]
)
def test_losses_of_overlap_in_half_precision(case):
    make, target, output, expected = CASES[case]
    loss = make()(target, output.astype(np.float16))
    assert loss.dtype == np.float32
    np.testing.assert_allclose(loss, expected.mean(), rtol=5e-3)


IGNORED = LABELS != 2


@pytest.mark.parametrize(
    ("reduction", "weights", "expected"),
    [
        ("sum_over_batch_size", None, OF_LABEL.mean()),
        ("mean", WEIGHTS, (WEIGHTS * OF_LABEL).mean()),
        ("mean_with_sample_weight", None, OF_LABEL.mean()),
        ("mean_with_sample_weight", WEIGHTS, (WEIGHTS * OF_LABEL).sum() / WEIGHTS.sum()),
        ("mean_with_sample_weight", np.zeros(ROWS), 0.0),
        ("sum", None, OF_LABEL.sum()),
        ("sum", WEIGHTS[:, None], (WEIGHTS * OF_LABEL).sum()),
        ("none", WEIGHTS, WEIGHTS * OF_LABEL),
        (None, None, OF_LABEL),
    ],
)
def test_reductions(reduction, weights, expected):
    np.testing.assert_allclose(SparseCategoricalCrossentropy(reduction=reduction)(LABELS, P, weights), expected)


@pytest.mark.parametrize("shards", [[11], [4, 4, 3], [0, 11]], ids=str)
@pytest.mark.parametrize(
    ("reduction", "expected"),
    [
        ("sum_over_batch_size", (WEIGHTS * OF_LABEL * IGNORED).sum() / IGNORED.sum()),
        ("mean_with_sample_weight", (WEIGHTS * OF_LABEL * IGNORED).sum() / (WEIGHTS * IGNORED).sum()),
        ("sum", (WEIGHTS * OF_LABEL * IGNORED).sum()),
    ],
)
def test_ignored_samples_count_in_nothing(reduction, expected, shards):
    loss, w = SparseCategoricalCrossentropy(True, ignore_class=2, reduction=reduction), Variable(Z, "w")

    def step(y_true, x, weights):
        value = loss(y_true, ops.matmul(x, w), weights)
        value.backward()
        return {"loss": value, "gradient": w.value.grad}

    values = {"y_true": LABELS, "x": np.eye(ROWS), "weights": WEIGHTS}
    program = trace(step, {name: ((Dim.rows(ROWS), *value.shape[1:]), value.dtype) for name, value in values.items()})
    placed = place(program)
    assert count(placed) == 1  # sums of losses, gradients and counted samples travel together
    for outputs, _ in run_on_ranks(placed, values, shards, dict.fromkeys(values, 0))[0]:
        np.testing.assert_allclose(outputs["loss"], expected, rtol=1e-12)
        assert np.all((np.abs(outputs["gradient"]).sum(-1) > 0) == IGNORED * (WEIGHTS > 0))


def test_nothing_but_ignored_samples():
    outputs = differentiable(Z)
    loss = SparseCategoricalCrossentropy(True, ignore_class=-1)(np.full(ROWS, -1), outputs)
    assert float(loss) == 0
    np.testing.assert_array_equal(gradients(loss, [outputs])[0], np.zeros((ROWS, C)))


def test_weights_of_elements_and_of_rows_of_sequences():
    target, output, weights = RNG.normal(size=(5, 3, 2)), RNG.normal(size=(5, 3, 2)), RNG.random((5, 3))
    squares = ((target - output) ** 2).mean(-1)
    mse, weighted = losses.MeanSquaredError(), losses.MeanSquaredError("mean_with_sample_weight")
    np.testing.assert_allclose(mse(target, output, weights), (squares * weights).mean())
    np.testing.assert_allclose(mse(target, output, weights[:, 0]), (squares * weights[:, :1]).mean())
    np.testing.assert_allclose(
        weighted(target, output, weights[:, 0]), (squares.mean(1) * weights[:, 0]).sum() / weights[:, 0].sum()
    )
    labels = RNG.integers(0, 2, (5, 3))
    actual = SparseCategoricalCrossentropy(True, ignore_class=1)(labels[..., None], output)
    expected = np.where(labels == 0, -np.log(softmax(output))[..., 0], 0).sum() / (labels == 0).sum()
    np.testing.assert_allclose(actual, expected)


@pytest.mark.parametrize("scale", [1, 100])
def test_a_softmax_or_sigmoid_is_looked_through(scale):
    """Probabilities below 1e-7 have the loss of their logits, and a gradient; without the op they are clipped."""
    z = (Z * scale).astype(np.float32)
    exact = z.astype(np.float64)
    of_label = np.log(np.exp(exact - exact.max(-1, keepdims=True)).sum(-1)) + exact.max(-1) - exact[range(ROWS), LABELS]
    for loss, target in ((SparseCategoricalCrossentropy(), LABELS), (losses.CategoricalCrossentropy(), ONE_HOT)):
        source = differentiable(z)
        result = loss(target, ops.softmax(source))
        np.testing.assert_allclose(result, of_label.mean(), rtol=1e-6)
        np.testing.assert_allclose(
            gradients(result, [source])[0], (softmax(exact) - ONE_HOT) / ROWS, rtol=1e-5, atol=1e-8
        )
    of_bits = (np.logaddexp(0, exact) - BINARY * exact).mean()
    np.testing.assert_allclose(losses.BinaryCrossentropy()(BINARY, ops.sigmoid(z)), of_bits, rtol=1e-6)
    clipped = float(losses.BinaryCrossentropy()(BINARY, ops.sigmoid(z).numpy()))
    assert (clipped < 0.9 * of_bits) == (scale == 100)


def test_half_precision_is_computed_in_float32():
    z = Z.astype(np.float16)
    for output in (ops.softmax(constant(z)), ops.softmax(constant(z)).numpy()):
        loss = SparseCategoricalCrossentropy()(LABELS, output)
        assert loss.dtype == np.float32
        np.testing.assert_allclose(loss, OF_LABEL.mean(), rtol=1e-2)
    exact = SparseCategoricalCrossentropy()(LABELS, ops.softmax(constant(z)))
    np.testing.assert_allclose(exact, SparseCategoricalCrossentropy(True)(LABELS, z.astype(np.float32)), rtol=1e-6)
    assert losses.MeanSquaredError(dtype="float64")(VALUES, z).dtype == np.float64


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_is_made_of_its_name_class_and_configuration(name):
    for identifier in (LOSSES[name].__name__, LOSSES[name], {"class_name": LOSSES[name].__name__, "config": {}}):
        assert type(losses.get(identifier)) is LOSSES[name]
    assert type(losses.as_loss(name)) is LOSSES[name]
    loss_object = LOSSES[name](**UNUSUAL.get(LOSSES[name].__name__, {}))
    back = losses.deserialize(losses.serialize(loss_object))
    assert (type(back), back._get_config()) == (type(loss_object), loss_object._get_config())
    assert losses.get(loss_object) is loss_object


def test_configurations_are_those_of_keras():
    assert SparseCategoricalCrossentropy().get_config() == {
        "name": "sparse_categorical_crossentropy",
        "reduction": "sum_over_batch_size",
        "from_logits": False,
        "ignore_class": None,
    }
    assert losses.Huber().get_config() == {"name": "huber_loss", "reduction": "sum_over_batch_size", "delta": 1.0}
    assert losses.KLDivergence().name == "kl_divergence"


def test_functions():
    """A function is a loss under its name; Keras' own are those of its classes."""

    def quartic(y_true, y_pred):
        return ops.mean(ops.square(ops.square(y_true - y_pred)), -1)

    assert losses.get(quartic) is quartic
    loss = losses.as_loss(quartic)
    assert (loss.name, loss._takes_labels, loss._get_config()["fn"]) == ("quartic", None, "quartic")
    np.testing.assert_allclose(loss(VALUES, Z, WEIGHTS), ((E**4).mean(-1) * WEIGHTS).mean())
    of_labels = losses.as_loss(lambda y_true, y_pred: losses.sparse_categorical_crossentropy(y_true, y_pred))
    np.testing.assert_allclose(of_labels(LABELS, P), OF_LABEL.mean())
    assert type(losses.as_loss(losses.sparse_categorical_crossentropy)) is SparseCategoricalCrossentropy
    np.testing.assert_allclose(losses.mean_squared_error(VALUES, Z), (E**2).mean(-1))
    np.testing.assert_allclose(losses.sparse_categorical_crossentropy([1, 0], [[0.0, 0], [0, 0]], True), np.log(2))


@pytest.mark.parametrize("name", sorted({name for name in LOSSES if name != LOSSES[name].__name__}))
def test_other_names_mean_functions_of_single_samples(name):
    """As in Keras: "mse" and "mean_squared_error" are the function, "MeanSquaredError" is the loss."""
    loss = losses.get(name)
    assert loss is getattr(losses, snake_case(LOSSES[name].__name__))
    described = losses.serialize(loss)
    config = {"module": "builtins", "class_name": "function", "config": loss.__name__, "registered_name": "function"}
    assert described == config
    assert losses.deserialize(described) is losses.deserialize(name) is loss


def test_functions_of_the_users_own_are_found_again():
    def quartic(y_true, y_pred):
        return ops.mean(ops.square(ops.square(y_true - y_pred)), -1)

    described = losses.serialize(quartic)
    assert losses.deserialize(described, {"quartic": quartic}) is quartic
    with custom_object_scope({"quartic": quartic}):
        assert losses.get("quartic") is losses.deserialize(described) is quartic
    with pytest.raises(ConfigError, match="unknown loss 'quartic'"):
        losses.deserialize(described)
    assert losses.get(None) is None
    np.testing.assert_allclose(losses.get("mae")(VALUES, Z), np.abs(E).mean(-1))


def test_a_loss_that_overrides_its_call():
    class Whole(losses.Loss):
        def __call__(self, y_true, y_pred, sample_weight=None):
            return ops.mean(ops.square(y_true - y_pred)) * (1.0 if sample_weight is None else ops.mean(sample_weight))

    model = dp.Sequential([dp.layers.Dense(C, use_bias=False, input_shape=(C,))], seed=1)
    model.compile("sgd", Whole(), dtype="float64")
    predicted = model.predict(Z, verbose=0)
    losses_of_weights = [
        model.evaluate(Z, VALUES, verbose=0, sample_weight=sample_weight, batch_size=ROWS)
        for sample_weight in (None, WEIGHTS)
    ]
    np.testing.assert_allclose(
        losses_of_weights, ((predicted - VALUES) ** 2).mean() * np.array([1, WEIGHTS.mean()]), rtol=1e-12
    )
    with pytest.raises(NotImplementedError, match="Loss Unfinished must implement `call"):
        type("Unfinished", (losses.Loss,), {})()(VALUES, Z)


def test_a_loss_of_the_users_own():
    class Quarter(losses.Loss):
        def call(self, y_true, y_pred):
            assert y_true.dtype == y_pred.dtype
            return ops.mean(ops.square(y_pred - 0.5 * y_true), axis=-1)

    loss_object = Quarter()
    assert (loss_object.name, loss_object._takes_labels) == ("quarter", None)
    integers = np.arange(ROWS * C).reshape(ROWS, C)
    np.testing.assert_allclose(
        loss_object(integers, Z, WEIGHTS), (((Z - 0.5 * integers) ** 2).mean(1) * WEIGHTS).mean()
    )


def test_one_value_a_row_may_be_a_column():
    target, output = VALUES[:, 0], Z[:, :1]
    for loss in (losses.MeanSquaredError()(target, output), losses.MeanSquaredError()(target[:, None], output)):
        np.testing.assert_allclose(loss, (E[:, 0] ** 2).mean())


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "bool"])
def test_labels_of_any_type(dtype):
    labels = (LABELS % 2).astype(dtype)
    expected = -np.log(P)[np.arange(ROWS), LABELS % 2].mean()
    for target in (labels, labels[:, None]):
        np.testing.assert_allclose(SparseCategoricalCrossentropy()(target, P), expected)
    assert float(losses.sparse_categorical_crossentropy([1.9], P[:1])[0]) == pytest.approx(-np.log(P[0, 1]))


@pytest.mark.parametrize("weights", [0.5, [0.5], WEIGHTS, WEIGHTS[:, None]], ids=["number", "one", "rows", "column"])
def test_a_loss_that_is_one_number_is_weighted_sample_by_sample(weights):
    loss = losses.as_loss(lambda y_true, y_pred: ops.mean(ops.square(y_true - y_pred)))
    np.testing.assert_allclose(loss(VALUES, Z, weights), (E**2).mean() * np.mean(weights))
    np.testing.assert_allclose(losses.MeanSquaredError("sum")(VALUES[0], Z[0], [1, 2]), 3 * (E[0] ** 2).mean())


@pytest.mark.parametrize(
    "loss", [losses.BinaryCrossentropy(), losses.CategoricalCrossentropy(True), losses.BinaryCrossentropy(True, 0.1)]
)
@pytest.mark.parametrize("shape", [(ROWS, 1), (1, C), (ROWS, C, C), (ROWS + 1, C), (C,)], ids=str)
def test_crossentropies_broadcast_nothing(loss, shape):
    with pytest.raises(ConfigError, match=r"must have the same shape. Received: target.shape=\("):
        loss(np.ones(shape), Z)


def test_one_label_for_each_vector_of_classes():
    loss = SparseCategoricalCrossentropy(True, reduction=None)
    for labels in ((6, 4), (6, 4, 1)):
        np.testing.assert_allclose(loss(np.zeros(labels), np.zeros((6, 4, 3))), np.full((6, 4), np.log(3)))
    for labels in ((6,), (6, 1), (6, 3), (6, 4, 3)):
        with pytest.raises(ConfigError, match="must have the same shape up until the last dimension"):
            loss(np.zeros(labels), np.zeros((6, 4, 3)))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: losses.get("mean_squared"), "did you mean 'mean_squared_error'"),
        (lambda: losses.get(3), "Could not interpret loss identifier: 3"),
        (lambda: losses.deserialize({"class_name": "Huber", "config": {"alpha": 1}}), "loss Huber: .*alpha"),
        (lambda: losses.Huber(0.0), "delta = 0.0: expected a number above 0"),
        (lambda: losses.MeanSquaredError("average"), "Invalid value for argument `reduction`"),
        (lambda: losses.MeanSquaredError(dtype="int8"), "dtype = 'int8' of a loss"),
        (lambda: losses.BinaryCrossentropy(label_smoothing=1.5), "label_smoothing = 1.5"),
        (lambda: SparseCategoricalCrossentropy(ignore_class="a"), "ignore_class = 'a'"),
    ],
)
def test_refused(build, message):
    with pytest.raises(ConfigError, match=message):
        build()


def test_what_depends_on_how_batches_are_cut():
    assert SparseCategoricalCrossentropy(ignore_class=7)._depends_on_batches
    assert losses.MeanSquaredError("sum")._depends_on_batches
    assert not SparseCategoricalCrossentropy()._depends_on_batches


@pytest.mark.parametrize("from_logits", [False, True])
@pytest.mark.parametrize("axis", [0, 1, -2])
def test_classes_along_another_axis(axis, from_logits):
    """Those of pictures with channels first, say; labels lack the axis, or have it with length 1."""
    z = RNG.normal(size=(2, 3, 5))
    labels = RNG.integers(0, z.shape[axis], np.delete(z.shape, axis))
    last = np.moveaxis(z, axis, -1)
    expected = losses.sparse_categorical_crossentropy(labels, last if from_logits else softmax(last), from_logits)
    one_hot = np.moveaxis(np.eye(z.shape[axis])[labels], -1, axis)
    y = z if from_logits else np.moveaxis(softmax(last), -1, axis)
    for loss in (
        losses.SparseCategoricalCrossentropy(from_logits, axis=axis, reduction=None)(labels, y),
        losses.sparse_categorical_crossentropy(np.expand_dims(labels, axis), y, from_logits, axis=axis),
        losses.CategoricalCrossentropy(from_logits, axis=axis, reduction=None)(one_hot, y),
    ):
        np.testing.assert_allclose(loss, expected, rtol=1e-5)
    mean = float(losses.SparseCategoricalCrossentropy(from_logits, axis=axis)(labels, y))
    assert float(dp.metrics.SparseCategoricalCrossentropy(from_logits=from_logits, axis=axis)(labels, y)) == (
        pytest.approx(mean, rel=1e-5)
    )
    binary = losses.BinaryCrossentropy(axis=axis, reduction=None)(one_hot, softmax(z))
    assert tuple(binary.shape) == labels.shape


def test_python_numbers_as_targets_and_weights_are_rounded_once():
    """Beside outputs in double precision they are not single."""
    output = np.array([[0.25], [0.5]])
    expected = (np.array([[0.1], [0.3]]) - output) ** 2
    loss = losses.MeanSquaredError(reduction="none")
    np.testing.assert_allclose(loss([[0.1], [0.3]], output), expected[:, 0], rtol=1e-15)
    np.testing.assert_allclose(loss([[0.1], [0.3]], output, sample_weight=0.7), 0.7 * expected[:, 0], rtol=1e-15)
    weighted = loss([[0.1], [0.3]], output, sample_weight=[0.7, 1])
    np.testing.assert_allclose(weighted, np.array([0.7, 1]) * expected[:, 0], rtol=1e-15)
    np.testing.assert_allclose(losses.mean_squared_error([[0.1], [0.3]], output), expected[:, 0], rtol=1e-15)
    single = loss([[0.1], [0.3]], output.astype("float32"), sample_weight=0.7)
    assert single.dtype == "float32"
