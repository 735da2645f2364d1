"""News of 46 topics as numbers of words: Reuters-21578; under Keras' name."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dptrain.data import keras_sets
from dptrain.errors import ConfigError
from dptrain.registry.arguments import checked_arguments
from dptrain.registry.names import not_there

__all__ = ["get_label_names", "get_word_index", "load_data"]

if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = not_there("datasets.reuters", __all__)

_LABELS = (
    "cocoa grain veg-oil earn acq wheat copper housing money-supply coffee sugar trade reserves ship cotton carcass "
    "crude nat-gas cpi money-fx interest gnp meal-feed alum oilseed gold tin strategic-metal livestock retail ipi "
    "iron-steel rubber heat jobs lei bop zinc orange pet-chem dlr gas silver wpi hog lead"
)


@checked_arguments
def load_data(
    path: str | Path = "reuters.npz",
    num_words: int | None = None,
    skip_top: int = 0,
    maxlen: int | None = None,
    test_split: float = 0.2,
    seed: int = 113,
    start_char: int | None = 1,
    oov_char: int | None = 2,
    index_from: int = 3,
) -> keras_sets.Split:
    """Return `(x_train, y_train), (x_test, y_test)`: lists of word numbers, by falling frequency, and topics 0 to 45.

    `test_split` is the fraction for tests; without a `start_char`, an `index_from` of 0 adds nothing. For other
    arguments and errors see `imdb.load_data`.
    """
    checksum = "d6586e694ee56d7a4e65172e12b3e987c03096cb01eab99753921ef915959916"
    arrays = keras_sets.on_all_ranks(lambda: keras_sets.arrays(keras_sets.cached(path, "reuters.npz", checksum)))
    texts, labels = keras_sets.shuffled(seed, arrays["x"], arrays["y"])
    numbered, kept_labels = keras_sets.numbered_texts(
        texts, labels, start_char=start_char, index_from=index_from, maxlen=maxlen
    )
    if not numbered:
        raise ConfigError(
            f"After filtering for sequences shorter than maxlen={maxlen}, no sequence was kept. Increase maxlen."
        )
    limited = keras_sets.limit_vocabulary(numbered, num_words=num_words, skip_top=skip_top, oov_char=oov_char)
    end = int(len(limited) * (1 - test_split))
    y = np.array(kept_labels)
    return (keras_sets.ragged(limited[:end]), y[:end]), (keras_sets.ragged(limited[end:]), y[end:])


@checked_arguments
def get_word_index(path: str | Path = "reuters_word_index.json") -> dict[str, int]:
    """Return the number of each word, before `index_from` is added; see `imdb.get_word_index`."""
    return keras_sets.word_index(path, "reuters_word_index.json", "4d44cc38712099c9e383dc6e5f11a921")


def get_label_names() -> tuple[str, ...]:
    """Return the names of the topics, in the order of their labels."""
    return tuple(_LABELS.split())
