"""Losses and metrics: names, configurations, and closed-form numbers in a training."""

import numpy as np
import pytest

from dptrain import losses, metrics
from dptrain.backend.base import DIVISOR, LOSS, ROWS, RowSum
from dptrain.backend.cpu.backend import NumpyBackend
from dptrain.batches.feed import ResidentFeed
from dptrain.batches.sampling import Shard
from dptrain.errors import ConfigError
from dptrain.layers import Dense
from dptrain.losses import LOSSES, SparseCategoricalCrossentropy
from dptrain.metrics import METRICS, Mean, Metric, resolve
from dptrain.model import Architecture
from dptrain.optimizers import SGD
from dptrain.train.replica import Replica

UNUSUAL = {
    "SparseCategoricalCrossentropy": {"from_logits": True, "ignore_class": -1, "reduction": "sum"},
    "CategoricalCrossentropy": {"from_logits": True, "label_smoothing": 0.1, "name": "other"},
    "BinaryCrossentropy": {"label_smoothing": 0.2, "reduction": "mean_with_sample_weight"},
    "Huber": {"delta": 2.0},
}


def keys(*given: object, labels: bool = True, shape: tuple[int, ...] | None = (3,)) -> list[str]:
    return [one.key for one in resolve(*given, labels, shape)]


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_is_made_of_its_name_class_and_configuration(name):
    for identifier in (name, LOSSES[name], {"class_name": LOSSES[name].__name__, "config": {}}):
        assert type(losses.get(identifier)) is LOSSES[name]
    made = LOSSES[name](**UNUSUAL.get(LOSSES[name].__name__, {}))
    back = losses.deserialize(losses.serialize(made))
    assert (type(back), back.config()) == (type(made), made.config())
    assert losses.get(made) is made


@pytest.mark.parametrize("name", METRICS)
def test_every_metric_is_made_of_its_name_class_and_configuration(name):
    for identifier in (name, METRICS[name], metrics.serialize(METRICS[name]())):
        assert type(metrics.get(identifier)) is METRICS[name]
    made = METRICS[name](name="mine")
    assert metrics.deserialize(metrics.serialize(made)).config() == made.config()


def test_which_metrics_take_outputs_before_the_last_activation():
    accuracy, crossentropy = metrics.get("sparse_categorical_accuracy"), metrics.get("sparse_categorical_crossentropy")
    assert [accuracy.takes_outputs_before(one) for one in (None, "softmax", "sigmoid")] == [True, True, False]
    assert [crossentropy.takes_outputs_before(one) for one in (None, "softmax")] == [True, False]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: losses.get("mean_squared"), "did you mean 'mean_squared_error'"),
        (lambda: losses.get(3), "Could not interpret loss identifier: 3"),
        (lambda: losses.deserialize({"class_name": "Huber", "config": {"alpha": 1}}), "loss Huber: .*alpha"),
        (lambda: losses.Huber(0.0), "delta = 0.0: expected a number above 0"),
        (lambda: losses.MeanSquaredError("none"), "not supported: reduction='none'"),
        (lambda: losses.MeanSquaredError(None), "not supported: reduction=None"),
        (lambda: losses.MeanSquaredError("average"), "Invalid value for argument `reduction`"),
        (lambda: losses.MeanSquaredError(dtype="float16"), "not supported: dtype='float16'"),
        (lambda: losses.BinaryCrossentropy(label_smoothing=1.5), "label_smoothing = 1.5"),
        (lambda: losses.BinaryCrossentropy(axis=1), "not supported: axis=1"),
        (lambda: SparseCategoricalCrossentropy(ignore_class="a"), "ignore_class = 'a'"),
        (lambda: metrics.get(3), "Could not interpret metric identifier: 3"),
        (lambda: metrics.get("acuracy"), "unknown metric 'acuracy'"),
        (lambda: metrics.deserialize({"class_name": "Recall", "config": {"alpha": 1}}), "metric Recall: .*alpha"),
        (lambda: metrics.Precision(top_k=2), "not supported: top_k=2"),
        (lambda: metrics.Recall(class_id=2), "not supported: class_id=2"),
        (lambda: metrics.Recall([0.1, 0.2]), "several in one metric"),
        (lambda: metrics.Recall(1.5), r"Threshold values must be in \[0, 1\]. Received: \[1.5\]"),
        (lambda: metrics.TopKCategoricalAccuracy(0), "k = 0: expected an integer >= 1"),
        (lambda: metrics.SparseTopKCategoricalAccuracy(from_sorted_ids=True), "not supported: from_sorted_ids"),
        (lambda: metrics.SparseCategoricalCrossentropy(ignore_class=1), "not supported: ignore_class=1"),
        (lambda: metrics.CategoricalCrossentropy(axis=0), "not supported: axis=0"),
        (lambda: keys("accuracy", None), "Expected `metrics` argument to be a list, tuple, or dict"),
        (lambda: keys(None, 3), "Expected `weighted_metrics` argument"),
        (lambda: keys(["mae"], None), "metric 'mae' compares with values, the loss takes integer labels"),
        (lambda: keys(["accuracy"], None, shape=(1,)), "metric 'accuracy' compares with values"),
        (lambda: keys(["sparse_categorical_accuracy"], None, labels=False), "compares with integer labels"),
    ],
)
def test_refused(build, message):
    with pytest.raises(ConfigError, match=message):
        build()


