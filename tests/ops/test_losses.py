"""The ops of losses and metrics of every backend against NumPy float64, written here in the plainest way."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dptrain.backend.base import EPSILON, POINTWISE, Backend, RowSum
from tests.ops.conftest import poisoned
from tests.ops.test_ops import SEEDS, SIZES, draw, relaxed
from tests.tolerances import assert_near

NO = st.sampled_from([None, 0, 2, -1])


def put(ops: Backend, host: np.ndarray) -> tuple[object, np.ndarray]:
    """Return an array on the device in the backend's dtype, and the same numbers in float64."""
    kept = host.astype(ops.dtype)
    buffer = ops.empty(kept.shape)
    ops.write(buffer, kept)
    return buffer, kept.astype(np.float64)


def weights_of(ops: Backend, seed: int, B: int) -> tuple[object, np.ndarray]:
    """Return weights, some of them 0, or none at all."""
    rng = np.random.default_rng(seed + 9)
    if seed % 3 == 0:
        return None, np.ones(B)
    return put(ops, np.where(rng.random(B) < 0.2, 0, rng.random(B) * 3))


def log_softmax(x: np.ndarray) -> np.ndarray:
    shifted = x - x.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def labels_of(seed: int, B: int, C: int, ignored: int | None) -> np.ndarray:
    labels = np.random.default_rng(seed).integers(0, C, B)
    return labels if ignored is None else np.where(np.random.default_rng(seed + 1).random(B) < 0.3, ignored, labels)


@relaxed
@given(B=SIZES, C=SIZES, seed=SEEDS, spread=st.sampled_from([1.0, 100.0]), ignored=NO)
def test_softmax_cross_entropy(ops, B, C, seed, spread, ignored):
    logits, logits64 = put(ops, np.random.default_rng(seed).standard_normal((B, C)) * spread)
    weights, weights64 = weights_of(ops, seed, B)
    labels = labels_of(seed, B, C, ignored)
    dlogits, values, correct = poisoned(ops, (B, C)), poisoned(ops, (B,)), poisoned(ops, (B,))
    ops.softmax_cross_entropy(logits, ops.upload(labels), weights, ignored, dlogits, values, correct)
    onehot = labels[:, None] == np.arange(C)
    kept = np.ones(B, bool) if ignored is None else labels != ignored
    expected = kept * -(log_softmax(logits64) * onehot).sum(-1)
    gradient = (kept * weights64)[:, None] * (np.exp(log_softmax(logits64)) - onehot)
    assert_near(ops.download(values), expected, ops.dtype, scale=spread)
    assert_near(ops.download(dlogits), gradient, ops.dtype, scale=3)
    assert ops.download(correct).tolist() == (logits64.argmax(-1) == labels).tolist()

    alone = poisoned(ops, (B,))
    ops.softmax_cross_entropy(logits, ops.upload(labels), weights, ignored, None, alone, None)
    assert ops.download(alone).tobytes() == ops.download(values).tobytes()
    ops.softmax_cross_entropy(logits, ops.upload(labels), weights, ignored, logits, values, None)
    assert ops.download(logits).tobytes() == ops.download(dlogits).tobytes(), "the gradient in the logits' place"


