"""Metrics: names and configurations, values against NumPy over several batches, and totals on any number of ranks."""

import inspect

import numpy as np
import pytest

import dptrain as dp
from dptrain import losses, metrics, ops
from dptrain.errors import ConfigError
from dptrain.metrics import METRICS, Mean, MeanMetricWrapper, Metric, Sum, resolve
from dptrain.program.dims import Dim
from dptrain.program.execute import evaluate
from dptrain.program.program import trace
from dptrain.program.sharding.messages import count
from dptrain.program.sharding.placement import place
from dptrain.program.tensor import constant
from tests.unit.program.virtual_ranks import run_on_ranks

RNG = np.random.default_rng(0)
ROWS, C = 23, 4
Z = RNG.normal(size=(ROWS, C))
P = np.exp(Z) / np.exp(Z).sum(-1, keepdims=True)
SIGMOID = 1 / (1 + np.exp(-Z))
LABELS = RNG.integers(0, C, ROWS)
ONE_HOT, BINARY, VALUES = np.eye(C)[LABELS], (RNG.random((ROWS, C)) < 0.4) * 1.0, RNG.normal(size=(ROWS, C))
ROUNDED = np.where(RNG.random((ROWS, C)) < 0.5, VALUES, 0)
WEIGHTS = np.where(RNG.random(ROWS) < 0.3, 0.0, RNG.random(ROWS))
ABOVE = (P[np.arange(ROWS), LABELS][:, None] < P).sum(-1)
OF_LABEL = -np.log(P)[np.arange(ROWS), LABELS]
E = Z - VALUES


def smoothed(t, p):
    t = 0.8 * t + 0.1
    return -(t * np.log(p) + (1 - t) * np.log(1 - p)).mean(-1)


# Metric, targets, outputs, and each sample's value.
MEANS = {
    "equal": (metrics.Accuracy, ROUNDED, VALUES, (ROUNDED == VALUES).mean(-1)),
    "binary": (lambda: metrics.BinaryAccuracy(threshold=0.6), BINARY, SIGMOID, ((SIGMOID > 0.6) == BINARY).mean(-1)),
    "sparse": (metrics.SparseCategoricalAccuracy, LABELS, P, ABOVE == 0),
    "sparse, a column": (metrics.SparseCategoricalAccuracy, LABELS[:, None], P, ABOVE == 0),
    "categorical": (metrics.CategoricalAccuracy, ONE_HOT, P, ABOVE == 0),
    "sparse top 2": (lambda: metrics.SparseTopKCategoricalAccuracy(2), LABELS, P, ABOVE < 2),
    "sorted ids": (
        lambda: metrics.SparseTopKCategoricalAccuracy(2, from_sorted_ids=True),
        LABELS,
        np.argsort(-P, axis=1),
        ABOVE < 2,
    ),
    "top 3": (lambda: metrics.TopKCategoricalAccuracy(3), ONE_HOT, P, ABOVE < 3),
    "squared": (metrics.MeanSquaredError, VALUES, Z, (E**2).mean(-1)),
    "absolute": (metrics.MeanAbsoluteError, VALUES, Z, np.abs(E).mean(-1)),
    "log cosh": (metrics.LogCoshError, VALUES, Z, np.log(np.cosh(E)).mean(-1)),
    "cosine": (
        metrics.CosineSimilarity,
        VALUES,
        Z,
        (VALUES * Z).sum(-1) / np.linalg.norm(VALUES, axis=-1) / np.linalg.norm(Z, axis=-1),
    ),
    "hinge": (metrics.Hinge, BINARY, Z, np.maximum(1 - (2 * BINARY - 1) * Z, 0).mean(-1)),
    "sparse crossentropy": (metrics.SparseCategoricalCrossentropy, LABELS, P, OF_LABEL),
    "crossentropy of logits": (lambda: metrics.CategoricalCrossentropy(from_logits=True), ONE_HOT, Z, OF_LABEL),
    "binary crossentropy": (
        lambda: metrics.BinaryCrossentropy(label_smoothing=0.2),
        BINARY,
        SIGMOID,
        smoothed(BINARY, SIGMOID),
    ),
    "a function": (
        lambda: metrics.as_metric(lambda y_true, y_pred: ops.max(ops.absolute(y_pred - y_true), -1)),
        VALUES,
        Z,
        np.abs(E).max(-1),
    ),
}


