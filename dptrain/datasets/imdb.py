"""Positive and negative film reviews as numbers of words: A. L. Maas et al., 2011; under Keras' name."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dptrain.data import keras_sets
from dptrain.errors import ConfigError
from dptrain.registry.arguments import checked_arguments
from dptrain.registry.names import not_there

__all__ = ["get_word_index", "load_data"]

if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = not_there("datasets.imdb", __all__)


@checked_arguments
def load_data(
    path: str | Path = "imdb.npz",
    num_words: int | None = None,
    skip_top: int = 0,
    maxlen: int | None = None,
    seed: int = 113,
    start_char: int | None = 1,
    oov_char: int | None = 2,
    index_from: int = 3,
) -> keras_sets.Split:
    """Return `(x_train, y_train), (x_test, y_test)`: lists of word numbers, by falling frequency, and labels 0 and 1.

    Args:
        path: see `datasets`, also for errors.
        num_words: words from this number on count as unknown; None for none.
        skip_top: words below this number count as unknown, too.
        maxlen: leave out reviews of at least this length (ConfigError if none is left); None for none.
        seed: of the order of the reviews.
        start_char: begins each review; None for nothing.
        oov_char: replaces unknown words; None leaves them out.
        index_from: added to the numbers of words.
    """
    checksum = "69664113be75683a8fe16e3ed0ab59fda8886cb3cd7ada244f7d9544e4676b9f"
    arrays = keras_sets.on_all_ranks(lambda: keras_sets.arrays(keras_sets.cached(path, "imdb.npz", checksum)))
    rng = np.random.RandomState(seed)  # orders both parts, one after the other
    parts = []
    for part in ("train", "test"):
        texts, labels = arrays[f"x_{part}"], arrays[f"y_{part}"]
        order = np.arange(len(texts))
        rng.shuffle(order)
        parts.append(
            keras_sets.numbered_texts(
                texts[order], labels[order], start_char=start_char, index_from=index_from, maxlen=maxlen
            )
        )
    if not all(texts for texts, _ in parts):
        raise ConfigError(
            f"After filtering for sequences shorter than maxlen={maxlen}, no sequence was kept. Increase maxlen."
        )
    (train, y_train), (test, y_test) = parts
    limited = keras_sets.limit_vocabulary([*train, *test], num_words=num_words, skip_top=skip_top, oov_char=oov_char)
    x_train, x_test = keras_sets.ragged(limited[: len(train)]), keras_sets.ragged(limited[len(train) :])
    return (x_train, np.array(y_train)), (x_test, np.array(y_test))


@checked_arguments
def get_word_index(path: str | Path = "imdb_word_index.json") -> dict[str, int]:
    """Return the number of each word, before `index_from` is added; see `load_data`, but Keras pins the file's MD5."""
    return keras_sets.word_index(path, "imdb_word_index.json", "bfafd718b763782e994055a2d397834f")