@relaxed
@given(B=SIZES, C=SIZES, seed=SEEDS, special=st.sampled_from([[], [np.nan], [np.inf], [np.nan, np.inf, -np.inf]]))
def test_the_cross_entropy_counts_as_highest_at_label(ops, B, C, seed, special):
    """With many equal logits, and with some that are no numbers; and counting changes neither loss nor gradient."""
    rng = np.random.default_rng(seed)
    scores = rng.integers(-1, 2, (B, C)).astype(ops.dtype)
    if special:
        scores = np.where(rng.random((B, C)) < 1 / C, rng.choice(special, (B, C)), scores).astype(ops.dtype)
    labels = np.where(rng.random(B) < 0.5, scores.argmax(-1), rng.integers(0, C, B))
    logits, device_labels = ops.empty((B, C)), ops.upload(labels)
    ops.write(logits, scores)
    found = []
    for counts in (True, False):
        dlogits, values, correct = poisoned(ops, (B, C)), poisoned(ops, (B,)), poisoned(ops, (B,))
        ops.softmax_cross_entropy(logits, device_labels, None, None, dlogits, values, correct if counts else None)
        if not counts:
            ops.top1_correct(logits, device_labels, correct)
        assert ops.download(correct).tolist() == (scores.argmax(-1) == labels).tolist()
        found.append((ops.download(dlogits).tobytes(), ops.download(values).tobytes()))
    places = poisoned(ops, (B,), np.int64)
    ops.highest(logits, places)
    assert found[0] == found[1]
    assert ops.download(places).tolist() == scores.argmax(-1).tolist()


def test_what_is_ignored_may_be_no_number(ops):
    logits, _ = put(ops, np.array([[np.nan, np.inf, 1.0], [0.0, 0.0, 0.0]]))
    labels = ops.upload(np.array([99, 1]))
    for given_by in ("logits", "probabilities"):
        dy, values = poisoned(ops, (2, 3)), poisoned(ops, (2,))
        if given_by == "logits":
            ops.softmax_cross_entropy(logits, labels, None, 99, dy, values, None)
        else:
            ops.write(logits, np.array([[np.nan, np.inf, 1.0], [1.0, 1.0, 1.0]], ops.dtype))
            ops.probability_cross_entropy(logits, labels, 1.0, 0.0, 99, None, dy, values)
        assert_near(ops.download(values), [0, np.log(3)], ops.dtype)
        assert not ops.download(dy)[0].any()
        assert ops.download(dy)[1].all()


def test_a_logit_may_be_minus_infinity_where_the_label_is_not(ops):
    logits, _ = put(ops, np.array([[-np.inf, 0.0, 0.0]]))
    dlogits, values = poisoned(ops, (1, 3)), poisoned(ops, (1,))
    ops.softmax_cross_entropy(logits, ops.upload(np.array([1])), None, None, dlogits, values, None)
    assert_near(ops.download(values), [np.log(2)], ops.dtype)
    assert_near(ops.download(dlogits), [[0, -0.5, 0.5]], ops.dtype)


@relaxed
@given(B=SIZES, C=SIZES, seed=SEEDS, spread=st.sampled_from([1.0, 100.0]), smooth=st.sampled_from([0.0, 0.1, 1.0]))
def test_dense_cross_entropy(ops, B, C, seed, spread, smooth):
    rng = np.random.default_rng(seed)
    logits, logits64 = put(ops, rng.standard_normal((B, C)) * spread)
    target, target64 = put(ops, rng.random((B, C)))
    weights, weights64 = weights_of(ops, seed, B)
    t64 = (1 - smooth) * target64 + smooth / C
    log_p = log_softmax(logits64)
    gradient = weights64[:, None] * (np.exp(log_p) * t64.sum(-1, keepdims=True) - t64)
    dlogits, values = poisoned(ops, (B, C)), poisoned(ops, (B,))
    for given_gradient in (dlogits, None, logits):
        ops.dense_cross_entropy(logits, target, 1 - smooth, smooth / C, weights, given_gradient, values)
        assert_near(ops.download(values), -(t64 * log_p).sum(-1), ops.dtype, scale=C * spread)
        if given_gradient is not None:
            assert_near(ops.download(given_gradient), gradient, ops.dtype, scale=C)


def probability_reference(y: np.ndarray, t: np.ndarray, dtype) -> tuple[np.ndarray, np.ndarray]:
    """Values and gradients of Keras' clipped cross-entropy."""
    low, high = float(dtype.type(EPSILON)), float(dtype.type(1 - EPSILON))
    total = y.sum(-1, keepdims=True)
    p = y / total
    g = np.where((p >= low) & (p <= high), -t / np.clip(p, low, high), 0)
    return -(t * np.log(np.clip(p, low, high))).sum(-1), (g - (g * p).sum(-1, keepdims=True)) / total


