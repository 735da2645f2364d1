"""F-beta, R^2 and intersection over union, by hand; against Keras in tests/against_keras."""

import numpy as np
import pytest

import dptrain as dp
from dptrain import metrics
from dptrain.errors import ConfigError

TRUE = np.array([[1, 0, 0], [0, 1, 0], [0, 1, 0], [0, 0, 1]], np.float32)
FOUND = np.array([[0.9, 0.1, 0], [0.2, 0.7, 0.1], [0.6, 0.3, 0.1], [0.1, 0.2, 0.7]], np.float32)


def test_scores_by_hand():
    metric = metrics.F1Score()
    metric.update_state(TRUE[:2], FOUND[:2])
    np.testing.assert_allclose(metric(TRUE[2:], FOUND[2:]), [2 / 3, 2 / 3, 1], rtol=1e-5)
    assert float(metrics.F1Score(average="micro")(TRUE, FOUND)) == pytest.approx(0.75, rel=1e-5)
    beta = metrics.FBetaScore(average="macro", beta=2.0, threshold=0.25)  # 1 is found in rows 1 and 2, 0 in 0 and 2
    assert float(beta(TRUE, FOUND)) == pytest.approx((5 / 6 + 1 + 1) / 3, rel=1e-5)
    metric.reset_state()
    np.testing.assert_array_equal(metric.result(), [0, 0, 0])


def test_explained_variance_by_hand():
    true, predicted = np.array([[1.0], [2], [3], [6]]), np.array([[1.0], [2], [4], [6]])
    assert float(metrics.R2Score()(true, predicted)) == pytest.approx(1 - 1 / 14)
    assert float(metrics.R2Score(num_regressors=1)(true, predicted)) == pytest.approx(1 - 1 / 14 * 3 / 2)
    assert float(metrics.R2Score(num_regressors=3)(true, predicted)) == pytest.approx(1 - 1 / 14)  # too few samples
    assert float(metrics.R2Score()(true[:, 0], predicted)) == pytest.approx(1 - 1 / 14)


def test_overlap_by_hand():
    true, predicted = np.array([0, 0, 1, 1, 2, 9]), np.array([0, 1, 1, 1, 0, 0])
    assert float(metrics.MeanIoU(3)(true, predicted)) == pytest.approx((1 / 3 + 2 / 3 + 0) / 3, rel=1e-5)
    assert float(metrics.IoU(3, [1])(true, predicted)) == pytest.approx(2 / 3, rel=1e-5)
    assert float(metrics.IoU(4, [1, 3])(true, predicted)) == pytest.approx(2 / 3, rel=1e-5)  # nothing is of class 3
    weights = np.array([1, 1, 1, 0, 1, 1.0])
    assert float(metrics.IoU(3, [1])(true, predicted, weights)) == pytest.approx(1 / 2, rel=1e-5)
    assert float(metrics.IoU(3, [0], ignore_class=2)(true, predicted)) == pytest.approx(1 / 2, rel=1e-5)
    assert float(metrics.BinaryIoU([1], 0.3)(np.array([[1, 0], [1, 1]]), np.array([[0.3, 0.4], [0.2, 0.9]]))) == (
        pytest.approx(2 / 4, rel=1e-5)
    )
    assert float(metrics.OneHotMeanIoU(3)(TRUE, FOUND)) == pytest.approx((1 / 2 + 1 / 2 + 1) / 3, rel=1e-5)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        # Above 0.5 are one of two positives and none of three negatives, above 0.3 both and one.
        (lambda **o: metrics.SensitivityAtSpecificity(0.9, **o), 0.5),
        (lambda **o: metrics.SensitivityAtSpecificity(0.6, **o), 1.0),
        (lambda **o: metrics.SpecificityAtSensitivity(0.8, **o), 2 / 3),
        (lambda **o: metrics.SpecificityAtSensitivity(0.5, **o), 1.0),
        (lambda **o: metrics.PrecisionAtRecall(0.8, **o), 2 / 3),
        (lambda **o: metrics.RecallAtPrecision(0.6, **o), 1.0),
        (lambda **o: metrics.RecallAtPrecision(1.0, **o), 0.5),
        (lambda **o: metrics.RecallAtPrecision(1.0, num_thresholds=1, **o), 0.5),
    ],
)
def test_rates_at_rates_by_hand(make, expected):
    true, actual = np.array([0, 0, 0, 1, 1]), np.array([0.0, 0.2, 0.45, 0.4, 0.8])
    metric = make(name="m")
    metric.update_state(true[:2], actual[:2])
    assert float(metric(true[2:], actual[2:])) == pytest.approx(expected)
    restored = metrics.deserialize(metrics.serialize(metric))
    assert restored._get_config() == metric._get_config()
    assert float(restored(true, actual)) == pytest.approx(expected)
    weighted = make()
    weighted.update_state(true, actual, np.array([1, 1, 0, 1, 1.0]))  # nothing negative is above 0.3
    assert float(weighted.result()) == (0.5 if metric.num_thresholds == 1 else 1)
    weighted.reset_state()
    assert float(weighted.result()) == 0