def ratio(metric, other):
    """Return the expected precision or recall at a threshold of samples with weights."""

    def expected(weights):
        predicted, w = SIGMOID > 0.4, weights[:, None]
        true_positives = (predicted * BINARY * w).sum()
        return true_positives / (
            true_positives + ((predicted * (1 - BINARY) if other == "taken" else (1 - predicted) * BINARY) * w).sum()
        )

    return lambda: metric(0.4), BINARY, SIGMOID, expected


def area(weights):
    """Return the area under the ROC curve: how often a positive output is above a negative one."""
    w, yes = np.repeat(weights, C), BINARY.ravel() == 1
    rank = np.round(SIGMOID.ravel() * 1999 - 0.5)  # outputs between the same thresholds are equal
    higher = (rank[yes][:, None] > rank[~yes]) + 0.5 * (rank[yes][:, None] == rank[~yes])
    return (higher * w[yes][:, None] * w[~yes]).sum() / w[yes].sum() / w[~yes].sum()


OTHERS = {
    "precision": ratio(metrics.Precision, "taken"),
    "precision of the highest": (
        lambda: metrics.Precision(top_k=1),
        BINARY,
        SIGMOID,
        lambda w: (BINARY[np.arange(ROWS), SIGMOID.argmax(1)] * w).sum() / w.sum(),
    ),
    "recall": ratio(metrics.Recall, "missed"),
    "root": (
        metrics.RootMeanSquaredError,
        VALUES,
        Z,
        lambda w: np.sqrt(((E**2).mean(-1) * w).sum() / w.sum()),
    ),
    "true positives": (metrics.TruePositives, BINARY, SIGMOID, lambda w: ((SIGMOID > 0.5) * BINARY * w[:, None]).sum()),
    "area": (lambda: metrics.AUC(2000), BINARY, SIGMOID, area),
}


def f1(weights):
    """Return the mean over outputs of 2 tp / (2 tp + fp + fn), above 0.4."""
    predicted, w = SIGMOID > 0.4, weights[:, None]
    tp = (predicted * BINARY * w).sum(0)
    return (2 * tp / ((predicted * w).sum(0) + (BINARY * w).sum(0))).mean()


def explained(weights):
    """Return the mean over outputs of 1 - squared errors over squared distances from the mean."""
    w = weights[:, None]
    middle = (VALUES * w).sum(0) / w.sum()
    return (1 - ((Z - VALUES) ** 2 * w).sum(0) / ((VALUES - middle) ** 2 * w).sum(0)).mean()


def overlap(weights):
    """Return the mean over classes of what is in both over what is in either."""
    predicted_labels = P.argmax(-1)
    each = []
    for n in range(C):
        true_positives = (weights * (predicted_labels == n) * (n == LABELS)).sum()
        each.append(
            true_positives
            / ((weights * (predicted_labels == n)).sum() + (weights * (n == LABELS)).sum() - true_positives)
        )
    return np.mean(each)


def sensitive(weights):
    """Return the highest sensitivity at a threshold above which at most 0.4 of what is negative lies."""
    w, results = np.repeat(weights, C).reshape(BINARY.shape), []
    for limit in np.arange(200) / 199:
        predicted = limit < SIGMOID
        if ((~predicted) * (1 - BINARY) * w).sum() / ((1 - BINARY) * w).sum() >= 0.6:
            results.append((predicted * BINARY * w).sum() / (BINARY * w).sum())
    return max(results)


