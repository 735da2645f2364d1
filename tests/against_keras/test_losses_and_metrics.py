"""Every loss and metric, with and without sample weights, gives Keras' numbers in float64, and losses its gradients."""

import numpy as np
import pytest

import dptrain
from dptrain import losses as our_losses
from dptrain import metrics as our_metrics
from dptrain import ops
from dptrain.program.gradient import gradients
from dptrain.program.tensor import constant, differentiable

# Of Keras' own copies of its variables.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

CLASSES = 7
# Batches of several sizes, so that a mean over batches is not a mean over samples.
SIZES = (8, 13, 5, 71)
RTOL = 1e-9
EVENLY = (
    "area",
    "lower",
    "gains",
    "of labels",
    "weighted",
    "sensitivity",
    "specificity",
    "precise",
)  # metrics with many thresholds
ACTIVATIONS = {"softmax": ops.softmax, "sigmoid": ops.sigmoid, "linear": lambda x: x}


class Ours:
    losses, metrics = our_losses, our_metrics


def samples(targets: str, outputs: int = CLASSES) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return what a model's last activation is applied to, targets and weights."""
    rng = np.random.default_rng(5)
    z = rng.standard_normal((sum(SIZES), outputs))
    labels = rng.integers(0, outputs, len(z))
    y = {
        "labels": labels,
        "one-hot": np.eye(outputs)[labels],
        "shares": rng.dirichlet(np.ones(outputs), len(z)),
        "binary": rng.integers(0, 2, (len(z), outputs)).astype(np.float64),
        "values": rng.standard_normal((len(z), outputs)),
        "positive": rng.random((len(z), outputs)) + 0.1,
    }[targets]
    weights = rng.random(len(z)) * 2
    weights[::7] = 0
    return z, y, weights


def batches() -> list[slice]:
    ends = np.cumsum(SIZES)
    return [slice(end - size, end) for end, size in zip(ends, SIZES, strict=True)]


def compare(keras, loss, last, targets, *, weighted, outputs=CLASSES, scale=1.0):
    """Compare a loss, a function of a module that is Keras or dptrain, and its gradient before the last activation."""
    z, y, weights = samples(targets, outputs)
    z, y = z * scale, y * scale if targets in ("values", "positive") else y
    for rows in batches():
        sample_weight = (weights[rows],) if weighted else ()

        def of_theirs(z, y=y[rows], sample_weight=sample_weight):
            return keras.losses.get(loss(keras))(y, keras.activations.get(last)(z), *sample_weight)

        theirs, gradient_of_theirs = value_and_gradient(keras, of_theirs, z[rows])
        ours_z = differentiable(z[rows])
        ours = our_losses.as_loss(loss(Ours))(y[rows], ACTIVATIONS[last](ours_z), *sample_weight)
        np.testing.assert_allclose(ours, theirs, rtol=RTOL, atol=1e-12)
        (gradient,) = gradients(ours, [ours_z])
        np.testing.assert_allclose(gradient, gradient_of_theirs, rtol=RTOL, atol=1e-11)


def value_and_gradient(keras, function, x):
    """Return what a function of Keras' gives for an array, and its gradient, on PyTorch or JAX."""
    if keras.backend.backend() == "jax":
        import jax

        return tuple(map(np.asarray, jax.value_and_grad(function)(jax.numpy.asarray(x))))
    source = keras.ops.convert_to_tensor(x).requires_grad_()
    value = function(source)
    value.backward()
    return value.detach().numpy(), source.grad.numpy()