def test_keys_and_order_in_logs():
    assert keys(["acc", "accuracy", "acc", "acc"], None) == ["acc", "accuracy", "acc_1", "acc_2"]
    assert keys(["acc"], ["acc", "accuracy", "acc"]) == ["acc", "weighted_acc", "accuracy", "weighted_acc_1"]
    assert keys({"b": ["mae"], "a": "mse"}, [["mae"]], labels=False) == ["mse", "mae", "weighted_mae"]
    assert keys(None, None) == []
    assert [one.weighted for one in resolve(["acc"], ["acc"], True, (3,))] == [False, True]


@pytest.mark.parametrize(
    ("labels", "shape", "expected"),
    [
        (True, (3,), metrics.SparseCategoricalAccuracy),
        (False, (3,), metrics.CategoricalAccuracy),
        (False, (1,), metrics.BinaryAccuracy),
        (False, None, metrics.CategoricalAccuracy),
    ],
)
def test_accuracy_is_what_outputs_and_targets_make_it(labels, shape, expected):
    for name in ("accuracy", "acc", "Accuracy"):
        (found,) = resolve([name], None, labels, shape)
        assert (type(found.metric), found.key) == (expected, name)


def test_nameless_metrics_are_numbered():
    first, second = metrics.Recall(), metrics.Recall()
    stem = first.name.rstrip("0123456789").rstrip("_")
    assert stem == "recall"
    assert int(second.name.removeprefix("recall_")) == int(first.name.removeprefix("recall").lstrip("_") or 0) + 1


# Training with numbers known beforehand: two outputs x @ kernel, kernel the identity


def replica(loss: losses.Loss, measured=None, weighted=None, activation=None, lr=0.0) -> Replica:
    made = Replica(NumpyBackend(np.float64), Architecture([Dense(2, activation, use_bias=False)], (2,)), 1)
    made.compile(loss, SGD(lr or 1e-300), measured, weighted)
    made.reserve(8)
    made.params[:4] = [1, 0, 0, 1]
    return made


def step(made: Replica, x, y, weights=None, shards=None) -> None:
    x = np.asarray(x, np.float64)
    feed = ResidentFeed(made.backend, made.as_stored(x, np.asarray(y), None if weights is None else np.array(weights)))
    feed.start(np.arange(len(x)), [])
    with made.backend.step_scope():
        made.forward_backward(feed, shards or [Shard(0, len(x), 0)])
        made.update()


X, Y = [[1.0, 0.0], [0.0, 2.0], [0.0, 0.0]], [[0.0, 0.0], [0.0, 0.0], [0.0, 4.0]]
SQUARES = np.array([0.5, 2.0, 8.0])
W = [1.0, 2.0, 0.5]


@pytest.mark.parametrize(
    ("reduction", "weights", "expected", "divisor"),
    [
        ("sum_over_batch_size", None, 10.5 / 3, 3),
        ("sum_over_batch_size", W, 8.5 / 3, 3),
        ("mean", W, 8.5 / 3, 3),
        ("mean_with_sample_weight", None, 10.5 / 3, 3),
        ("mean_with_sample_weight", W, 8.5 / 3.5, 3.5),
        ("sum", None, 10.5, 1),
        ("sum", W, 8.5, 1),
        ("mean_with_sample_weight", [0, 0, 0], 0.0, 1),
    ],
)
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_the_divisor_is_one_batchs(reduction, weights, expected, divisor, parts):
    made = replica(losses.MeanSquaredError(reduction))
    shards = [Shard(a, b, a) for a, b in {1: [(0, 3)], 2: [(0, 2), (2, 3)], 3: [(0, 1), (1, 1), (1, 3)]}[parts]]
    step(made, X, Y, weights, shards)
    tail = made.reduction[made.architecture.layout.size :]
    assert made.logs() == {"loss": pytest.approx(expected)}
    assert (tail[DIVISOR], tail[ROWS]) == (divisor, 3)
    assert tail[LOSS] == pytest.approx((SQUARES * (1 if weights is None else weights)).sum())
    assert made.samples_seen() == 3


def test_the_update_divides_by_the_divisor():
    made = replica(losses.MeanSquaredError("mean_with_sample_weight"), lr=1.0)
    step(made, X, Y, W)
    # dy = w (y - t) / 3.5 (two outputs a row halve the 2): row 0 (1, 0), row 1 (0, 4), row 2 has x = 0.
    np.testing.assert_allclose(made.params[:4], [1 - 1 / 3.5, 0, 0, 1 - 8 / 3.5])