OTHERS |= {
    "f1": (lambda: metrics.F1Score("macro", 0.4), BINARY, SIGMOID, f1),
    "explained": (metrics.R2Score, VALUES, Z, explained),
    "overlap": (lambda: metrics.OneHotMeanIoU(C), ONE_HOT, P, overlap),
    "sensitivity": (lambda: metrics.SensitivityAtSpecificity(0.6), BINARY, SIGMOID, sensitive),
}
ALL = {
    **{
        name: (make, target, output, lambda w, values=values: (values * w).sum() / w.sum())
        for name, (make, target, output, values) in MEANS.items()
    },
    **OTHERS,
}


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("case", ALL)
def test_values_over_batches(case, weighted):
    """Over batches of several sizes it is that of all samples, and begins anew."""
    make, target, output, expected = ALL[case]
    metric = make()
    for _ in range(2):
        metric.reset_state()
        assert all(not variable.numpy().any() for variable in metric.variables)
        for part in (slice(0, 8), slice(8, 21), slice(21, None)):
            metric.update_state(target[part], output[part], WEIGHTS[part] if weighted else None)
        np.testing.assert_allclose(metric.result(), expected(WEIGHTS if weighted else np.ones(ROWS)), rtol=1e-6)
    assert all(variable.dtype == np.float64 and variable.aggregation == "sum" for variable in metric.variables)


@pytest.mark.parametrize("shards", [[23], [8, 8, 7], [0, 23]], ids=str)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("case", ALL)
def test_ranks_keep_summands_of_totals(case, weighted, shards):
    """A step that only adds to totals sends no message; the sum of the ranks' totals gives what one rank has."""
    make, target, output, expected = ALL[case]
    metric = make()

    def step(y_true, y_pred, weights):
        metric.update_state(y_true, y_pred, weights if weighted else None)
        return {}

    values = {"y_true": target, "y_pred": output, "weights": WEIGHTS}
    program = trace(step, {name: ((Dim.rows(ROWS), *value.shape[1:]), value.dtype) for name, value in values.items()})
    placed = place(program, summed=metric.variables)
    assert count(placed) == (case == "hinge")  # which asks whether all targets are 0 or 1
    actual = [updates for _, updates in run_on_ranks(placed, values, shards, dict.fromkeys(values, 0))[0]]
    for variable in metric.variables:
        parts = [updates[variable] for updates in actual]
        variable.assign(np.sum(parts, axis=0) if variable in placed.summed else parts[0])
    np.testing.assert_allclose(metric.result(), expected(WEIGHTS if weighted else np.ones(ROWS)), rtol=1e-6)


def test_a_mean_and_a_sum_that_are_fed_by_hand():
    mean, total = Mean("penalty"), Sum()
    assert float(mean.result()) == 0
    mean.update_state([1.0, 3.0])
    mean.update_state(6.0)
    mean.update_state(np.array([[1.0, 3.0], [5.0, 7.0]]), [1, 3])
    np.testing.assert_allclose(mean.result(), (1 + 3 + 6 + 2 + 3 * 6) / (3 + 4))
    assert float(mean(2.0, sample_weight=10)) == pytest.approx((30 + 20) / 17)
    total.update_state([1, 2, 3])
    total.update_state([[1.0, 2.0], [3.0, 4.0]], [0, 2])
    assert float(total.result()) == 6 + 14


def test_a_batchs_loss_counts_for_its_rows():
    """In a traced step it is whole on every rank, and so is the mean."""
    mean = Mean("loss")

    def step(x):
        mean.update_state(ops.mean(x), sample_weight=x.shape[0])
        return {"mean": mean.result()}

    program = trace(step, {"x": ((Dim.rows(ROWS), C), np.float64)})
    outputs, updates = evaluate(program, {"x": Z})
    assert updates[mean.count] == ROWS
    np.testing.assert_allclose(outputs["mean"], Z.mean())
    placed = place(program, summed=mean.variables)
    assert mean.total in placed.summed
    assert count(placed) == 0


def test_the_highest_of_a_softmax_is_that_of_its_logits():
    """Sigmoids of 40 and 50 are both 1: of equals the first is highest, although the logits differ."""
    logits = constant(np.array([[40.0, 50.0]]))
    assert float(metrics.CategoricalAccuracy()([[0.0, 1.0]], ops.sigmoid(logits))) == 0
    assert float(metrics.CategoricalAccuracy()([[0.0, 1.0]], ops.softmax(logits))) == 1
    assert float(metrics.SparseCategoricalAccuracy()([1], logits.numpy())) == 1