@relaxed
@given(B=SIZES, C=SIZES, seed=SEEDS, ignored=NO, smooth=st.sampled_from([0.0, 0.1]), sparse=st.booleans())
def test_probability_cross_entropy(ops, B, C, seed, ignored, smooth, sparse):
    rng = np.random.default_rng(seed)
    # Sums of rows that are not 1; some outputs are 0, and one class may have it all.
    y, y64 = put(ops, rng.random((B, C)) * np.where(rng.random((B, C)) < 0.2, 0, 2) + (np.arange(C) == 0) * 0.1)
    weights, weights64 = weights_of(ops, seed, B)
    labels = labels_of(seed, B, C, ignored)
    t64, kept = (labels[:, None] == np.arange(C)) * 1.0, np.ones(B)
    if sparse:
        target = ops.upload(labels)
        kept = kept if ignored is None else labels != ignored
    else:
        ignored = None
        target, t64 = put(ops, rng.random((B, C)))
        t64 = t64 * (1 - smooth) + smooth / C
    expected, gradient = probability_reference(y64, t64, ops.dtype)
    gradient *= (kept * weights64)[:, None]
    dy, values = poisoned(ops, (B, C)), poisoned(ops, (B,))
    for given_gradient in (dy, None, y):
        ops.probability_cross_entropy(y, target, 1 - smooth, smooth / C, ignored, weights, given_gradient, values)
        assert_near(ops.download(values), kept * expected, ops.dtype, scale=C)
        if given_gradient is not None:
            # p near 1 cancels: its clipping and 1 / p bring the rounding of p alone.
            assert_near(ops.download(given_gradient), gradient, ops.dtype, scale=10 * (1 + np.abs(gradient).max()))


def pointwise_reference(kind: str, y: np.ndarray, t: np.ndarray, parameter: float, dtype):
    e = y - t
    low, high = float(dtype.type(EPSILON)), float(dtype.type(1 - EPSILON))
    p = np.clip(y, low, high)
    inside = (y >= low) & (y <= high)
    none = np.zeros_like(y)
    with np.errstate(over="ignore"):
        return {
            "squared": (e**2, 2 * e),
            "absolute": (np.abs(e), np.sign(e)),
            "huber": (
                np.where(np.abs(e) <= parameter, e**2 / 2, parameter * np.abs(e) - parameter**2 / 2),
                np.clip(e, -parameter, parameter),
            ),
            "binary": (-t * np.log(p) - (1 - t) * np.log(1 - p), inside * (p - t) / (p * (1 - p))),
            "binary_logits": (np.logaddexp(0, y) - y * t, 1 / (1 + np.exp(-y)) - t),
            "equal": (1.0 * (y == t), none),
            "same_side": (1.0 * ((y > parameter) == t), none),
        }[kind]


@relaxed
@given(B=SIZES, F=SIZES, seed=SEEDS, parameter=st.sampled_from([0.25, 1.0]), smooth=st.sampled_from([0.0, 0.25]))
@pytest.mark.parametrize("kind", POINTWISE)
def test_pointwise_loss(ops, kind, B, F, seed, parameter, smooth):
    rng = np.random.default_rng(seed)
    if kind == "binary":
        y, y64 = put(ops, np.clip(rng.random((B, F)) * 1.2 - 0.1, 0, 1))
    else:
        y, y64 = put(ops, np.round(rng.standard_normal((B, F)), 1) * (20 if kind == "binary_logits" else 1))
    binary = kind in ("binary", "binary_logits", "same_side")
    target, target64 = put(ops, rng.integers(0, 2, (B, F)) if binary else np.round(rng.standard_normal((B, F)), 1))
    if kind == "same_side":
        smooth = 0.0
    weights, weights64 = weights_of(ops, seed, B)
    keep, shift = 1 - smooth, smooth / 2
    t64 = (ops.dtype.type(keep) * target64.astype(ops.dtype) + ops.dtype.type(shift)).astype(np.float64)
    expected, gradient = pointwise_reference(kind, y64, t64, parameter, ops.dtype)
    gradient = gradient * weights64[:, None] / F
    dy, values = poisoned(ops, (B, F)), poisoned(ops, (B,))
    for given_gradient in (dy, None, y) if kind not in ("equal", "same_side") else (None,):
        ops.pointwise_loss(kind, parameter, y, target, keep, shift, weights, given_gradient, values)
        assert_near(ops.download(values), expected.mean(-1), ops.dtype, scale=20)
        if given_gradient is not None:
            assert_near(ops.download(given_gradient), gradient, ops.dtype, scale=10)


