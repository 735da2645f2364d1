"""Masks as functions of weights."""

import numpy as np
import pytest

from dptrain.pruning import masks

W = np.array([[3.0, -1.0, 2.0, -4.0], [0.5, 6.0, -2.0, 1.0]])


def shown(mask):
    return np.asarray(mask).astype(int).tolist()


def test_the_largest_stay_and_of_equal_ones_the_first():
    assert shown(masks.largest(np.array([1.0, 2.0, 2.0, 2.0, 5.0]), 3)) == [0, 1, 1, 0, 1]
    assert shown(masks.largest(np.zeros(4), 2)) == [1, 1, 0, 0]
    assert [np.count_nonzero(masks.largest(np.arange(3.0), count)) for count in (-1, 0, 1, 2, 3, 4)] == [
        0,
        0,
        1,
        2,
        3,
        3,
    ]


@pytest.mark.parametrize("seed", range(5))
def test_against_sorting(seed):
    rng = np.random.default_rng(seed)
    scores, count = rng.integers(0, 4, 50).astype(float), int(rng.integers(0, 51))
    expected = np.zeros(50, int)
    expected[sorted(range(50), key=lambda place: (-scores[place], place))[:count]] = 1
    assert shown(masks.largest(scores, count)) == expected.tolist()


def test_one_stays_at_least():
    assert shown(masks.magnitude_mask(np.array([1.0, 3.0, 2.0]), 0.99)) == [0, 1, 0]
    assert shown(masks.magnitude_mask(np.arange(10.0), 0.75)) == [0] * 8 + [1, 1]  # 2.5 is rounded to even
    assert masks.magnitude_mask(np.arange(10.0), 0.0).all()


def test_blocks():
    assert masks.pooled(W, (1, 1)).tolist() == np.abs(W).reshape(-1).tolist()
    assert masks.pooled(W, (2, 2)).tolist() == [10.5 / 4, 9 / 4]
    assert masks.pooled(W, (2, 2), "MAX").tolist() == [6, 4]
    assert masks.pooled(W, (1, 3)).tolist() == pytest.approx([2, 4, 8.5 / 3, 1])  # smaller ones at the ends
    assert shown(masks.spread(np.array([True, False, False, True]), W.shape, (1, 3))) == [[1, 1, 1, 0], [0, 0, 0, 1]]
    kernel = np.arange(24.0).reshape(2, 3, 4)  # of a convolution: rows are places and channels
    assert masks.pooled(kernel, (6, 2)).size == 2
    assert masks.spread(np.array([True, False]), kernel.shape, (6, 2))[1, 2].tolist() == [True, True, False, False]


def test_two_of_four_along_the_inputs():
    weight = np.array(
        [[1.0, 5.0], [-2.0, 5.0], [3.0, -5.0], [-4.0, 5.0], [0.0, 1.0], [1.0, 2.0], [0.0, 3.0], [0.0, 4.0]]
    )
    assert shown(masks.m_by_n(weight, 2, 4)) == [[0, 1], [0, 1], [1, 0], [1, 0], [1, 0], [1, 0], [0, 1], [0, 1]]
    kernel = np.random.default_rng(0).normal(size=(3, 3, 8, 5))
    mask = masks.m_by_n(kernel, 1, 4)
    assert (mask.reshape(9, 2, 4, 5).sum(2) == 3).all()


def test_regrowth_by_gradients():
    scores, growth = np.array([5.0, 4.0, 3.0, 0.0, 0.0, 0.0]), np.array([0.0, 9.0, 0.0, 1.0, 2.0, 3.0])
    stayed = np.array([1, 1, 1, 0, 0, 0], bool)
    assert shown(masks.regrown(scores, 0.5, stayed, growth, 0.3)) == [1, 1, 0, 0, 0, 1]  # one of three
    assert shown(masks.regrown(scores, 0.5, stayed, growth, 0.7)) == [1, 1, 0, 0, 0, 1]  # what has gone may come back
    assert shown(masks.regrown(scores, 0.5, stayed, growth, 0.0)) == [1, 1, 1, 0, 0, 0]
    assert shown(masks.regrown(scores, 0.5, np.ones(6, bool), growth, 0.3)) == [1, 1, 1, 0, 0, 0]