def test_several_thresholds_and_one_output():
    result = metrics.Precision([0.3, 0.6]), metrics.Recall(class_id=1)
    np.testing.assert_allclose(
        result[0](BINARY, SIGMOID), [(BINARY * (at < SIGMOID)).sum() / (at < SIGMOID).sum() for at in (0.3, 0.6)]
    )
    np.testing.assert_allclose(result[1](BINARY, SIGMOID), (BINARY * (SIGMOID > 0.5))[:, 1].sum() / BINARY[:, 1].sum())


def test_only_the_highest_outputs_are_taken():
    """Of equals the first is, as of Keras."""
    predicted = np.argsort(np.argsort(-SIGMOID, axis=1, kind="stable"), axis=1) < 2
    cases = {
        (): (predicted * BINARY).sum() / predicted.sum(),
        (0.6,): (predicted * BINARY * (SIGMOID > 0.6)).sum() / (predicted * (SIGMOID > 0.6)).sum(),
    }
    for thresholds, expected in cases.items():
        np.testing.assert_allclose(metrics.Precision(*thresholds, top_k=2)(BINARY, SIGMOID), expected)
    of_class = (predicted * BINARY * WEIGHTS[:, None])[:, 1].sum() / (BINARY * WEIGHTS[:, None])[:, 1].sum()
    np.testing.assert_allclose(metrics.Recall(top_k=2, class_id=1)(BINARY, SIGMOID, WEIGHTS), of_class)
    assert float(metrics.Precision(top_k=1)([0, 0, 1], [0.0, -1.0, 0.0])) == 0
    assert float(metrics.Precision(top_k=4)([0, 0, 1, 1], [1, 1, 1, 1])) == 0.5


def test_weights_of_each_output_in_the_root_of_squares():
    weights = RNG.random((ROWS, C))
    metric = metrics.RootMeanSquaredError()(VALUES, Z, weights)
    np.testing.assert_allclose(metric, np.sqrt((E**2 * weights).sum() / weights.sum()))


def test_the_area_between_precision_and_recall():
    """Where outputs are exact, precision is 1 at every recall; where they say nothing, it is the part of positives."""
    assert float(metrics.AUC(curve="PR")([0, 0, 1, 1], [0.1, 0.2, 0.8, 0.9])) == pytest.approx(1)
    labels = (np.arange(4000) % 4 == 0) * 1.0
    area = float(metrics.AUC(curve="PR")(labels, RNG.random(4000)))
    assert area == pytest.approx(0.25, abs=0.03)
    logits = metrics.AUC(from_logits=True)
    assert float(logits(BINARY, Z)) == pytest.approx(float(metrics.AUC()(BINARY, SIGMOID)))


def test_metrics_of_the_users_own():
    class Largest(Metric):
        def __init__(self, name="largest"):
            super().__init__(name=name)
            self.mean = Mean()
            self.seen = self.add_weight(shape=(), initializer="zeros", name="seen")

        def update_state(self, y_true, y_pred, sample_weight=None):
            self.mean.update_state(ops.max(y_pred, -1), sample_weight)
            self.seen.assign_add(y_pred.shape[0])

        def result(self):
            return self.mean.result() / self.seen

    metric = Largest()
    assert [variable.name for variable in metric.variables] == ["seen", "total", "count"]
    np.testing.assert_allclose(metric(VALUES, Z, WEIGHTS), (Z.max(-1) * WEIGHTS).sum() / WEIGHTS.sum() / ROWS)
    metric.reset_state()
    assert [float(variable) for variable in metric.variables] == [0, 0, 0]
    assert (metric._get_config(), metric._direction) == ({"name": "largest", "dtype": "float32"}, None)


# Arguments without a default, of whichever class has them.
NEEDED = {
    **{"num_classes": 3, "target_class_ids": [0, 1]},
    **dict.fromkeys(("recall", "precision", "sensitivity", "specificity"), 0.5),
}