@pytest.mark.parametrize("kind", ["squared", "absolute", "huber", "binary", "binary_logits"])
def test_not_a_number_is_seen_in_loss_and_gradient(ops, kind):
    y, _ = put(ops, np.array([[np.nan, 0.5]]))
    target, _ = put(ops, np.zeros((1, 2)))
    dy, values = ops.zeros((1, 2)), ops.zeros((1,))
    ops.pointwise_loss(kind, 1.0, y, target, 1.0, 0.0, None, dy, values)
    assert np.isnan(ops.download(values)).all()
    if kind != "binary":  # whose clipping passes no gradient, as by Keras
        assert np.isnan(ops.download(dy)[0, 0])


def test_logits_that_would_overflow(ops):
    y, _ = put(ops, np.array([[-1e4, 1e4, -100.0, 100.0]]))
    target, _ = put(ops, np.array([[0.0, 1.0, 1.0, 0.0]]))
    dy, values = poisoned(ops, (1, 4)), poisoned(ops, (1,))
    ops.pointwise_loss("binary_logits", 0.0, y, target, 1.0, 0.0, None, dy, values)
    assert_near(ops.download(values), [50], ops.dtype)
    assert_near(ops.download(dy), [[0, 0, -0.25, 0.25]], ops.dtype)


def test_the_highest_is_the_first_of_equals(ops):
    scores, _ = put(ops, np.array([[1, 2, 2], [3, 1, 2], [0, 0, 0], [1, 2, 5]]))
    values, places = poisoned(ops, (4,)), poisoned(ops, (4,), np.int64)
    ops.top1_correct(scores, ops.upload(np.array([1, 1, 0, 2])), values)
    ops.highest(scores, places)
    assert ops.download(values).tolist() == [1, 0, 1, 1]
    assert ops.download(places).tolist() == [1, 0, 0, 2]


@relaxed
@given(B=SIZES, C=SIZES, k=st.sampled_from([1, 2, 5, 40]), seed=SEEDS)
def test_label_in_top(ops, B, C, k, seed):
    rng = np.random.default_rng(seed)
    scores, scores64 = put(ops, rng.integers(-5, 5, (B, C)))
    labels = rng.integers(-1, C + 1, B)
    values = poisoned(ops, (B,))
    ops.label_in_top(scores, ops.upload(labels), k, values)
    expected = [0 <= label < C and (row > row[label]).sum() < k for row, label in zip(scores64, labels, strict=True)]
    assert ops.download(values).tolist() == expected


def test_what_is_no_number_is_above_all_and_in_no_top(ops):
    scores, _ = put(ops, np.array([[np.nan, 1.0, 0.0], [np.nan, 1.0, 0.0], [np.nan, 1.0, 0.0]]))
    for k, expected in ((1, [0, 0, 0]), (2, [0, 1, 0]), (3, [0, 1, 1])):
        values = poisoned(ops, (3,))
        ops.label_in_top(scores, ops.upload(np.array([0, 1, 2])), k, values)
        assert ops.download(values).tolist() == expected