def compare_metrics(keras, loss, last, targets, measured, *, weighted, outputs=CLASSES, digits=None):
    """Compare metrics, named by strings as `compile` would understand them, after each batch."""
    z, y, weights = samples(targets, outputs)
    y_pred = ACTIVATIONS[last](constant(z)).numpy()
    y_pred = y_pred if digits is None else y_pred.round(digits)
    metrics, loss_function = [metric(Ours) for metric in measured], our_losses.as_loss(loss(Ours))
    ours = our_metrics.resolve(*((None, metrics) if weighted else (metrics, None)), loss_function, (outputs,))[weighted]
    trainer = keras.Sequential([keras.Input((outputs,)), keras.layers.Activation("linear")])
    trainer.compile(
        "sgd",
        loss(keras),
        metrics=None if weighted else [metric(keras) for metric in measured],
        weighted_metrics=[metric(keras) for metric in measured] if weighted else None,
    )
    for rows in batches():
        sample_weight = (weights[rows],) if weighted else ()
        for metric in ours.values():
            metric.update_state(y[rows], y_pred[rows], *sample_weight)
        # Unlike `test_on_batch`, which starts afresh, this goes on with the metrics.
        x, *arguments = (keras.ops.convert_to_tensor(array) for array in (y_pred[rows], y[rows], *sample_weight))
        theirs = trainer.compute_metrics(x, arguments[0], x, *arguments[1:])
        theirs.pop("loss")
        assert list(ours) == list(theirs)
        for key, value in theirs.items():
            value = keras.ops.convert_to_numpy(value)
            # Keras divides regions and adjusts R^2 in float32; on PyTorch it adds up weights between thresholds so.
            single = ["iou", "adjusted", *(EVENLY if keras.backend.backend() == "torch" else ())]
            rtol = 1e-6 if any(word in key for word in single) else RTOL
            np.testing.assert_allclose(ours[key].result(), value, rtol=rtol, atol=1e-12, err_msg=key)


def loss_of(kind, /, *args, **options):
    return lambda module: getattr(module.losses, kind)(*args, **options)


def metric_of(kind, /, *args, **options):
    return lambda module: getattr(module.metrics, kind)(*args, **options)


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
    "binary focal": (loss_of("BinaryFocalCrossentropy"), "sigmoid", "binary"),
    "binary focal, balanced": (
        loss_of("BinaryFocalCrossentropy", apply_class_balancing=True, alpha=0.4, gamma=1.5, label_smoothing=0.1),
        *("sigmoid", "binary"),
    ),
    "binary focal, logits": (loss_of("BinaryFocalCrossentropy", from_logits=True), "linear", "binary"),
    "focal": (loss_of("CategoricalFocalCrossentropy"), "softmax", "one-hot"),
    "focal, of sigmoids": (loss_of("CategoricalFocalCrossentropy", alpha=[0.125] * 7, gamma=1.5), "sigmoid", "shares"),
    "focal, logits": (
        loss_of("CategoricalFocalCrossentropy", from_logits=True, label_smoothing=0.1),
        *("linear", "one-hot"),
    ),
    "generalized": (loss_of("CategoricalGeneralizedCrossEntropy", q=0.7), "softmax", "labels"),
    "dice": (loss_of("Dice"), "sigmoid", "binary"),
    "dice of samples": (loss_of("Dice", axis=-1), "softmax", "one-hot"),
    "tversky": (loss_of("Tversky", alpha=0.3, beta=0.6), "sigmoid", "binary"),
    "tversky of samples": (loss_of("Tversky", axis=(1,)), "sigmoid", "binary"),
    # PyTorch's softplus(x) is x from 20 on: distances and gamma stay below.
    "circle": (loss_of("Circle", gamma=8), "softmax", "labels"),
    "circle, with pairs of one": (loss_of("Circle", 5, 0.1, remove_diagonal=False), "softmax", "labels"),
    "squared": (loss_of("MeanSquaredError"), "linear", "values"),
    "absolute": (loss_of("MeanAbsoluteError"), "linear", "values"),
    "huber": (loss_of("Huber", delta=0.6), "linear", "values"),
    "log cosh": (loss_of("LogCosh"), "linear", "values"),
    "percentage": (loss_of("MeanAbsolutePercentageError"), "linear", "values"),
    "logarithmic": (loss_of("MeanSquaredLogarithmicError"), "sigmoid", "positive"),
    "cosine": (loss_of("CosineSimilarity"), "linear", "values"),
    "hinge": (loss_of("Hinge"), "linear", "binary"),
    "squared hinge": (loss_of("SquaredHinge"), "linear", "binary"),
    "categorical hinge": (loss_of("CategoricalHinge"), "linear", "one-hot"),
    "divergence": (loss_of("KLDivergence"), "softmax", "shares"),
    "poisson": (loss_of("Poisson"), "sigmoid", "positive"),
}


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("case", LOSSES)
def test_losses(keras, case, weighted):
    compare(keras, *LOSSES[case], weighted=weighted)


@pytest.mark.parametrize("case", LOSSES)
def test_losses_of_tiny_numbers(keras, case):
    compare(keras, *LOSSES[case], weighted=False, scale=1e-5)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "mean", "mean_with_sample_weight", "sum"])