@pytest.mark.parametrize("name", METRICS)
def test_every_metric_is_made_of_its_name_class_and_configuration(name):
    arguments = {key: value for key, value in NEEDED.items() if key in inspect.signature(METRICS[name]).parameters}
    for identifier in (*(() if arguments else (name, METRICS[name])), metrics.serialize(METRICS[name](**arguments))):
        assert type(metrics.get(identifier)) is METRICS[name]
    metric = METRICS[name](**arguments, name="mine")
    assert metrics.deserialize(metrics.serialize(metric))._get_config() == metric._get_config()


def keys(*given: object, labels: bool = True, shape: tuple[int, ...] | None = (3,)) -> list[str]:
    loss = losses.SparseCategoricalCrossentropy() if labels else losses.MeanSquaredError()
    plain, weighted = resolve(*given, loss, shape)
    return [*plain, *weighted]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: metrics.get(3), "Could not interpret metric identifier: 3"),
        (lambda: metrics.get("acuracy"), "unknown metric 'acuracy'"),
        (lambda: metrics.deserialize({"class_name": "Recall", "config": {"alpha": 1}}), "metric Recall: .*alpha"),
        (lambda: metrics.Precision(top_k=0), "top_k = 0: expected an integer >= 1"),
        (
            lambda: metrics.Precision(class_id=0)([0, 1], [0.2, 0.8]),
            r"class_id is provided, y_pred .* shape: \(2,\)",
        ),
        (lambda: metrics.Recall(class_id=0)([0, 1], np.ones((2, 3))), r"y_true.shape=\(2,\), y_pred.shape=\(2, 3\)"),
        (lambda: metrics.AUC()(np.ones((2, 1)), np.ones((2, 3))), "metric 'auc': y_true and y_pred must"),
        (lambda: metrics.Recall(1.5), r"Threshold values must be in \[0, 1\]. Received: \[1.5\]"),
        (lambda: metrics.TopKCategoricalAccuracy(0), "k = 0: expected an integer >= 1"),
        (lambda: metrics.Recall([0.5, -1, 2]), r"Threshold values must be in \[0, 1\]. Received: \[-1, 2\]"),
        (lambda: metrics.TruePositives([None, 0.5]), r"Threshold values must be in \[0, 1\]. Received: \[None\]"),
        (lambda: metrics.FBetaScore(beta=1), r"`beta` argument value\. It should be a Python float\. .* of type"),
        (lambda: metrics.FBetaScore(beta=-0.5), r"`beta` argument value\. It should be > 0\. Received: beta=-0\.5"),
        (lambda: metrics.F1Score(threshold=1.1), r"It should verify 0 < threshold <= 1\. Received: threshold=1\.1"),
        (lambda: metrics.AUC(curve="LIFT"), r'Invalid AUC curve value: "LIFT"\. Expected values are'),
        (lambda: metrics.AUC(summation_method="lower"), r'Invalid AUC summation method value: "lower"'),
        (lambda: metrics.AUC(1), r"`num_thresholds` must be an integer > 1\. Received: num_thresholds=1"),
        (lambda: metrics.AUC(num_labels=2), "`num_labels` is needed only when `multi_label` is True"),
        (lambda: metrics.AUC(multi_label=True)([0, 1], [0.1, 0.9]), r"must have rank 2 .* Found rank 1"),
        (lambda: metrics.AUC(multi_label=True).result(), "no result before the first batch"),
        (lambda: keys("accuracy", None), "Expected `metrics` argument to be a list, tuple, or dict"),
        (lambda: keys(None, 3), "Expected `weighted_metrics` argument"),
        (lambda: keys(["mae"], None), "metric 'mae' expects targets that are values, the loss integer labels"),
        (lambda: keys(["accuracy"], None, shape=(1,)), "metric 'accuracy' expects targets that are values"),
        (lambda: keys(["sparse_categorical_accuracy"], None, labels=False), "expects targets that are integer labels"),
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
    assert keys([metrics.Recall(), metrics.Recall()], None, labels=False) == ["recall", "recall_1"]
    assert keys([losses.mean_squared_error], None, labels=False) == ["mean_squared_error"]
    plain, weighted = resolve(["acc"], ["acc"], None, (3,))
    assert (list(plain), list(weighted)) == (["acc"], ["weighted_acc"])


def custom(y_true, y_pred):
    return ops.mean(y_pred - y_true, -1)


