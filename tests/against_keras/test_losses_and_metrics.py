"""Every loss and metric, with and without sample weights: 200 steps give Keras' logs and weights in float64."""

import numpy as np
import pytest

from dptrain import losses as our_losses
from dptrain import metrics as our_metrics
from dptrain.backend.cpu.backend import NumpyBackend
from dptrain.batches.feed import ResidentFeed
from dptrain.batches.sampling import Shard
from dptrain.layers import Dense
from dptrain.model import Architecture
from dptrain.optimizers import SGD
from dptrain.train.replica import Replica

# Of Keras' own copies of its variables.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

STEPS, FEATURES, CLASSES = 200, 6, 7
# Batches of several sizes, so that a mean over batches is not a mean over samples.
SIZES = (8, 13, 5)
RTOL = 1e-9


def samples(targets: str, outputs: int = CLASSES) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(5)
    x = rng.standard_normal((97, FEATURES))
    labels = rng.integers(0, outputs, len(x))
    y = {
        "labels": labels,
        "one-hot": np.eye(outputs)[labels],
        "shares": rng.dirichlet(np.ones(outputs), len(x)),
        "binary": rng.integers(0, 2, (len(x), outputs)).astype(np.float64),
        "values": rng.standard_normal((len(x), outputs)),
    }[targets]
    weights = rng.random(len(x)) * 2
    weights[::7] = 0
    return x, y, weights


def batches() -> list[np.ndarray]:
    rng = np.random.default_rng(6)
    return [rng.integers(0, 97, SIZES[step % 3]) for step in range(STEPS)]


def build_keras(keras, last: str, outputs: int):
    keras.utils.set_random_seed(3)
    layers = [keras.layers.Dense(9, "tanh"), keras.layers.Dense(outputs, last)]
    return keras.Sequential([keras.Input((FEATURES,)), *layers])


def compare(keras, loss, last, targets, *, weighted, metrics=(), weighted_metrics=(), outputs=CLASSES, rtol=RTOL):
    """Train both and compare logs after every step, and weights in the end.

    loss, metrics and weighted_metrics are functions of a module, which is Keras or dptrain.
    """
    x, y, weights = samples(targets, outputs)
    peer = build_keras(keras, last, outputs)
    made = [[one(keras) for one in given] for given in (metrics, weighted_metrics)]
    peer.compile(keras.optimizers.SGD(0.05), loss(keras), metrics=made[0] or None, weighted_metrics=made[1] or None)

    class Ours:
        losses, metrics = our_losses, our_metrics

    replica = Replica(NumpyBackend(np.float64), Architecture([Dense(9, "tanh"), Dense(outputs, last)], (FEATURES,)), 1)
    replica.compile(
        our_losses.get(loss(Ours)), SGD(0.05), [one(Ours) for one in metrics], [one(Ours) for one in weighted_metrics]
    )
    replica.reserve(max(SIZES))
    flat = replica.backend.download(replica.params)
    for entry, weight in zip(replica.architecture.layout.entries, peer.get_weights(), strict=True):
        entry.view(flat)[...] = weight
    replica.backend.write(replica.params, flat)
    feed = ResidentFeed(replica.backend, replica.as_stored(x, y, weights if weighted else None))
    for rows in batches():
        given = (x[rows], y[rows], weights[rows]) if weighted else (x[rows], y[rows])
        # Unlike `train_on_batch`, which starts afresh, this goes on with the epoch's metrics.
        theirs = peer.train_step(tuple(keras.ops.convert_to_tensor(one) for one in given))
        feed.start(rows, [])
        replica.forward_backward(feed, [Shard(0, len(rows), 0)])
        replica.update()
        mine = replica.logs()
        assert list(mine) == list(theirs)
        for key, value in theirs.items():
            value = keras.ops.convert_to_numpy(value)
            np.testing.assert_allclose(mine[key], value, rtol=rtol, atol=1e-12, err_msg=key)
    flat = replica.backend.download(replica.params)
    for entry, weight in zip(replica.architecture.layout.entries, peer.get_weights(), strict=True):
        np.testing.assert_allclose(entry.view(flat), weight, rtol=rtol, atol=1e-11, err_msg=entry.name)
    # What was trained is what is evaluated: one batch, which Keras takes in one as well.
    replica.reset_totals()
    order = np.arange(max(SIZES))
    feed.start(order, [])
    replica.evaluate_rows(feed.rows(Shard(0, len(order), 0)))
    given = (x[order], y[order], weights[order]) if weighted else (x[order], y[order])
    theirs = peer.evaluate(given[0], given[1], len(order), 0, *given[2:], return_dict=True)
    for key, value in replica.logs().items():
        np.testing.assert_allclose(value, theirs[key], rtol=rtol, atol=1e-12, err_msg=key)


