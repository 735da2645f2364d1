"""Batches of other lengths run the C++ of those before, with the bits of a program of their own."""

import numpy as np
import pytest

from dptrain import Input, Model, layers, ops
from dptrain.backend.cpu import compiled
from dptrain.errors import CompilerError
from tests.lengths import MODELS, drawn, model_of, results, texts, uncompiled
from tests.sample import sample

# On both sides of where a row's sum is one of 16 parts, and of widths of the models.
LENGTHS = (19, 17, 20, 31, 32, 33, 24, 40)


def compare(make, lengths):
    """Return how many texts were compiled, of all lengths and each, for which the numbers are equal."""
    with texts() as few:
        found = results(make(), lengths)
    with texts(shared=False) as many:
        expected = results(make(), lengths)
    for value, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(value, other)
    assert any(np.any(value != 0) for value in found)
    return len(few), len(many)


@pytest.mark.parametrize("name", sample(MODELS, 3, single=True))
def test_results_have_the_bits_of_programs_of_their_own(name):
    few, many = compare(lambda: model_of(name), LENGTHS)
    assert many == 3 * len(LENGTHS), "train, test and predict"
    assert few <= many / 2


@pytest.mark.parametrize("seed", sample(range(16), 8, single=True))
def test_drawn_models(seed):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(16, 70, 5)
    compare(lambda: drawn(np.random.default_rng(seed))[0], [int(n) for n in lengths])


def test_rows_longer_than_those_that_are_buffered():
    """A row of up to 1,024 elements is buffered between passes, a longer one is not."""

    def make():
        inputs = Input((None,))
        model = Model(inputs, layers.Dense(5)(ops.sum(ops.softmax(inputs * 0.01) * inputs, axis=-1, keepdims=True)))
        model.compile("adam", "sparse_categorical_crossentropy", jit_compile=True)
        model.set_weights([np.full(w.shape, 0.5, "float32") for w in model.get_weights()])
        return model

    few, many = compare(make, (1021, 1022, 1023, 1024, 1025, 1026, 1027))
    assert (few, many) == (3 * 4, 3 * 7), "two on each side"


# Texts compiled for training on 23 lengths from 9 to 97: that of the first length, and one for all others. Rows
# of keys and of steps that count are summed up by two other texts below 32, and a text may take a number for a constant
# that the first two lengths share.
TEXTS = {name: 4 for name in ("masked attention", "language model", "softmax")}
TEXTS |= {"convolutions": 3, "masked bidirectional": 5}


@pytest.mark.parametrize("name", sample(MODELS, 3, 1, single=True))
def test_lengths_share_texts(name):
    model = model_of(name)
    of_steps = len(model.output_shape) == 3
    with uncompiled(), texts() as compiled_texts:
        for length in np.random.default_rng(0).permutation(np.arange(9, 100, 4)):
            ids = np.ones((4, length), np.int64)
            model.train_on_batch(ids, np.zeros(ids.shape if of_steps else 4, np.int64))
    assert len(compiled_texts) == TEXTS.get(name, 2)


def test_an_epoch_of_many_lengths():
    """With evaluation and prediction between the epochs, as by a generator."""
    model = model_of("attention")
    with uncompiled(), texts() as compiled_texts:
        for length in (9, 30, 12, 45):
            ids, classes = np.ones((20, length), np.int64), np.zeros(20, np.int64)
            model.fit(ids, classes, batch_size=8, validation_data=(ids, classes), verbose=0)
            model.predict(ids, verbose=0)
    assert len(compiled_texts) == 6, "two for each of the steps"


def test_rows_that_a_step_asks_for_share_a_text_too():
    def make():
        inputs = Input((3,))
        model = Model(inputs, layers.Dense(5)(layers.Lambda(lambda x: x / int(x.shape[0]))(inputs)))
        model.compile("sgd", "sparse_categorical_crossentropy", jit_compile=True)
        return model

    model = make()
    with uncompiled(), texts() as compiled_texts:
        for rows in (5, 9, 11, 17):
            model.train_on_batch(np.ones((rows, 3), np.float32), np.zeros(rows, np.int64))
    assert len(compiled_texts) == 2


def test_where_a_number_must_be_a_constant_each_length_has_its_own_text(monkeypatch):
    """As if the compiler refused parameters."""
    compile_text, refused = compiled.library, []

    def library(source):
        if "dp_parameter<" in source:
            refused.append(source)
            raise CompilerError("expected a constant")
        return compile_text(source)

    monkeypatch.setattr(compiled, "library", library)
    few, many = compare(lambda: model_of("dense"), (9, 10, 11))
    assert few == many + len(refused)
    assert len(refused) == 3, "once for each of the steps"