@pytest.mark.parametrize(
    ("loss", "shape", "target", "place"),
    [
        ("sparse_categorical_crossentropy", (3,), None, 1),
        ("mse", (3,), None, 2),
        ("mse", (1,), None, 0),
        ("mse", None, None, 2),
        (custom, (3,), None, 1),
        (custom, (3,), (3,), 2),
        (custom, (3,), (), 1),
        (custom, (3,), (1,), 1),
    ],
)
def test_what_accuracy_and_crossentropy_mean_follows_from_outputs_and_targets(loss, shape, target, place):
    for names, kind in (
        (("accuracy", "acc", "Accuracy"), ("BinaryAccuracy", "SparseCategoricalAccuracy", "CategoricalAccuracy")),
        (("crossentropy", "ce"), ("BinaryCrossentropy", "SparseCategoricalCrossentropy", "CategoricalCrossentropy")),
    ):
        for name in names:
            ((key, result),) = resolve([name], None, losses.as_loss(loss), shape, target)[0].items()
            assert (type(result).__name__, key) == (kind[place], name)


def test_a_metric_as_keras_guide_writes_it():
    """Alone, and in a model; a variable is as good a result as its value, and `reset_state` may be one's own."""

    class Hits(Metric):
        def __init__(self, name="hits", **options):
            super().__init__(name=name, **options)
            self.count = self.add_variable(shape=(), name="count", initializer="zeros")

        def update_state(self, y_true, y_pred, sample_weight=None):
            place = ops.reshape(ops.argmax(y_pred, axis=1), (-1, 1))
            values = ops.cast(ops.cast(y_true, "int32") == ops.cast(place, "int32"), "float32")
            if sample_weight is not None:
                values = ops.multiply(values, ops.reshape(ops.cast(sample_weight, "float32"), (-1, 1)))
            self.count.assign_add(ops.sum(values))

        def result(self):
            return self.count

        def reset_state(self):
            self.count.assign(0)

    hits, right = Hits(), Z.argmax(1) == LABELS
    assert (float(hits(LABELS[:, None], Z)), float(hits(LABELS[:, None], Z))) == (right.sum(), 2 * right.sum())
    hits.reset_state()
    assert float(hits(LABELS[:, None], Z, WEIGHTS)) == pytest.approx((right * WEIGHTS).sum())
    model = dp.Sequential([dp.layers.Activation("linear", input_shape=(C,))])
    model.compile(loss=losses.SparseCategoricalCrossentropy(True), metrics=[Hits()], weighted_metrics=[Hits("w")])
    logs = model.evaluate(Z, LABELS[:, None], sample_weight=WEIGHTS, verbose=0, return_dict=True)
    assert (logs["hits"], logs["w"]) == (right.sum(), pytest.approx((right * WEIGHTS).sum()))


def test_functions():
    assert metrics.get(custom) is custom
    assert metrics.get(None) is None
    metric = metrics.as_metric(custom)
    assert (type(metric), metric.name, metric._takes_labels, metric._get_config()["fn"]) == (
        MeanMetricWrapper,
        "custom",
        None,
        "custom",
    )
    assert metrics.huber is losses.huber
    assert metrics.mean_squared_error is losses.mean_squared_error
    assert type(metrics.as_metric(metrics.binary_accuracy)) is metrics.BinaryAccuracy
    np.testing.assert_array_equal(metrics.sparse_categorical_accuracy(LABELS, P), ABOVE == 0)


def test_counts_and_thresholds_have_keras_names():
    precision = metrics.Precision(top_k=None)
    precision.update_state([0, 1, 1], [0.7, 0.9, 0.3])
    counts = precision.true_positives.numpy().tolist(), precision.false_positives.numpy().tolist()
    assert (*counts, precision.thresholds, precision.init_thresholds) == ([1], [1], [0.5], None)
    with pytest.raises(AttributeError, match="does not count false_negatives"):
        precision.false_negatives  # noqa: B018
    count = metrics.FalseNegatives([0.2, 0.6])
    count.update_state([1, 1], [0.1, 0.5])
    assert (count.accumulator.numpy().tolist(), count.thresholds) == ([1, 2], [0.2, 0.6])
    area = metrics.AUC(3)
    assert area.thresholds == pytest.approx([-1e-7, 0.5, 1 + 1e-7])
    assert metrics.PrecisionAtRecall(0.3).recall == 0.3
    assert metrics.SensitivityAtSpecificity(0.4).specificity == 0.4