def loss_of(kind, /, **options):
    return lambda module: getattr(module.losses, kind)(**options)


def metric_of(kind, /, *given, **options):
    return lambda module: getattr(module.metrics, kind)(*given, **options)


def named(name):
    return lambda module: name


LOSSES = {
    "sparse": (loss_of("SparseCategoricalCrossentropy"), "softmax", "labels"),
    "sparse, logits": (loss_of("SparseCategoricalCrossentropy", from_logits=True), "linear", "labels"),
    "sparse, logits that are probabilities": (
        loss_of("SparseCategoricalCrossentropy", from_logits=True),
        "softmax",
        "labels",
    ),
    "sparse, of sigmoids": (loss_of("SparseCategoricalCrossentropy"), "sigmoid", "labels"),
    "sparse, one class ignored": (loss_of("SparseCategoricalCrossentropy", ignore_class=2), "softmax", "labels"),
    "sparse, logits, one class ignored": (
        loss_of("SparseCategoricalCrossentropy", from_logits=True, ignore_class=0),
        "linear",
        "labels",
    ),
    "sparse, of sigmoids, one class ignored": (
        loss_of("SparseCategoricalCrossentropy", ignore_class=2),
        "sigmoid",
        "labels",
    ),
    "categorical": (loss_of("CategoricalCrossentropy"), "softmax", "one-hot"),
    "categorical of shares": (loss_of("CategoricalCrossentropy"), "softmax", "shares"),
    "categorical, smoothed": (loss_of("CategoricalCrossentropy", label_smoothing=0.1), "softmax", "one-hot"),
    "categorical, logits": (
        loss_of("CategoricalCrossentropy", from_logits=True, label_smoothing=0.1),
        "linear",
        "one-hot",
    ),
    "categorical, of sigmoids": (loss_of("CategoricalCrossentropy", label_smoothing=0.1), "sigmoid", "shares"),
    "binary": (loss_of("BinaryCrossentropy"), "sigmoid", "binary"),
    "binary, smoothed": (loss_of("BinaryCrossentropy", label_smoothing=0.2), "sigmoid", "binary"),
    "binary, logits": (loss_of("BinaryCrossentropy", from_logits=True), "linear", "binary"),
    "binary, of softmax": (loss_of("BinaryCrossentropy", label_smoothing=0.2), "softmax", "binary"),
    "squared": (loss_of("MeanSquaredError"), "linear", "values"),
    "absolute": (loss_of("MeanAbsoluteError"), "linear", "values"),
    "huber": (loss_of("Huber", delta=0.6), "linear", "values"),
}


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("case", LOSSES)
def test_losses(keras, case, weighted):
    compare(keras, *LOSSES[case], weighted=weighted)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "mean", "mean_with_sample_weight", "sum"])
@pytest.mark.parametrize("ignore_class", [None, 3])
def test_reductions(keras, reduction, ignore_class, weighted):
    loss = loss_of("SparseCategoricalCrossentropy", reduction=reduction, ignore_class=ignore_class)
    compare(keras, loss, "softmax", "labels", weighted=weighted)


