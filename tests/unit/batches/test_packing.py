"""Packed sequences: each is there once and whole, and a language model computes of it what it computes of it alone."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dptrain as keras
from dptrain import layers, ops
from dptrain.errors import ConfigError
from dptrain.utils import PackedSequences, pack_sequences
from tests.unit.program.virtual_ranks import assert_step_is_the_same_on_ranks

LENGTHS = [5, 1, 8, 3, 2, 7, 1, 4, 8, 6]


def sequences(lengths=LENGTHS, seed=0):
    generator = np.random.default_rng(seed)
    return [generator.integers(1, 11, length) for length in lengths]


@given(st.lists(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=6), max_size=12), st.integers(6, 9))
def test_each_sequence_is_there_once_and_whole(given_sequences, length):
    packed = pack_sequences(given_sequences, length, pad_id=-7)
    assert all(array.shape == (len(packed.tokens), length) and array.dtype == np.int32 for array in packed)
    found = []
    for tokens, segments, positions in zip(*packed, strict=True):
        last = segments.max()
        assert last >= 1
        begin = 0
        for segment in range(1, last + 1):
            (members,) = np.nonzero(segments == segment)
            assert list(members) == list(range(begin, begin + len(members)))
            assert list(positions[members]) == list(range(len(members)))
            found.append(list(tokens[members]))
            begin += len(members)
        assert (segments[begin:] == 0).all()
        assert (positions[begin:] == 0).all()
        assert (tokens[begin:] == -7).all()
    assert sorted(found) == sorted(sequence for sequence in given_sequences if sequence)
    tokens = sum(map(len, given_sequences))
    # No two rows fit into one, so any two of them hold more than a row.
    assert len(packed.tokens) <= max(1, math.ceil(2 * tokens / length)) if tokens else not len(packed.tokens)


@pytest.mark.parametrize(
    ("lengths", "room", "rows"),
    [([4, 4, 4, 4], 8, 2), ([8, 8], 8, 2), ([5, 3, 6, 2, 7, 1], 8, 3), ([5, 5, 5], 8, 3), ([1] * 17, 8, 3), ([], 8, 0),
     ([0, 0], 8, 0)],
)  # fmt: skip
def test_rows_are_filled(lengths, room, rows):
    assert len(pack_sequences(sequences(lengths), room).tokens) == rows


def test_sequences_of_one_length_keep_their_order():
    packed = pack_sequences([[1, 1], [2, 2], [3, 3], [4, 4]], 4)
    assert packed.tokens.tolist() == [[1, 1, 2, 2], [3, 3, 4, 4]]


def test_targets_are_the_next_tokens_of_the_same_sequence():
    targets, weights = pack_sequences([[5, 6, 7], [8, 9], [4]], 8, pad_id=3).next_tokens()
    assert targets.tolist() == [[6, 7, 7, 9, 9, 4, 3, 3]]
    assert weights.tolist() == [[1, 1, 0, 1, 0, 0, 0, 0]]
    assert (targets.dtype, weights.dtype) == (np.int32, np.float32)


@pytest.mark.parametrize(
    ("given_sequences", "length", "message"),
    [
        ([[1]], 0, "length = 0: expected an integer >= 1"),
        ([[1]], True, "length = True: expected an integer >= 1"),
        ([[1], [1, 2, 3]], 2, "sequence 1 has 3 tokens, a row 2: cut it, or choose a greater length"),
        ([[1], [0.5]], 2, r"sequence 1 is float64 of shape \(1,\): expected token ids, integers of shape \(tokens,\)"),
        ([[[1]]], 2, r"sequence 0 is int64 of shape \(1, 1\)"),
        ([[2**31]], 2, "sequence 0 has token ids beyond 32 bits"),
    ],
)
def test_what_cannot_be_packed_is_said(given_sequences, length, message):
    with pytest.raises(ConfigError, match=message):
        pack_sequences(given_sequences, length)


def language_model():
    """Return a model from tokens, segments and positions, (rows, length) each, to scores of the next tokens."""
    tokens, segments, positions = (keras.Input((None,), dtype="int32") for _ in range(3))
    x = layers.Embedding(12, 8)(tokens) + layers.Embedding(16, 8)(positions)
    mask = ops.equal(ops.expand_dims(segments, 2), ops.expand_dims(segments, 1))
    for _ in range(2):
        y = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(2, 4)(y, y, attention_mask=mask, use_causal_mask=True)
        x = x + layers.Dense(8, "gelu")(layers.LayerNormalization()(x))
    model = keras.Model([tokens, segments, positions], layers.Dense(12)(x), seed=3)
    # Sums, so that rows of other numbers of sequences count the same.
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
    model.compile(keras.optimizers.SGD(0.01), loss, dtype="float64")
    return model


def alone(each):
    packed = pack_sequences([each], len(each))
    return list(packed), *packed.next_tokens()


def test_scores_of_packed_sequences_are_those_of_each_alone():
    model, given_sequences = language_model(), sequences()
    packed = pack_sequences(given_sequences, 8)
    scores = model.predict(list(packed), verbose=0)
    expected = {tuple(each): model.predict(alone(each)[0], verbose=0)[0] for each in given_sequences}
    count = 0
    for row, segments in enumerate(packed.segment_ids):
        for segment in range(1, segments.max() + 1):
            members = segments == segment
            np.testing.assert_allclose(
                scores[row, members], expected[tuple(packed.tokens[row, members])], rtol=0, atol=1e-12
            )
            count += 1
    assert count == len(given_sequences)


def unpacked(given_sequences):
    """Return rows of a sequence each, padded at their ends."""
    rows = [pack_sequences([each], 8) for each in given_sequences]
    return PackedSequences(*(np.concatenate(arrays) for arrays in zip(*rows, strict=True)))


def test_a_step_of_packed_sequences_is_that_of_all_alone():
    batches, results = (pack_sequences(sequences(), 8), unpacked(sequences())), []
    assert len(batches[0].tokens) < len(batches[1].tokens)
    for batch in batches:
        model = language_model()
        targets, weights = batch.next_tokens()
        model.fit(list(batch), targets, sample_weight=weights, batch_size=len(targets), verbose=0)
        results.append(model.get_weights())
    initial = language_model().get_weights()
    for weight, other in zip(*results, strict=True):
        np.testing.assert_allclose(weight, other, rtol=0, atol=1e-12)
    assert max(np.abs(weight - before).max() for weight, before in zip(results[0], initial, strict=True)) > 1e-3


@pytest.mark.parametrize("shards", [[3, 3], [4, 0, 2]])
def test_ranks_share_the_rows(shards):
    packed = pack_sequences(sequences(), 8)
    assert len(packed.tokens) == 6
    model = language_model()
    assert_step_is_the_same_on_ranks(model._make_step("train"), (list(packed), *packed.next_tokens()), shards)