@relaxed
@given(B=SIZES, F=SIZES, seed=SEEDS, threshold=st.sampled_from([0.0, 0.5, 0.9]))
def test_confusion(ops, B, F, seed, threshold):
    rng = np.random.default_rng(seed)
    y, y64 = put(ops, np.round(rng.random((B, F)), 1))
    target, target64 = put(ops, rng.integers(0, 3, (B, F)))
    counts = [poisoned(ops, (B,)) for _ in range(3)]
    ops.confusion(y, target, threshold, *counts)
    above, wanted = y64 > ops.dtype.type(threshold), target64 != 0
    expected = [(above & wanted).sum(1), (above & ~wanted).sum(1), (~above & wanted).sum(1)]
    assert [ops.download(one).tolist() for one in counts] == [one.tolist() for one in expected]


@relaxed
@given(B=SIZES, seed=SEEDS)
def test_labels_other_than(ops, B, seed):
    labels = np.random.default_rng(seed).integers(-1, 2, B)
    values = poisoned(ops, (B,))
    ops.labels_other_than(ops.upload(labels), -1, values)
    assert ops.download(values).tolist() == (labels != -1).tolist()


@relaxed
@given(B=st.sampled_from([1, 2, 31, 255, 256, 257, 1000]), seed=SEEDS, number=st.integers(1, 3))
def test_sum_rows(ops, B, seed, number):
    """One to three arrays at once, with and without weights, some sums of weights not asked for."""
    rng = np.random.default_rng(seed)
    sums, expected = [], []
    totals = ops.empty((2 * number,))
    ops.write(totals, np.arange(2 * number).astype(ops.dtype))
    for one in range(number):
        values, values64 = draw(ops, seed + one, B)
        weights, weights64 = put(ops, rng.random(B)) if rng.random() < 0.6 else (None, np.ones(B))
        wanted = rng.random() < 0.6
        total, weight = totals[2 * one : 2 * one + 1], totals[2 * one + 1 : 2 * one + 2]
        sums.append(RowSum(values, weights, total, weight if wanted else None))
        expected += [2 * one + (values64 * weights64).sum(), 2 * one + 1 + wanted * weights64.sum()]
    ops.sum_rows(*sums)
    assert_near(ops.download(totals), expected, ops.dtype, scale=8)


@pytest.mark.parametrize(
    ("tail", "added", "divisor"),
    [
        ([32, 32, 5.1, 7, 8], [32, 5.1, 7, 8], 32),
        ([10, 32, 5, 7, 8], [32, 16, 7, 8], 10),
        ([0, 32, 5, 7, 8], [32, 160, 7, 8], 1),
        ([0, 0, 0, 0, 0], [0, 0, 0, 0], 1),
    ],
)
def test_add_totals(ops, tail, added, divisor):
    device, host = put(ops, np.array(tail))
    totals = ops.zeros((5,), np.float64)
    ops.fill(totals, 2.0**30)
    ops.add_totals(device, totals)
    ops.add_totals(device, totals)
    if tail[1] == tail[0]:
        added = host[1:]
    assert ops.download(device).tolist() == [divisor, *host[1:]]
    assert_near(ops.download(totals), 2.0**30 + 2 * np.array([0, *added]), "float64")


def test_add_totals_of_many_states(ops):
    tail, tail64 = draw(ops, 1, 1000)
    totals = ops.zeros((1000,), np.float64)
    ops.add_totals(tail, totals)
    assert np.array_equal(ops.download(totals)[3:], tail64[3:])


def test_sums_over_other_rows_are_refused(ops):
    if ops.name != "cuda":
        pytest.skip("one launch sums two arrays on CUDA alone")
    total = ops.zeros((1,))
    with pytest.raises(ValueError, match="different numbers of rows"):
        ops.sum_rows(RowSum(ops.zeros((2,)), None, total), RowSum(ops.zeros((3,)), None, total))