METRICS = {
    "labels": (
        loss_of("SparseCategoricalCrossentropy"),
        "softmax",
        [
            named("accuracy"),
            named("acc"),
            metric_of("SparseCategoricalAccuracy"),
            metric_of("SparseTopKCategoricalAccuracy", k=3),
            named("sparse_top_k_categorical_accuracy"),
            metric_of("SparseCategoricalCrossentropy"),
            named("accuracy"),
            named("accuracy"),
        ],
    ),
    "one-hot": (
        loss_of("CategoricalCrossentropy"),
        "softmax",
        [
            named("accuracy"),
            metric_of("CategoricalAccuracy"),
            metric_of("TopKCategoricalAccuracy", 2),
            metric_of("CategoricalCrossentropy", label_smoothing=0.1),
            metric_of("Precision", name="precision"),
            metric_of("Recall", thresholds=0.2, name="recall"),
            named("mae"),
            named("mse"),
            metric_of("BinaryAccuracy", threshold=0.3),
            named("MeanSquaredError"),
        ],
    ),
    "binary": (
        loss_of("BinaryCrossentropy"),
        "sigmoid",
        [
            named("accuracy"),
            named("binary_accuracy"),
            metric_of("Precision", thresholds=[0.4], name="p"),
            named("recall"),
            named("bce"),
            metric_of("BinaryCrossentropy", label_smoothing=0.1, name="smoothed"),
            metric_of("Accuracy", name="exactly"),
        ],
    ),
    "values": (
        loss_of("MeanSquaredError"),
        "linear",
        [named("mae"), named("mean_absolute_error"), named("MSE"), metric_of("Accuracy"), named("mae")],
    ),
}


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("targets", METRICS)
def test_metrics(keras, targets, weighted):
    loss, last, measured = METRICS[targets]
    compare(keras, loss, last, targets, weighted=weighted, metrics=measured, weighted_metrics=measured)


@pytest.mark.parametrize("weighted", [False, True])
def test_metrics_of_one_output(keras, weighted):
    measured = [named("accuracy"), named("Accuracy"), named("precision"), named("recall")]
    compare(
        keras,
        loss_of("BinaryCrossentropy"),
        "sigmoid",
        "binary",
        weighted=weighted,
        metrics=measured,
        weighted_metrics=measured,
        outputs=1,
    )


@pytest.mark.parametrize("targets", ["labels", "one-hot"])
def test_metrics_of_logits(keras, targets):
    """With a loss from logits, metrics see logits."""
    name = {"labels": "SparseCategoricalCrossentropy", "one-hot": "CategoricalCrossentropy"}[targets]
    measured = [named("accuracy"), metric_of(name, from_logits=True)]
    compare(keras, loss_of(name, from_logits=True), "linear", targets, weighted=True, metrics=measured)


def test_names(keras):
    """A name that both know means the same class; dptrain knows no name that Keras does not."""
    for ours, theirs in ((our_losses.LOSSES, keras.losses), (our_metrics.METRICS, keras.metrics)):
        for name, made in ours.items():
            found = theirs.get(name)
            known = type(found).__name__ if not hasattr(found, "__name__") else found.__name__
            assert known in (made.__name__, *[alias for alias, one in ours.items() if one is made]), name


@pytest.mark.parametrize("kind", ["losses", "metrics"])
def test_configurations_travel_both_ways(keras, kind):
    ours, theirs = (our_losses, keras.losses) if kind == "losses" else (our_metrics, keras.metrics)
    for made in set((our_losses.LOSSES if kind == "losses" else our_metrics.METRICS).values()):
        mine = made()
        there = theirs.deserialize(ours.serialize(mine))
        back = ours.deserialize(theirs.serialize(there))
        assert type(back) is made
        assert back.config() == mine.config()
        assert set(there.get_config()) - {"fn"} <= set(mine.config()), made
