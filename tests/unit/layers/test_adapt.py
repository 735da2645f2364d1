"""Whatever has `adapt`: batches cut anywhere are the whole, and other data make what they make of a new layer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import dptrain as dp
from dptrain import layers as L  # noqa: N812
from tests.sample import examples

WORDS = np.array(["a", "b b", "c a", "d", "", "a b c d", "B!", "e"])


@dataclass(frozen=True)
class Adapted:
    """A layer that learns from data.

    Attributes:
        make: returns a new layer.
        draw: returns data of so many rows.
        tolerance: of numbers that a sum over batches rounds.
    """

    make: Callable[[], Any]
    draw: Callable[[np.random.Generator, int], np.ndarray]
    tolerance: float = 0.0


def _numbers(*shape):
    return lambda rng, rows: rng.normal(3, 2, (rows, *shape))


def _texts(rng, rows):
    return np.concatenate([["a b"], rng.choice(WORDS, rows - 1)])


def _tokens(*shape):
    return lambda rng, rows: rng.choice(np.array(["a", "b", "c", "d", "e"]), (rows, *shape))


def _integers(*shape):
    return lambda rng, rows: rng.integers(-3, 9, (rows, *shape))


LAYERS = {
    "Normalization": Adapted(L.Normalization, _numbers(3), 1e-6),
    "Normalization of an inner axis": Adapted(lambda: L.Normalization(1), _numbers(2, 3), 1e-6),
    "Normalization of two axes": Adapted(lambda: L.Normalization((1, 2)), _numbers(2, 3), 1e-6),
    "Normalization of all elements": Adapted(lambda: L.Normalization(None), _numbers(4), 1e-6),
    **{
        f"{name}, {mode}": Adapted(lambda make=make, mode=mode: make(output_mode=mode), draw)
        for name, make, draw in (
            ("StringLookup", L.StringLookup, _tokens(4)),
            ("IntegerLookup", L.IntegerLookup, _integers(4)),
        )
        for mode in ("int", "multi_hot", "count", "tf_idf")
    },
    **{
        f"TextVectorization, {mode}": Adapted(lambda mode=mode: L.TextVectorization(output_mode=mode, ngrams=2), _texts)
        for mode in ("int", "multi_hot", "count", "tf_idf")
    },
    "StringLookup of few": Adapted(lambda: L.StringLookup(max_tokens=4, num_oov_indices=2), _tokens(4)),
    "TextVectorization of few": Adapted(lambda: L.TextVectorization(max_tokens=5), _texts),
}


def state(layer: Any) -> list[Any]:
    """Return what a layer has learned."""
    if isinstance(layer, L.Normalization):
        return [np.asarray(layer.mean), np.asarray(layer.variance)]
    weights = getattr(layer, "idf_weights", None)
    return [layer.get_vocabulary(), [] if weights is None else np.asarray(weights, np.float64)]


def adapted(case: Adapted, data: Any, layer: Any = None) -> list[Any]:
    layer = case.make() if layer is None else layer
    layer.adapt(data)
    return state(layer)


def assert_same(mine: Sequence[Any], other: Sequence[Any], tolerance: float) -> None:
    for value, expected in zip(mine, other, strict=True):
        if isinstance(expected, np.ndarray):
            np.testing.assert_allclose(value, expected, rtol=tolerance, atol=tolerance)
        else:
            assert value == expected


def test_every_layer_that_adapts_is_here():
    classes = {kind for kind in map(vars(L).get, L.__all__) if isinstance(kind, type) and hasattr(kind, "adapt")}
    assert classes == {type(case.make()) for case in LAYERS.values()} | {L.Discretization}


@pytest.mark.parametrize("name", LAYERS)
def test_batches_cut_anywhere_are_the_whole(name):
    case = LAYERS[name]
    for seed in range(examples(8)):
        rng = np.random.default_rng(seed)
        data = case.draw(rng, 23)
        cuts = np.sort(rng.choice(np.arange(1, 23), rng.integers(1, 6), replace=False))
        expected = adapted(case, data)
        assert_same(adapted(case, iter(np.split(data, cuts))), expected, case.tolerance)
        assert_same(adapted(case, [(part, part) for part in np.split(data, cuts)]), expected, case.tolerance)
        assert_same(adapted(case, (data[row : row + 1] for row in range(23))), expected, case.tolerance)
        with_empty = np.split(data, [0, *cuts, cuts[-1], 23])
        assert_same(adapted(case, with_empty), expected, case.tolerance)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_data_of_another_size_make_what_they_make_of_a_fresh_layer(name, rows):
    case, rng = LAYERS[name], np.random.default_rng(rows)
    layer, first, second = case.make(), case.draw(rng, 17), case.draw(rng, rows)
    adapted(case, np.split(first, [5]), layer)
    assert_same(adapted(case, second, layer), adapted(case, second), 0.0)


def test_a_feature_space_adapts_to_batches_as_to_the_whole():
    rng = np.random.default_rng(0)
    features = {"number": "float_normalized", "code": "integer_categorical", "word": "string_categorical"}
    features |= {"bins": dp.utils.FeatureSpace.float_discretized(4)}

    def columns(rows):
        drawn = {"number": _numbers(), "code": _integers(), "word": _tokens(), "bins": _numbers()}
        return {name: draw(rng, rows) for name, draw in drawn.items()}

    def encoded(data, space=None):
        space = dp.utils.FeatureSpace(features) if space is None else space
        space.adapt(data)
        return np.asarray(space(shown))

    first, other, shown = columns(50), columns(9), columns(6)
    expected = encoded(first)
    for cuts in ([20], [1, 30], [0, 7, 7, 50]):
        parts = {name: np.split(column, cuts) for name, column in first.items()}
        batches = [{name: part[number] for name, part in parts.items()} for number in range(len(cuts) + 1)]
        np.testing.assert_allclose(encoded(batches), expected, rtol=1e-6, atol=1e-6)
    used = dp.utils.FeatureSpace(features)
    used.adapt(first)
    np.testing.assert_array_equal(encoded(other, used), encoded(other))


@pytest.mark.parametrize("axis", [-1, None, 1])
def test_batches_of_several_lengths_are_the_rows_of_all(axis):
    """Sequences of each batch have a length of their own: all elements count alike."""
    rng = np.random.default_rng(0)
    batches = [rng.normal(3, 2, (rows, 4, steps)) for rows, steps in ((2, 5), (6, 1), (1, 9))]
    batches = [np.moveaxis(batch, 1, 2) for batch in batches] if axis == -1 else batches
    layer = L.Normalization(axis)
    layer.adapt(batches)
    elements = [batch.reshape(-1) if axis is None else np.moveaxis(batch, axis, -1).reshape(-1, 4) for batch in batches]
    together = np.concatenate(elements)
    np.testing.assert_allclose(np.ravel(layer.mean), np.ravel(together.mean(0)), rtol=1e-6)
    np.testing.assert_allclose(np.ravel(layer.variance), np.ravel(together.var(0)), rtol=1e-6)


@pytest.mark.parametrize("make", [L.StringLookup, L.IntegerLookup, L.TextVectorization])
def test_each_element_of_one_array_is_a_document(make):
    """As each row of a table of one column is; a list is an array."""
    rng, draw = np.random.default_rng(0), _integers() if make is L.IntegerLookup else _tokens()
    data = draw(rng, 30)
    states = []
    for arrays in (data, data.tolist(), data[:, None], [data[:7, None], data[7:, None]]):
        layer = make(output_mode="tf_idf")
        layer.adapt(arrays)
        states.append(state(layer))
    for other in states[1:]:
        assert_same(other, states[0], 0.0)


def test_bins_are_filled_equally_whatever_the_batches_are():
    """Within the accuracy that `epsilon` says."""
    rng = np.random.default_rng(0)
    data = rng.normal(size=4000)
    for cuts in ([], [1], [3999], [100, 101, 2500], np.arange(1, 40) * 100):
        layer = L.Discretization(num_bins=5, epsilon=0.005)
        layer.adapt(np.split(data, cuts))
        shares = np.bincount(np.asarray(layer(data)), minlength=5) / len(data)
        np.testing.assert_allclose(shares, 0.2, atol=0.03)
        layer.adapt(data + 5)  # begins anew
        np.testing.assert_allclose(np.bincount(np.asarray(layer(data + 5)), minlength=5) / len(data), 0.2, atol=0.03)


@pytest.mark.parametrize("name", [name for name in LAYERS if "Normalization" not in name])
def test_special_tokens_among_data_are_no_tokens_of_their_own(name):
    """Those of the layer's vocabulary, whether it has the token or not: adapting leaves them out."""
    case, rng = LAYERS[name], np.random.default_rng(0)
    data = case.draw(rng, 30)
    special = [-1, 0] if "Integer" in name else ["", "[UNK]"]
    for options in ({}, {"num_oov_indices": 2}, {"mask_token": special[1] if "Integer" in name else "a"}):
        layer = case.make()
        if options and "Text" in name:
            continue
        if options:
            config = {
                key: value for key, value in layer.get_config().items() if key in ("output_mode", "num_oov_indices")
            }
            layer = type(layer)(**config | options)
        mixed = np.concatenate([data, rng.choice(special, (50, *data.shape[1:])).astype(data.dtype)])
        layer.adapt(mixed)
        tokens = layer.get_vocabulary()
        known = set(layer.get_vocabulary(include_special_tokens=False))
        assert not known & {layer.mask_token, layer.oov_token} if "Text" not in name else not known & set(special)
        repeated = [token for token in set(tokens) if tokens.count(token) > 1]
        assert set(repeated) <= {getattr(layer, "oov_token", "[UNK]")}
        again = type(layer).from_config(layer.get_config())
        assert again.get_vocabulary() == tokens
        np.testing.assert_array_equal(np.asarray(again(mixed)), np.asarray(layer(mixed)))
