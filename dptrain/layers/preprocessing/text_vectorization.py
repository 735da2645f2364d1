"""Texts as numbers: split into tokens on the host, and looked up in a vocabulary."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from dptrain.data.sources import format_bytes
from dptrain.data.texts import object_array, text_array, without_width
from dptrain.data.words import PUNCTUATION
from dptrain.errors import ConfigError
from dptrain.layers.preprocessing.lookups import HostLayer, StringLookup, also_symbolic, on_host, readable_config
from dptrain.layers.preprocessing.standardization import batches_of, is_one_array
from dptrain.runtime.text import short

Array = npt.NDArray[Any]
Function = Callable[[Any], Any]
_STANDARDIZE = ("lower_and_strip_punctuation", "lower", "strip_punctuation")
_SPLIT = ("whitespace", "character")
_MODES = ("int", "one_hot", "multi_hot", "count", "tf_idf")
# ASCII letters and spaces only, like TensorFlow, on which Keras relies here.
_LOWER = {upper: upper + 32 for upper in range(ord("A"), ord("Z") + 1)}
# Padded batches, and n-grams, of more tokens than these are at most so many times as large as their texts.
_MOST_CELLS, _MOST_PADDING = 1 << 27, 64
# Texts that `adapt` splits at once.
_TEXTS_AT_ONCE = 4096
_SPACES = re.compile(r"[ \t\n\v\f\r]+")


class TextVectorization(HostLayer):
    """Texts as indices of their tokens in a vocabulary, or as vectors of these.

    Each text is standardised, split into tokens, and these are joined to n-grams. Index 0 is padding, index 1 unknown.
    It works on the host: first in a model, or on arrays before `fit`, in a generator or a `PyDataset`.

    Args:
        max_tokens: greatest size of the vocabulary, these two indices counted; None for any.
        standardize: "lower_and_strip_punctuation", "lower", "strip_punctuation", a function of an array of texts, or
            None.
        split: "whitespace", "character", a function of an array of texts that returns a list of tokens for each, or
            None for texts that are tokens.
        ngrams: join up to this number of consecutive tokens, or exactly the numbers in a tuple; None for single ones.
        output_mode: "int" (rows, tokens) int64, "multi_hot", "count" or "tf_idf" (rows, vocabulary), or "one_hot" of
            each token.
        output_sequence_length: of "int", to which rows are cut or padded; by default the longest.
        pad_to_max_tokens: make vectors as long as `max_tokens`.
        vocabulary: the tokens in order, or a file with one a line; None for `adapt` or `set_vocabulary`.
        idf_weights: of each token, for "tf_idf".
        sparse, ragged, encoding: must be False, False and "utf-8".
    """

    _takes_ids = _splits_texts = True
    _input_dtype = "U"
    _read = ("vocabulary_size", "has_input_vocabulary", "trainable", "dtype")

    def __init__(
        self,
        max_tokens: int | None = None,
        standardize: str | Function | None = "lower_and_strip_punctuation",
        split: str | Function | None = "whitespace",
        ngrams: int | Sequence[int] | None = None,
        output_mode: str = "int",
        output_sequence_length: int | None = None,
        pad_to_max_tokens: bool = False,
        vocabulary: Any = None,
        idf_weights: Any = None,
        sparse: bool = False,
        ragged: bool = False,
        encoding: str = "utf-8",
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        self._refuse(sparse=sparse or None, ragged=ragged or None)
        output_mode = {"binary": "multi_hot", "tf-idf": "tf_idf"}.get(output_mode, output_mode)
        _check("standardize", standardize, _STANDARDIZE)
        _check("split", split, _SPLIT)
        if output_mode not in _MODES:
            raise ConfigError(
                f"Invalid value for argument `output_mode`. Expected one of {_MODES}. Received: "
                f"output_mode={output_mode}"
            )
        widths = (ngrams,) if isinstance(ngrams, int) else ngrams
        if widths is not None and (not isinstance(widths, tuple | list) or not all(isinstance(n, int) for n in widths)):
            raise ConfigError(f"`ngrams` must be None, an integer, or a tuple of integers. Received: ngrams={ngrams}")
        if any(width < 1 for width in widths or ()):
            raise ConfigError(f"`ngrams` must be 1 or greater. Received: ngrams={ngrams}")
        if output_sequence_length is not None and output_mode != "int":
            raise ConfigError(
                "`output_sequence_length` must not be set if `output_mode` is not 'int'. Received "
                f"output_sequence_length={output_sequence_length}."
            )
        if output_sequence_length is not None and not isinstance(output_sequence_length, int):
            raise ConfigError(
                "`output_sequence_length` must be either None or an integer when `output_mode` is 'int'. Received: "
                f"output_sequence_length={output_sequence_length}"
            )
        if output_sequence_length is not None and output_sequence_length < 0:
            raise ConfigError(f"`output_sequence_length` must be 0 or greater. Received: {output_sequence_length}")
        if encoding != "utf-8":
            raise ConfigError(f"not supported: encoding={encoding!r} of TextVectorization; only 'utf-8'")
        self.max_tokens, self.standardize, self.split = max_tokens, standardize, split
        self.ngrams = tuple(ngrams) if isinstance(ngrams, tuple | list) else ngrams
        self.output_mode, self.output_sequence_length = output_mode, output_sequence_length
        self.pad_to_max_tokens, self.encoding = bool(pad_to_max_tokens), encoding
        self.sparse = self.ragged = False
        self._lookup = StringLookup(
            max_tokens=max_tokens,
            mask_token="",
            vocabulary=vocabulary,
            idf_weights=idf_weights,
            output_mode=output_mode,
            pad_to_max_tokens=pad_to_max_tokens,
        )
        self.built = True

    @property
    def vocabulary(self) -> list[str] | None:
        """The tokens as the constructor takes them; None before there are any."""
        return self._lookup.vocabulary

    @property
    def idf_weights(self) -> list[float] | None:
        """The weights of "tf_idf" by index."""
        weights = self._lookup.idf_weights
        return None if weights is None else list(weights)

    def vocabulary_size(self) -> int:
        """Return the number of tokens, including padding and the unknown token."""
        return self._lookup.vocabulary_size()

    def get_vocabulary(self, include_special_tokens: bool = True) -> list[str]:
        """Return the token of each index."""
        return self._lookup.get_vocabulary(include_special_tokens)

    def set_vocabulary(self, vocabulary: Any, idf_weights: Any = None) -> None:
        """Set the vocabulary; see `StringLookup.set_vocabulary`."""
        self._lookup.set_vocabulary(vocabulary, idf_weights)

    def adapt(self, data: Any, batch_size: int | None = None, steps: int | None = None) -> None:
        """Build the vocabulary from texts, most frequent tokens first; ties put the greater token first.

        `data` is an array or a list of texts (for "tf_idf", documents), or an iterable of batches, at most `steps` of
        them; `batch_size` has no effect. ConfigError if the vocabulary was passed, or these are not texts.
        """
        counts: Counter[str] = Counter()
        documents: Counter[str] = Counter()
        number = 0
        for batch in self._parts(data) if is_one_array(data) else islice(batches_of(data), steps):
            rows = self._tokens(batch)
            number += len(rows)
            for row in rows:
                counts.update(row)
                documents.update(set(row) if self.output_mode == "tf_idf" else ())
        self._lookup._set_most_frequent(counts, documents, number)

    def _parts(self, data: Any) -> Iterable[Array]:
        """Yield texts, some at a time: their tokens take several times their memory."""
        texts = np.atleast_1d(on_host(self, data))
        for first in range(0, max(len(texts), 1), _TEXTS_AT_ONCE):
            yield texts[first : first + _TEXTS_AT_ONCE]

    def _tokens(self, inputs: Any) -> list[list[str]]:
        """Return the tokens of each text, (rows,) or (rows, 1); without `split` also (rows, tokens)."""
        texts = on_host(self, inputs)
        if texts.size and texts.dtype.kind not in "UO":
            raise ConfigError(f"layer {self._display_name!r}: expected texts, found {texts.dtype.name}")
        texts = texts.reshape(1) if texts.ndim == 0 else texts
        if callable(self.standardize):
            texts = without_width(self.standardize(text_array(texts.ravel().tolist(), texts.shape)))
        elif self.standardize is not None:
            rows = [self._standardized(text) for text in texts.ravel().tolist()]
            texts = object_array(rows).reshape(texts.shape)
        if self.split is None:
            tokens = [[row] if isinstance(row, str) else list(row) for row in texts.tolist()]
        else:
            if texts.ndim > 1 and texts.shape[-1] != 1:
                raise ConfigError(
                    "When using `TextVectorization` to tokenize strings, the input rank must be 1 or the last shape "
                    f"dimension must be 1. Received: inputs.shape={texts.shape} with rank={texts.ndim}"
                )
            tokens = self._split(texts.reshape(-1))
        self._require_short_ngrams(tokens)
        return [self._with_ngrams(row) for row in tokens]

    def _standardized(self, text: str) -> str:
        if "lower" in str(self.standardize):
            text = text.translate(_LOWER)
        return PUNCTUATION.sub("", text) if "strip" in str(self.standardize) else text

    def _split(self, texts: Array) -> list[list[str]]:
        if callable(self.split):
            return [[str(token) for token in row] for row in self.split(text_array(texts.tolist()))]
        if self.split == "character":
            return [list(text) for text in texts.tolist()]
        return [[token for token in _SPACES.split(text) if token] for text in texts.tolist()]

    def _with_ngrams(self, tokens: list[str]) -> list[str]:
        if self.ngrams is None:
            return tokens
        return [" ".join(tokens[at : at + n]) for n in self._widths(tokens) for at in range(len(tokens) - n + 1)]

    def _widths(self, tokens: Sequence[str]) -> Iterable[int]:
        """Return the numbers of tokens in the n-grams of a text."""
        if isinstance(self.ngrams, int):
            return range(1, min(self.ngrams, len(tokens)) + 1)
        return [width for width in self.ngrams or () if width <= len(tokens)]

    def _require_short_ngrams(self, rows: Sequence[Sequence[str]]) -> None:
        """Refuse texts whose n-grams are many times as long as they are."""
        if self.ngrams is None:
            return
        tokens, needed = sum(map(len, rows)), 0
        for row, words in enumerate(rows):
            needed += sum(width * (len(words) - width + 1) for width in self._widths(words))
            if needed > _MOST_CELLS and needed > _MOST_PADDING * tokens:
                raise ConfigError(
                    f"layer {self._display_name!r}: the n-grams of text {row}, of {len(words):,} tokens, and of those "
                    f"before it hold {needed:,} tokens; pass a smaller ngrams= than {short(self.ngrams)}, or cut texts"
                )

    @also_symbolic
    def __call__(self, inputs: Any, training: bool | None = None) -> Any:
        """Return indices of tokens, or vectors, of texts (rows,) or (rows, 1), or of a single text.

        `training` has no effect. ConfigError without a vocabulary, and inside a model, where values are unknown.
        """
        single = not isinstance(inputs, list | tuple) and np.ndim(inputs) == 0
        rows = self._tokens(inputs)
        longest = max(map(len, rows), default=0)
        length = longest if self.output_sequence_length is None else self.output_sequence_length
        if self.output_mode in ("int", "one_hot"):
            self._require_little_padding(rows, length)
        if self.output_mode == "int":
            outputs = self._lookup._padded(rows, length)
        elif self.output_mode == "one_hot":
            padded = np.full((len(rows), length), "", object)
            for row, tokens in zip(padded, rows, strict=True):
                row[: len(tokens[:length])] = tokens[:length]
            outputs = self._lookup(padded)
        else:
            outputs = self._lookup._counted(rows)
        return outputs[0] if single else outputs

    def _require_little_padding(self, rows: Sequence[Sequence[str]], length: int) -> None:
        """Refuse a batch that padding to one text's length would make many times as large as it is."""
        cells, tokens = len(rows) * length, sum(map(len, rows))
        if cells > _MOST_CELLS and cells > _MOST_PADDING * tokens:
            longest = max(range(len(rows)), key=lambda row: len(rows[row]))
            raise ConfigError(
                f"layer {self._display_name!r}: padding {len(rows):,} texts to {length:,} tokens takes "
                f"{format_bytes(8 * cells)}; the longest, text {longest}, has {len(rows[longest]):,}: pass a smaller "
                "output_sequence_length="
            )

    def _get_own_config(self) -> dict[str, Any]:
        """Return the arguments, with the vocabulary that `adapt` found."""
        weights = self._lookup.idf_weights
        token_weights = None if weights is None else list(weights[self._lookup._first_token_index :])
        return super()._get_own_config() | {"vocabulary": self.vocabulary, "idf_weights": token_weights}

    def _get_config(self) -> dict[str, Any]:
        return {key: value for key, value in super()._get_config().items() if key != "trainable"}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Return the layer that `config` describes."""
        return super().from_config(readable_config(config, cls._read))


def _check(name: str, value: Any, choices: Sequence[str]) -> None:
    if value is not None and not callable(value) and value not in choices:
        raise ConfigError(
            f"Unknown value for `{name}` argument of layer TextVectorization. If restricted to a string, allowed "
            f"values are: {list(choices)}, None or a function. Received: {name}={value}"
        )