@pytest.mark.parametrize("ignore_class", [None, 3])
def test_reductions(torch_keras, reduction, ignore_class, weighted):
    loss = loss_of("SparseCategoricalCrossentropy", reduction=reduction, ignore_class=ignore_class)
    compare(torch_keras, loss, "softmax", "labels", weighted=weighted)


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
            metric_of("MeanIoU", 7, sparse_y_pred=False, name="mean_iou", dtype="float64"),
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
            metric_of("FBetaScore", average="weighted", beta=0.5, name="weighted"),
            metric_of("F1Score", average="macro", name="macro"),
            metric_of("OneHotMeanIoU", 7, name="mean_iou", dtype="float64"),
            metric_of("OneHotIoU", 7, [0, 3], ignore_class=2, name="iou", dtype="float64"),
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
            metric_of("AUC", name="area"),
            metric_of("AUC", curve="PR", name="other area"),
            metric_of("AUC", curve="PR", summation_method="minoring", name="lower"),
            metric_of("AUC", curve="ROC", summation_method="majoring", thresholds=[0.3, 0.6], name="upper"),
            metric_of("AUC", curve="PRGAIN", name="gains"),
            metric_of("AUC", curve="PRGAIN", summation_method="minoring", multi_label=True, name="gains of labels"),
            metric_of("AUC", curve="PR", multi_label=True, label_weights=[1, 2, 3, 4, 0, 1, 2], name="of labels"),
            metric_of("AUC", label_weights=[1.0, 0.5, 2.0, 0.0, 3.0, 1.0, 1.5], name="weighted"),
            metric_of("SensitivityAtSpecificity", 0.6, name="sensitivity"),
            metric_of("SpecificityAtSensitivity", 0.4, num_thresholds=7, name="specificity"),
            metric_of("PrecisionAtRecall", 0.3, class_id=2, name="precise"),
            metric_of("RecallAtPrecision", 0.6, num_thresholds=1, name="recalled"),
            metric_of("Precision", thresholds=[0.2, 0.7], class_id=3, name="several"),
            metric_of("TruePositives", name="right"),
            metric_of("FalseNegatives", thresholds=0.3, name="missed"),
            metric_of("F1Score", threshold=0.4, name="f1_score"),
            metric_of("FBetaScore", average="micro", beta=2.0, threshold=0.6, name="micro"),
        ],
    ),
    "values": (
        loss_of("MeanSquaredError"),
        "linear",
        [
            *(named(name) for name in ("mae", "mean_absolute_error", "MSE", "mae", "mape", "poisson", "hinge")),
            metric_of("R2Score", name="r2_score"),
            metric_of("R2Score", "variance_weighted_average", num_regressors=3, name="adjusted"),
            metric_of("R2Score", None, name="each"),
            *(metric_of(name) for name in ("Accuracy", "RootMeanSquaredError", "CosineSimilarity", "LogCoshError")),
            *(metric_of(name) for name in ("PearsonCorrelation", "ConcordanceCorrelation")),
        ],
    ),
}


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("targets", METRICS)
def test_metrics(keras, targets, weighted):
    loss, last, measured = METRICS[targets]
    compare_metrics(keras, loss, last, targets, measured, weighted=weighted)


def test_outputs_at_the_thresholds(keras):
    measured = [
        *(metric_of("BinaryAccuracy", threshold=limit, name=f"accuracy {limit}") for limit in (0.3, 0.5)),
        *(metric_of("Precision", thresholds=[0.2, 0.5, 0.7], class_id=n, name=f"p {n}") for n in (None, 2)),
        *(metric_of("Recall", thresholds=limit, top_k=3, name=f"recall {limit}") for limit in (0.4, None)),
        *(metric_of("F1Score", threshold=limit, name=f"score {limit}") for limit in (0.4, 0.5)),
        metric_of("FBetaScore", average="micro", beta=2.0, threshold=0.6, name="micro"),
        *(metric_of(f"{name}s", thresholds=[0.3, 0.6], name=name) for name in ("TruePositive", "FalseNegative")),
    ]
    if keras.backend.backend() == "torch":  # PyTorch takes any of equal outputs among the greatest
        measured = [metric for metric in measured if not getattr(metric(Ours), "top_k", None)]
    compare_metrics(keras, loss_of("BinaryCrossentropy"), "sigmoid", "binary", measured, weighted=False, digits=1)


@pytest.mark.parametrize("weighted", [False, True])
def test_metrics_of_one_output(keras, weighted):
    measured = [named("accuracy"), named("Accuracy"), named("precision"), named("recall")]
    measured.append(metric_of("BinaryIoU", threshold=0.4, name="iou", dtype="float64"))
    loss = loss_of("BinaryCrossentropy")
    compare_metrics(keras, loss, "sigmoid", "binary", measured, weighted=weighted, outputs=1)