def test_an_epochs_loss_is_keras_mean_over_batches():
    made = replica(SparseCategoricalCrossentropy(from_logits=True, ignore_class=7))
    step(made, [[0.0, 0.0]] * 3, [0, 7, 7])  # ln 2 over one row that counts
    step(made, [[0.0, 50.0], [0.0, 0.0]], [0, 7])  # 50
    step(made, [[0.0, 0.0]], [7])  # nothing
    assert made.logs() == {"loss": pytest.approx((3 * np.log(2) + 2 * 50 + 0) / 6)}
    assert made.samples_seen() == 6
    assert np.isfinite(made.params).all()
    assert made.loss.depends_on_batches
    assert not SparseCategoricalCrossentropy().depends_on_batches


def test_metrics_see_outputs_after_the_activation_that_the_loss_took_over():
    given = ["mae", metrics.Precision(0.7, name="p"), "accuracy", metrics.BinaryAccuracy(threshold=0.6)]
    made = replica(losses.BinaryCrossentropy(), given, given, "sigmoid")
    assert made._fused
    x, y = [[2.0, -1.0], [0.5, 3.0]], [[1.0, 0.0], [0.0, 0.0]]
    step(made, x, y, [1.0, 3.0])
    p, t = 1 / (1 + np.exp(-np.array(x))), np.array(y)
    mae = np.abs(p - t).mean(1)
    right = ((p > 0.6) == t).mean(1)
    logs = made.logs()
    assert logs["mae"] == pytest.approx(mae.mean())
    assert logs["weighted_mae"] == pytest.approx((mae * [1, 3]).sum() / 4)
    assert (logs["p"], logs["weighted_p"]) == (pytest.approx(1 / 2), pytest.approx(1 / 4))
    assert logs["binary_accuracy"] == pytest.approx(right.mean())
    assert logs["weighted_binary_accuracy"] == pytest.approx((right * [1, 3]).sum() / 4)


def test_only_a_softmax_leaves_the_highest_where_it_was():
    """Sigmoids of 40 and 50 are both 1: of equals the first is highest, although the logits differ."""
    x, y = [[40.0, 50.0]], [[0.0, 1.0]]
    made = replica(losses.BinaryCrossentropy(), [metrics.CategoricalAccuracy()], None, "sigmoid")
    step(made, x, y)
    assert made.logs()["categorical_accuracy"] == 0
    made = replica(losses.CategoricalCrossentropy(), [metrics.CategoricalAccuracy()], None, "softmax")
    step(made, x, y)
    assert made.logs()["categorical_accuracy"] == 1


def test_a_metric_of_the_users_own():
    class Largest(Mean):
        """Mean of the squared first output, which `multiply` writes."""

        def values(self, ops, batch, values_B):
            square = batch.scratch("square", (2,))
            ops.multiply(batch.y_pred, batch.y_pred, square)
            ops.pointwise_loss("squared", 0.0, square, batch.target, 1.0, 0.0, None, None, values_B)

    class Count(Metric):
        size = 1

        def update(self, ops, batch, state):
            ones = batch.scratch("ones")
            ops.fill(ones, 1)
            ops.sum_rows(RowSum(ones, batch.weights, state))

        def result(self, state, rows):
            return float(state[0]) / rows

    made = replica(losses.MeanSquaredError(), [Largest("largest"), Count("count")], [Count("count")])
    step(made, X, Y, W)
    step(made, X, Y, W)
    expected = ((np.array(X) ** 2 - Y) ** 2).mean()
    assert made.logs()["largest"] == pytest.approx(expected)
    assert (made.logs()["count"], made.logs()["weighted_count"]) == (1, pytest.approx(3.5 / 3))


def test_a_loss_of_the_users_own():
    class Quarter(losses.Loss):
        def write(self, ops, batch, logits, dy, values_B, correct_B):
            ops.pointwise_loss("squared", 0.0, *batch.flat, 0.5, 0.0, batch.weights, dy, values_B)

    made = replica(Quarter())
    assert made.loss.name == "quarter"
    step(made, X, Y, W)
    expected = (((np.array(X) - 0.5 * np.array(Y)) ** 2).mean(1) * W).sum() / 3
    assert made.logs() == {"loss": pytest.approx(expected)}


def test_labels_may_be_a_column_and_one_target_a_row():
    made = replica(SparseCategoricalCrossentropy())
    x, y = made.as_stored(np.zeros((3, 2)), np.array([[0], [1], [0]]))
    assert (x.shape, y.shape, y.dtype) == ((3, 2), (3,), np.int64)
    one = Replica(NumpyBackend(np.float32), Architecture([Dense(1)], (2,)), 1)
    one.compile(losses.MeanSquaredError(), SGD(0.1))
    _, y, w = one.as_stored(np.zeros((3, 2)), np.arange(3), np.ones((3, 1)))
    assert (y.shape, w.shape, w.dtype) == ((3, 1), (3,), np.float32)


def test_outputs_that_are_no_vectors():
    from dptrain.layers import Activation

    made = Replica(NumpyBackend(np.float64), Architecture([Activation("tanh")], (2, 3)), 1)
    for loss in (losses.MeanSquaredError("sum"), SparseCategoricalCrossentropy()):
        with pytest.raises(ConfigError, match="not supported"):
            made.compile(loss, SGD(0.1))
    made.compile(losses.MeanSquaredError(), SGD(0.1))