def test_correlations_by_hand():
    true, predicted = np.array([[1.0, 2, 3], [1, 2, 3]]), np.array([[2.0, 4, 6], [3, 2, 1]])
    assert metrics.pearson_correlation(true, predicted).numpy() == pytest.approx([1, -1])
    # Covariance 4/3, variances 2/3 and 8/3, means 2 apart.
    assert metrics.concordance_correlation(true, predicted).numpy() == pytest.approx([8 / 22, -1], abs=1e-6)
    assert float(metrics.PearsonCorrelation()(true, predicted)) == pytest.approx(0, abs=1e-6)


def test_they_are_logged():
    model = dp.Sequential([dp.Input((3,)), dp.layers.Dense(3, "softmax")])
    measured = [metrics.F1Score(average="macro"), metrics.R2Score(), metrics.OneHotMeanIoU(3)]
    model.compile("sgd", dp.losses.Dice(axis=-1), metrics=measured)
    history = model.fit(FOUND, TRUE, epochs=2, batch_size=3, verbose=0).history
    assert list(history) == ["loss", "f1_score", "r2_score", "one_hot_mean_io_u"]
    evaluated = model.evaluate(FOUND, TRUE, verbose=0, return_dict=True)
    predicted = model.predict(FOUND, verbose=0)
    metric = metrics.R2Score()(TRUE, predicted)
    assert evaluated["r2_score"] == pytest.approx(float(metric), rel=1e-5)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: metrics.FBetaScore(average="mean"), "Invalid `average` argument value"),
        (lambda: metrics.FBetaScore(beta=1), "Invalid `beta` argument value"),
        (lambda: metrics.F1Score(threshold=0.0), "Invalid `threshold` argument value"),
        (lambda: metrics.F1Score()(TRUE[:, 0], FOUND[:, 0]), "FBetaScore|F1Score expects 2D inputs"),
        (lambda: metrics.F1Score().result(), "no result before the first batch"),
        (lambda: metrics.R2Score("mean"), "Invalid value for argument `class_aggregation`"),
        (lambda: metrics.R2Score(num_regressors=-1), "Invalid value for argument `num_regressors`"),
        (
            lambda: metrics.PrecisionAtRecall(1.5),
            r"Argument `recall` must be in the range \[0, 1\]. Received: recall=1.5",
        ),
        (lambda: metrics.RecallAtPrecision(0.5, 0), "Argument `num_thresholds` must be an integer > 0"),
        (lambda: metrics.IoU(3, [3]), r"Target class id 3 is out of range, which is \[0, 3\)"),
    ],
)
def test_refusals(build, message):
    with pytest.raises(ConfigError, match=message):
        build()