def test_policies_as_types():
    assert metrics.Mean(dtype=dp.DTypePolicy("mixed_float16")).dtype == "float16"
    for dtype in (dp.DTypePolicy("mixed_bfloat16"), "bfloat16"):
        loss = dp.losses.MeanSquaredError(dtype=dtype)
        assert (loss.dtype, loss(np.ones((2, 2)), np.zeros((2, 2))).dtype.name) == ("bfloat16", "bfloat16")


def test_areas_of_labels_are_averaged():
    """Of two labels one is told without a fault, the other the wrong way round."""
    labels, outputs = np.array([[0, 0], [1, 1]]), np.array([[0.2, 0.8], [0.8, 0.2]])
    for options in ({}, {"num_labels": 2}):
        area = metrics.AUC(multi_label=True, **options)
        assert float(area(labels, outputs)) == pytest.approx(0.5)
        assert area.true_positives.shape == (200, 2)
        area.reset_state()
        assert float(area(labels[:, ::-1], outputs)) == pytest.approx(0.5)
    weighted = metrics.AUC(multi_label=True, label_weights=[3, 1])
    assert float(weighted(labels, outputs)) == pytest.approx(0.75)
    again = metrics.AUC.from_config(weighted.get_config())
    assert float(again(labels, outputs)) == pytest.approx(0.75)
    alone = metrics.AUC(label_weights=[1, 0])
    assert float(alone(labels, outputs, [2.0, 1.0])) == pytest.approx(1)


@pytest.mark.parametrize("ignored", [1, -1])
def test_an_ignored_class_has_no_loss_and_counts_without_weights_alone(ignored):
    labels = np.where(LABELS == 1, ignored, LABELS)
    values = np.where(labels == ignored, 0, OF_LABEL)
    metric = metrics.SparseCategoricalCrossentropy(ignore_class=ignored)
    np.testing.assert_allclose(metric(labels, P), values.mean(), rtol=1e-6)
    metric.reset_state()
    counted = WEIGHTS * (labels != ignored)
    np.testing.assert_allclose(metric(labels, P, WEIGHTS), (values * counted).sum() / counted.sum(), rtol=1e-6)
    assert metric.get_config()["ignore_class"] == ignored


@pytest.mark.parametrize("make", [metrics.MeanSquaredError, lambda: metrics.MeanIoU(C), metrics.AUC])
def test_stateless_methods_leave_the_state(make):
    metric, like = make(), make()
    batches = [(BINARY[:9], SIGMOID[:9]), (BINARY[9:], SIGMOID[9:])]
    if isinstance(metric, metrics.MeanIoU):
        batches = [(LABELS[:9], P[:9].argmax(1)), (LABELS[9:], P[9:].argmax(1))]
    metric.update_state(*batches[0])
    before = [variable.numpy() for variable in metric.variables]
    state = metric.stateless_reset_state()
    for batch in batches:
        state = metric.stateless_update_state(state, *batch)
        like.update_state(*batch)
    for value, variable in zip(state, like.variables, strict=True):
        np.testing.assert_array_equal(value, variable)
    assert float(metric.stateless_result(state)) == float(like.result())
    for value, variable in zip(before, metric.variables, strict=True):
        np.testing.assert_array_equal(value, variable)
    with pytest.raises(ConfigError, match="`metric_variables` must be a list of tensors corresponding 1:1"):
        metric.stateless_result(state[:-1] if len(state) > 1 else [*state, 1.0])


def test_thresholds_of_an_area_need_no_number():
    assert metrics.AUC(None, thresholds=[0.3, 0.5]).num_thresholds == 4
    assert metrics.Mean(dtype="float16")._dtype == metrics.Mean(dtype="float16").dtype == "float16"
    with pytest.raises(AttributeError):
        metrics.Mean().dtype = "float16"
