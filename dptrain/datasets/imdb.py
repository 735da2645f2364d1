"""Reviews of films, praising or not, as numbers of words: A. L. Maas et al., 2011; under Keras' name."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dptrain.data import keras_sets
from dptrain.errors import ConfigError
from dptrain.registry.names import not_there

__all__ = ["get_word_index", "load_data"]

if not TYPE_CHECKING:  # for which any name would do
    __getattr__ = not_there("datasets.imdb", __all__)


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
        path: of Keras' file on this machine, or its name in `~/.keras/datasets`; nothing is downloaded.
        num_words: the number from which on words are taken for unknown; None for none but the last.
        skip_top: numbers below are taken for unknown, too.
        maxlen: reviews of this length, or longer ones, are left out; None for all.
        seed: of the order of the reviews.
        start_char: with which each review begins; None for nothing.
        oov_char: in place of unknown words; None leaves them out.
        index_from: what is added to the numbers of words.

    Raises:
        ConfigError: no review is as short as that.
        AgreedError: the file is not there, or has another SHA-256.
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


def get_word_index(path: str | Path = "imdb_word_index.json") -> dict[str, int]:
    """Return the number of each word, before `index_from` is added.

    Args:
        path: as `load_data`.

    Raises:
        AgreedError: as `load_data`; Keras pins the file's MD5.
    """
    return keras_sets.word_index(path, "imdb_word_index.json", "bfafd718b763782e994055a2d397834f")