@pytest.mark.parametrize("targets", ["labels", "one-hot"])
def test_metrics_of_logits(keras, targets):
    """With a loss from logits, metrics see logits."""
    name = {"labels": "SparseCategoricalCrossentropy", "one-hot": "CategoricalCrossentropy"}[targets]
    measured = [named("accuracy"), metric_of(name, from_logits=True)]
    compare_metrics(keras, loss_of(name, from_logits=True), "linear", targets, measured, weighted=False)


# Of classes that have arguments without defaults.
OWN = {
    **{name: {"num_classes": 3, "target_class_ids": [0, 2]} for name in ("IoU", "OneHotIoU")},
    **{name: {"num_classes": 3} for name in ("MeanIoU", "OneHotMeanIoU")},
    "PrecisionAtRecall": {"recall": 0.5},
    "RecallAtPrecision": {"precision": 0.5},
    "SensitivityAtSpecificity": {"specificity": 0.5},
    "SpecificityAtSensitivity": {"sensitivity": 0.5},
}


# Keras exports it, and finds it by no name.
NAMELESS = our_losses.CategoricalGeneralizedCrossEntropy


def test_names(keras):
    """A class that both have goes by the same names."""
    for ours, theirs in ((our_losses.LOSSES, keras.losses), (our_metrics.METRICS, keras.metrics)):
        for name, symbol in ours.items():
            if symbol is NAMELESS or symbol.__name__ in OWN or not hasattr(theirs, symbol.__name__):
                continue
            their_symbol = theirs.get(name)
            their_name = type(their_symbol).__name__ if not hasattr(their_symbol, "__name__") else their_symbol.__name__
            assert their_name in (
                symbol.__name__,
                *[alias for alias, candidate in ours.items() if candidate is symbol],
            ), name


@pytest.mark.parametrize("kind", ["losses", "metrics"])
def test_configurations_travel_both_ways(keras, kind):
    ours, theirs = (our_losses, keras.losses) if kind == "losses" else (our_metrics, keras.metrics)
    for symbol in set((our_losses.LOSSES if kind == "losses" else our_metrics.METRICS).values()) - {NAMELESS}:
        if not hasattr(theirs, symbol.__name__):
            continue
        mine = symbol(**OWN.get(symbol.__name__, {}))
        restored = theirs.deserialize(ours.serialize(mine))
        back = ours.deserialize(theirs.serialize(restored))
        assert type(back) is symbol
        assert back._get_config() == mine._get_config()
        assert set(restored.get_config()) - {"fn"} <= set(mine._get_config()), symbol


LABELS = np.random.default_rng(8).integers(0, 3, (12, 4))
ONE_HOT = np.eye(3, dtype=np.float32)[LABELS]
STEPS = np.random.default_rng(9).random((12, 4)).astype(np.float32)
TARGETS = {
    "labels": (LABELS[:, 0], None),
    "a column of labels": (LABELS[:, :1], None),
    "one-hot": (ONE_HOT[:, 0], None),
    "several labels": (np.maximum(ONE_HOT[:, 0], ONE_HOT[:, 1]), STEPS[:, 0]),
    "labels of steps": (LABELS, STEPS),
    "one-hot of steps": (ONE_HOT, STEPS),
}


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("loss", ["own", "known"])
def test_accuracy_and_weights_of_targets_of_any_shape(keras, name, loss):
    y, weights = TARGETS[name]
    shape = (4, 3) if y.ndim > 2 or y.shape[1:] == (4,) else (3,)
    x = np.random.default_rng(3).dirichlet(np.ones(3), (12, *shape[:-1])).astype(np.float32)
    expected_loss = "categorical_crossentropy" if y.shape[1:] == shape else "sparse_categorical_crossentropy"

    def evaluated(library):
        model = library.Sequential([library.layers.Input(shape), library.layers.Identity()])
        mean_square = lambda y_true, y_pred: library.ops.mean(library.ops.square(y_pred), -1)  # noqa: E731
        model.compile(
            "sgd", mean_square if loss == "own" else expected_loss, metrics=["accuracy"], weighted_metrics=["acc"]
        )
        return model.evaluate(x, y, sample_weight=weights, batch_size=12, verbose=0, return_dict=True)

    assert evaluated(dptrain) == pytest.approx(evaluated(keras), rel=1e-5)
