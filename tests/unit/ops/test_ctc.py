"""CTC: the loss against a sum over all alignments, decoding against all label sequences."""

from itertools import product

import numpy as np
import pytest

import dptrain as dp
from dptrain import losses, ops
from dptrain.errors import ConfigError

RNG = np.random.default_rng(0)
B, T, C = 3, 5, 3
SCORES = RNG.normal(size=(B, T, C))
LOGS = SCORES - np.log(np.exp(SCORES).sum(-1, keepdims=True))


def labels_of(path, blank):
    """Return what is left of a path without repetitions and blanks."""
    return tuple(label for n, label in enumerate(path) if label != blank and (n == 0 or label != path[n - 1]))


def probabilities(row, length, blank):
    """Return the probability of each label sequence, by adding up all paths."""
    sums = {}
    for path in product(range(C), repeat=length):
        labels = labels_of(path, blank)
        sums[labels] = sums.get(labels, 0) + np.exp(sum(LOGS[row, t, label] for t, label in enumerate(path)))
    return sums


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_scores_of_half_precision_have_losses_in_float32(dtype):
    wide = "float64" if dtype == "float64" else "float32"
    scores = ops.cast(SCORES, dtype)
    assert ops.ctc_loss([[1, 2]] * B, scores, [2] * B, [T] * B).dtype == wide
    assert [ops.ctc_decode(scores, [T] * B, word)[1].dtype for word in ("greedy", "beam_search")] == [wide] * 2


@pytest.mark.parametrize("blank", [0, 2])
def test_the_loss_adds_up_all_alignments(blank):
    classes = [label for label in range(C) if label != blank]
    target = np.array([[classes[0], classes[1], classes[1]], [classes[1]] * 3, [classes[0]] * 3])
    lengths, times = np.array([2, 3, 0]), np.array([5, 5, 3])
    actual = ops.ctc_loss(target, SCORES, lengths, times, mask_index=blank).numpy()
    expected = [-np.log(probabilities(row, times[row], blank)[tuple(target[row, : lengths[row]])]) for row in range(B)]
    np.testing.assert_allclose(actual, expected, rtol=1e-12)


def test_what_has_no_alignment_costs_much():
    costs = ops.ctc_loss([[1, 1, 1]], SCORES[:1], [3], [4]).numpy()
    assert costs == 1e5


@pytest.mark.parametrize("blank", [0, 2])
def test_a_wide_beam_finds_the_most_probable_labels(blank):
    labels, scores = ops.ctc_decode(
        SCORES, [5, 5, 3], strategy="beam_search", beam_width=500, top_paths=2, mask_index=blank
    )
    assert labels.shape == (2, B, T)
    assert labels.dtype == np.int32
    for row, length in enumerate((5, 5, 3)):
        best = sorted(probabilities(row, length, blank).items(), key=lambda item: -item[1])[:2]
        for number, (expected, probability) in enumerate(best):
            assert labels.numpy()[number, row].tolist() == [*expected, *[-1] * (T - len(expected))]
            np.testing.assert_allclose(scores.numpy()[row, number], np.log(probability), rtol=1e-12)


@pytest.mark.parametrize("merge", [True, False])
def test_the_greedy_path(merge):
    labels, scores = ops.ctc_decode(SCORES, [5, 4, 0], merge_repeated=merge, mask_index=None)
    for row, length in enumerate((5, 4, 0)):
        best = SCORES[row, :length].argmax(-1).tolist()
        expected = labels_of(best, C - 1) if merge else [label for label in best if label != C - 1]
        assert labels.numpy()[0, row].tolist() == [*expected, *[-1] * (T - len(expected))]
        np.testing.assert_allclose(scores.numpy()[row], [-SCORES[row, :length].max(-1).sum()], rtol=1e-12)
    with pytest.raises(ConfigError, match="Invalid strategy sampled"):
        ops.ctc_decode(SCORES, [5, 5, 5], strategy="sampled")


def test_a_model_learns_to_spell():
    dp.utils.set_random_seed(1)
    x, y = np.eye(4, dtype=np.float32)[RNG.integers(0, 4, (16, 6))], np.zeros((16, 2), np.int32)
    y[:, 0] = 1 + (x[:, 0, 1] > 0)
    model = dp.Sequential([dp.Input((6, 4)), dp.layers.Dense(8, activation="relu"), dp.layers.Dense(3)])
    model.compile(dp.optimizers.Adam(0.05), "ctc")
    history = model.fit(x, y, batch_size=8, epochs=15, verbose=0).history["loss"]
    assert history[-1] < 0.6 * history[0]
    assert isinstance(losses.get("CTC"), losses.CTC)
    for target, scores, message in ((y[:, 0], x, "Targets `y_true`"), (y, x[0], "Logits `y_pred`")):
        with pytest.raises(ConfigError, match=message):
            losses.ctc(target, scores)
