"""Categories of tables as numbers: by a hash, or by their indices in a vocabulary.

Texts stay on the host: their layers work on NumPy arrays, before `fit`, in a generator or a `PyDataset`, or first in a
model (`dptrain.models.host_stage`), not in a layer's `call` (ConfigError). So does hashing. `IntegerLookup` in a
vocabulary works anywhere.
"""

import functools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from dptrain import ops
from dptrain.data.texts import text_array, without_width
from dptrain.errors import ConfigError
from dptrain.layers.base import Layer, map_shapes
from dptrain.layers.existing_rows import existing_rows
from dptrain.layers.node import LayerCall
from dptrain.layers.preprocessing.categories import encode_categories
from dptrain.layers.preprocessing.fingerprints import cross_fingerprints, farm, fingerprint_each, sip
from dptrain.layers.preprocessing.standardization import batches_of, is_one_array
from dptrain.ops.operation_calls import is_symbolic
from dptrain.program.dims import is_number, number_of, read, symbolic, unknown
from dptrain.program.tensor import Tensor, Variable, placeholder
from dptrain.program.tree import leaves, map_leaves
from dptrain.runtime.text import short

Array = npt.NDArray[Any]
Salt = int | Sequence[int] | None
_MODES = ("int", "one_hot", "multi_hot", "count", "tf_idf")


def on_host(layer: Layer, value: Any) -> Array:
    """Return values as an array, texts as `str`, mostly in objects; refuse tensors without values, inside a model."""
    if isinstance(value, Variable):
        value = value.value
    if isinstance(value, Tensor):
        if value.value is None:
            raise ConfigError(
                f"not supported: layer {layer._display_name!r} ({type(layer).__name__}) in a `call`: it works on the "
                "host; call it on an `Input`, or on arrays before `fit`, in a generator or a PyDataset"
            )
        return value.numpy()
    return without_width(value)


def also_symbolic(call: Callable[..., Any]) -> Callable[..., Any]:
    """Let the `__call__` of a layer that works on the host take symbolic tensors, whose model calls it later."""

    @functools.wraps(call)
    def symbolic_call(self: Layer, inputs: Any, training: bool | None = None) -> Any:
        if not any(map(is_symbolic, leaves(inputs))):
            return call(self, inputs, training)
        node = LayerCall(self, (inputs,))
        node.outputs = node.output(*_output_spec(self, inputs, training), self._display_name)
        self._nodes.append(node)
        return node.outputs

    return symbolic_call


def _output_spec(layer: Layer, inputs: Any, training: bool | None) -> tuple[tuple[Any, ...], Any]:
    """Return the shape and type of the output for symbolic inputs, by calling the layer on arrays like them."""
    word = str(next(iter(getattr(layer, "vocabulary", None) or ["a"])))
    outputs = [
        layer(map_leaves(partial(_trial, size, f"{word} " * size if layer._splits_texts else word), inputs), training)
        for size in _TRIAL_ROWS
    ]
    known = next(leaf for leaf in leaves(inputs) if is_symbolic(leaf)).shape
    shape = [
        number if number == other else _length(known, axis) if number == _TRIAL_ROWS[0] else unknown()
        for axis, (number, other) in enumerate(zip(outputs[0].shape, outputs[1].shape, strict=True))
    ]
    return tuple(shape), "U" if isinstance(outputs[0], np.ndarray) else outputs[0].dtype


class HostLayer(Layer):
    """Base of layers that work on the host."""

    _works_on_host = True

    # The type of inputs of which only the shape is given.
    _input_dtype: str = "int64"

    def compute_output_shape(self, input_shape: Any) -> Any:
        """Return the shape of the output, None for unknown lengths; those of several inputs are in a list or tuple."""
        inputs = map_shapes(lambda shape: placeholder(symbolic(shape), self._input_dtype, "input"), input_shape)
        return read(_output_spec(self, inputs, None)[0])


# Unknown lengths of trial inputs: outputs of equal lengths do not depend on these.
_TRIAL_ROWS = 2, 3


def _length(shape: Sequence[Any], axis: int) -> Any:
    """Return the unknown length of an input's axis, else a new one."""
    return shape[axis] if axis < len(shape) and not is_number(shape[axis]) else unknown()


def _trial(size: int, text: str, path: str, leaf: Any) -> Any:
    """Return an array like a symbolic tensor, with a number of rows, and this text in the place of each."""
    if not is_symbolic(leaf):
        return leaf
    shape = tuple(number_of(n) if is_number(n) else size for n in leaf.shape)
    return np.full(shape, text) if leaf.dtype.kind == "U" else np.zeros(shape, leaf.dtype)


def checked_salt(salt: Salt) -> list[int] | None:
    """Return a salt as two numbers, or None."""
    if salt is None:
        return None
    if isinstance(salt, list | tuple) and len(salt) == 2:
        return [int(number) for number in salt]
    if isinstance(salt, int):
        return [salt, salt]
    raise ConfigError(
        f"The `salt` argument can only be a tuple of size 2 integers, or a single integer. Received: salt={salt}."
    )


def readable_config(config: Mapping[str, Any], ignored: Sequence[str]) -> dict[str, Any]:
    """Return a lookup's configuration without these arguments; ConfigError if it reads a file, which could be any."""
    vocabulary = config.get("vocabulary")
    if isinstance(vocabulary, str | Path):
        raise ConfigError(
            f"not supported: vocabulary={str(vocabulary)!r} in a configuration, which would read that file; pass it to "
            "the constructor or to set_vocabulary"
        )
    return {key: value for key, value in config.items() if key not in ignored}


def _buckets(values: Array, number: int, salt: Sequence[int] | None) -> Array:
    function: Callable[[bytes], int] = farm if salt is None else lambda text: sip(text, salt)
    return (fingerprint_each(values, function) % np.uint64(number)).astype(np.int64)


class Hashing(HostLayer):
    """The bin that the hash of each text or integer falls into.

    Args:
        num_bins: number of bins, including that of `mask_value`.
        mask_value: is put into bin 0; other values then start at bin 1.
        salt: of SipHash, two numbers or one for both; None for FarmHash.
        output_mode: "int" (int64), or "one_hot", "multi_hot" or "count".
        sparse: must be False.
    """

    def __init__(
        self,
        num_bins: int,
        mask_value: Any = None,
        salt: Salt = None,
        output_mode: str = "int",
        sparse: bool = False,
        **options: Any,
    ) -> None:
        bin_dtype = options.pop("dtype", None) if output_mode == "int" else None
        super().__init__(**options)
        self._refuse(sparse=sparse or None)
        if num_bins is None or num_bins <= 0:
            raise ConfigError(
                f"The `num_bins` for `Hashing` cannot be `None` or non-positive values. Received: num_bins={num_bins}."
            )
        if bin_dtype is not None and bin_dtype not in ("int32", "int64"):
            raise ConfigError(
                "When `output_mode=\"int\"`, `dtype` should be an integer type, 'int32' or 'in64'. Received: "
                f"dtype={bin_dtype}"
            )
        if output_mode not in _MODES[:-1]:
            raise ConfigError(
                f"Invalid value for argument `output_mode`. Expected one of {_MODES[:-1]}. Received: "
                f"output_mode={output_mode}"
            )
        self.num_bins, self.mask_value, self.salt = int(num_bins), mask_value, checked_salt(salt)
        self.output_mode, self.sparse, self._bin_dtype = output_mode, False, bin_dtype or "int64"
        self.built = True

    def _get_config(self) -> dict[str, Any]:
        """Return the arguments, including the type of the bins."""
        return super()._get_config() | ({"dtype": self._bin_dtype} if self.output_mode == "int" else {})

    @also_symbolic
    def __call__(self, inputs: Any, training: bool | None = None) -> Any:
        """Return the bins of texts or integers of any shape, or vectors. Decimals are cut off; ignores `training`."""
        values = on_host(self, inputs)
        bins = self.num_bins
        masked = None
        if self.mask_value is not None and bins > 1:
            bins, masked = bins - 1, values == self.mask_value
        buckets = _buckets(values.astype(np.int64) if values.dtype.kind == "f" else values, bins, self.salt)
        if masked is not None:
            buckets = np.where(masked, 0, buckets + 1)
        dtype = self._bin_dtype if self.output_mode == "int" else self.compute_dtype
        return encode_categories(ops.convert_to_tensor(buckets), self.output_mode, self.num_bins, dtype)


class HashedCrossing(HostLayer):
    """The bin that a hash of several features together falls into.

    `output_mode` is "int" (int64) or "one_hot"; `sparse` must be False, `dtype` is the output's.
    """

    def __init__(
        self,
        num_bins: int,
        output_mode: str = "int",
        sparse: bool = False,
        name: str | None = None,
        dtype: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(name=name, dtype=None if output_mode == "int" else dtype, **options)
        self._refuse(sparse=sparse or None)
        if output_mode not in ("int", "one_hot"):
            raise ConfigError(f"output_mode={output_mode!r} of HashedCrossing: expected 'int' or 'one_hot'")
        if num_bins is None or num_bins <= 0:
            raise ConfigError(f"num_bins={num_bins} of HashedCrossing: expected a number from 1")
        self.num_bins, self.output_mode, self.sparse = int(num_bins), output_mode, False
        self._bin_dtype = dtype or "int64"
        self.built = True

    def _get_config(self) -> dict[str, Any]:
        """Return the arguments, including the type."""
        extra = {"dtype": self._bin_dtype} if self.output_mode == "int" else {}
        return {key: value for key, value in (super()._get_config() | extra).items() if key != "trainable"}

    @also_symbolic
    def __call__(self, inputs: Any, training: bool | None = None) -> Any:
        """Return the bins of two or more features together, or vectors; `training` has no effect.

        Features are texts or integers, of shape (), (rows,) or (rows, 1) each.
        """
        if not isinstance(inputs, list | tuple) or len(inputs) < 2:
            raise ConfigError(
                f"`HashedCrossing` should be called on at least two inputs, a list or tuple. Received: inputs={inputs}"
            )
        values = [on_host(self, feature) for feature in inputs]
        shape = values[0].shape
        if any(feature.shape != shape for feature in values) or len(shape) > 2 or (len(shape) == 2 and shape[1] != 1):
            raise ConfigError(
                "All `HashedCrossing` inputs should have the same shape, `()`, `(batch_size)` or `(batch_size, 1)`. "
                f"Received: {[feature.shape for feature in values]}"
            )
        if any(feature.dtype.kind not in "iuUO" for feature in values):
            raise ConfigError(
                "All `HashedCrossing` inputs should have an integer or string dtype. Received: "
                f"{[feature.dtype.name for feature in values]}"
            )
        prints = [
            fingerprint_each(feature, farm) if feature.dtype.kind in "UO" else feature.astype(np.int64).view(np.uint64)
            for feature in values
        ]
        rows = zip(*(column.ravel().tolist() for column in prints), strict=True)
        bins = np.array([cross_fingerprints(row) % self.num_bins for row in rows], np.int64).reshape(shape)
        dtype = self._bin_dtype if self.output_mode == "int" else self.compute_dtype
        return encode_categories(ops.convert_to_tensor(bins), self.output_mode, self.num_bins, dtype)


class _Lookup(Layer):
    """Indices of tokens in a vocabulary: first the mask's, if any, then OOV. Arguments as in `StringLookup`."""

    _kind: ClassVar[type]
    # Further arguments in Keras' configurations.
    _read: ClassVar[Sequence[str]] = ("vocabulary_size", "has_input_vocabulary", "trainable", "dtype")

    _takes_ids = True

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        super().__init__(name=arguments["name"])
        self.autocast = False  # half precision would round numbers that are looked up
        mode = {"binary": "multi_hot", "tf-idf": "tf_idf"}.get(arguments["output_mode"], arguments["output_mode"])
        most, unknown = arguments["max_tokens"], arguments["num_oov_indices"]
        self._refuse(sparse=arguments["sparse"] or None)
        if most is not None and most <= 1:
            raise ConfigError(f"If set, `max_tokens` must be greater than 1. Received: max_tokens={most}")
        if arguments["pad_to_max_tokens"] and most is None:
            raise ConfigError(f"If pad_to_max_tokens is True, must set `max_tokens`. Received: max_tokens={most}")
        if unknown < 0:
            raise ConfigError(
                f"`num_oov_indices` must be greater than or equal to 0. Received: num_oov_indices={unknown}"
            )
        if mode not in _MODES:
            raise ConfigError(
                f"Invalid value for argument `output_mode`. Expected one of {_MODES}. Received: output_mode={mode}"
            )
        if arguments["invert"] and mode != "int":
            raise ConfigError(f"`output_mode` must be `'int'` when `invert` is true. Received: output_mode={mode}")
        if arguments["idf_weights"] is not None and mode != "tf_idf":
            raise ConfigError(
                "`idf_weights` should only be set if `output_mode` is `'tf_idf'`. Received: "
                f"idf_weights={arguments['idf_weights']} and output_mode={mode}"
            )
        self.max_tokens, self.num_oov_indices, self.output_mode = most, int(unknown), mode
        self.mask_token, self.oov_token = arguments["mask_token"], arguments["oov_token"]
        self.invert, self.sparse = bool(arguments["invert"]), False
        self.pad_to_max_tokens, self.salt = bool(arguments["pad_to_max_tokens"]), checked_salt(arguments["salt"])
        self._tokens: list[Any] = []
        self.idf_weights: Any = None
        self.has_fixed_vocabulary = False  # passed rather than found by `adapt`
        if arguments["vocabulary"] is not None:
            self.set_vocabulary(arguments["vocabulary"], arguments["idf_weights"])
        self.built = True

    @property
    def vocabulary(self) -> list[Any] | None:
        """The tokens as the constructor takes them; None before there are any."""
        return list(self._tokens) or None

    @property
    def _first_oov_index(self) -> int:
        return int(self.mask_token is not None and self.output_mode == "int")

    @property
    def _first_token_index(self) -> int:
        return self._first_oov_index + self.num_oov_indices

    def vocabulary_size(self) -> int:
        """Return the number of tokens, mask and OOV tokens included."""
        return len(self._tokens) + self._first_token_index

    def get_vocabulary(self, include_special_tokens: bool = True) -> list[Any]:
        """Return the token of each index."""
        special = [self.mask_token] * self._first_oov_index + [self.oov_token] * self.num_oov_indices
        return (special if include_special_tokens else []) + list(self._tokens)

    def set_vocabulary(self, vocabulary: Any, idf_weights: Any = None) -> None:
        """Set the vocabulary: tokens in order, with or without mask and OOV tokens; or a file, a token per line.

        `idf_weights` has a weight for each token, with "tf_idf". ConfigError for no, too many, repeated or misplaced
        tokens.
        """
        entries = (
            self._read_vocabulary_file(vocabulary)
            if isinstance(vocabulary, str | Path)
            else on_host(self, vocabulary).tolist()
        )
        if not entries:
            raise ConfigError(f"Cannot set an empty vocabulary. Received: vocabulary={vocabulary}")
        special = self.get_vocabulary()[: self._first_token_index]
        has_special = entries[: len(special)] == special and bool(special)
        tokens = entries[len(special) :] if has_special else entries
        repeated = [token for token, count in Counter(tokens).items() if count > 1]
        if repeated:
            raise ConfigError(
                "The passed vocabulary has at least one repeated term. Please uniquify your dataset. The repeated "
                f"terms are: {short(repeated[:10])}"
            )
        reserved = [self.mask_token, *([self.oov_token] if self.invert else [])]
        for token in reserved:
            if token is not None and token in tokens:
                raise ConfigError(
                    f"Found reserved token {token!r} at unexpected location in `vocabulary`: remove mask and OOV "
                    f"tokens, or put them at the start in this order: {special}"
                )
        size = len(tokens) + self._first_token_index
        if self.max_tokens is not None and size > self.max_tokens:
            raise ConfigError(
                "Attempted to set a vocabulary larger than the maximum vocab size. Received vocabulary size is "
                f"{size}; `max_tokens` is {self.max_tokens}."
            )
        if (idf_weights is None) == (self.output_mode == "tf_idf"):
            raise ConfigError(
                "`idf_weights` must be set if output_mode is 'tf_idf', and only then. Received: "
                f"output_mode={self.output_mode} and idf_weights={idf_weights}"
            )
        self._tokens = tokens
        if idf_weights is not None:
            weights = np.asarray(idf_weights, np.float64)
            if weights.shape != (len(entries),):
                raise ConfigError(
                    f"`idf_weights` must be the same length as vocabulary. len(idf_weights) is {weights.size}; "
                    f"len(vocabulary) is {len(entries)}"
                )
            front = [] if has_special else [weights.mean()] * self._first_token_index
            self.idf_weights = [*front, *weights.tolist()]
        self.has_fixed_vocabulary = True
        self._changes += 1  # invalidates traced programs

    def _read_vocabulary_file(self, path: str | Path) -> list[Any]:
        try:
            lines = Path(path).read_text(encoding="utf-8").splitlines()
            return [self._kind(line) for line in lines]
        except (OSError, ValueError) as error:
            raise ConfigError(f"Vocabulary file {path}: {error}") from error

    def adapt(self, data: Any, steps: int | None = None) -> None:
        """Build the vocabulary from data, most frequent tokens first; ties put the greater token first.

        `data` is an array, a list, or an iterable of batches, at most `steps` of them; with "tf_idf" each row is a
        document. ConfigError if the vocabulary was passed.
        """
        is_whole = is_one_array(data)
        counts: Counter[Any] = Counter()
        documents: Counter[Any] = Counter()
        number = 0
        for batch in [data] if is_whole else islice(batches_of(data), steps):
            values = self._keys(on_host(self, batch))
            counts.update(values.ravel().tolist())
            if values.ndim < 2 and not is_whole:
                rows = values.reshape(min(values.size, 1), values.size)  # a document, unless it is empty
            else:
                rows = values.reshape(len(values), math.prod(values.shape[1:]))
            number += len(rows)
            for row in rows if self.output_mode == "tf_idf" else ():
                documents.update(set(row.tolist()))
        self._set_most_frequent(counts, documents, number)

    def _set_most_frequent(self, counts: Counter[Any], documents: Counter[Any], number: int) -> None:
        """Set the vocabulary by token counts, and the IDF weights by document counts."""
        if self.has_fixed_vocabulary:
            raise ConfigError(
                f"Cannot adapt layer '{self._display_name}' after setting a static vocabulary via "
                "`vocabulary` argument or `set_vocabulary()` method."
            )
        for token in (self.mask_token, self.oov_token):
            counts.pop(token, None)
        ordered = sorted(
            counts, key=lambda token: (counts[token], token.encode() if isinstance(token, str) else token)
        )[::-1]
        ordered = ordered if self.max_tokens is None else ordered[: self.max_tokens - self._first_token_index]
        weights = None
        if self.output_mode == "tf_idf":
            weights = np.log(1 + number / (1 + np.array([documents[token] for token in ordered], np.float64)))
        self.set_vocabulary(ordered, weights)
        self.has_fixed_vocabulary = False

    def _keys(self, values: Array) -> Array:
        if self._kind is int:
            return values.astype(np.int64)
        return values if values.dtype.kind in "UO" else values.astype(np.str_)

    def _get_own_config(self) -> dict[str, Any]:
        """Return the arguments, with the vocabulary that `adapt` found."""
        weights = None if self.idf_weights is None else list(self.idf_weights[self._first_token_index :])
        return super()._get_own_config() | {"vocabulary": self.vocabulary, "idf_weights": weights}

    def _get_config(self) -> dict[str, Any]:
        return {key: value for key, value in super()._get_config().items() if key != "trainable"}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        return super().from_config(readable_config(config, cls._read))

    def _require_vocabulary(self) -> list[Any]:
        if not self._tokens:
            raise ConfigError(
                f"You must set the vocabulary of layer {self._display_name!r} before calling it: pass a "
                "`vocabulary` argument, or call `adapt` with some sample data."
            )
        return self._tokens

    def _encoded(self, places: Tensor) -> Tensor:
        """Encode indices in the output mode."""
        if self.output_mode == "int":
            return places
        depth = self.max_tokens if self.pad_to_max_tokens else self.vocabulary_size()
        mode = "count" if self.output_mode == "tf_idf" else self.output_mode
        vectors = encode_categories(places, mode, depth, self.compute_dtype)
        if self.output_mode != "tf_idf":
            return vectors
        weights = np.pad(np.asarray(self.idf_weights), (0, depth - len(self.idf_weights)))
        return vectors * ops.cast(weights, vectors.dtype)

    def _counted(self, rows: Sequence[Sequence[Any]]) -> Tensor:
        """Return rows of different lengths as multi-hot, count or TF-IDF vectors."""
        numbers = self._numbers()
        depth = self.max_tokens if self.pad_to_max_tokens else self.vocabulary_size()
        vectors = np.zeros((len(rows), depth or 0), self.compute_dtype)
        for vector, row in zip(vectors, rows, strict=True):
            for token, count in Counter(row).items():
                if token != self.mask_token:
                    vector[numbers.get(token, self._first_oov_index)] += count
        if self.output_mode == "multi_hot":
            vectors = np.minimum(vectors, 1)
        elif self.output_mode == "tf_idf":
            vectors[:, : len(self.idf_weights)] *= np.asarray(self.idf_weights)
        return ops.convert_to_tensor(vectors.astype(self.compute_dtype))

    def _padded(self, rows: Sequence[Sequence[Any]], length: int) -> Tensor:
        """Return the indices of rows of different lengths, cut or padded with those of the mask, with one OOV index."""
        numbers = self._numbers()
        indices = np.zeros((len(rows), length), np.int64)
        for places, row in zip(indices, rows, strict=True):
            known = [numbers.get(token, self._first_oov_index) for token in row[:length]]
            places[: len(known)] = known
        return ops.convert_to_tensor(indices)

    def _numbers(self) -> dict[Any, int]:
        """Return the index of each token, the mask's among them; -1 for one that vectors leave out."""
        numbers = {token: place + self._first_token_index for place, token in enumerate(self._require_vocabulary())}
        if self.mask_token is not None:
            numbers[self.mask_token] = 0 if self.output_mode == "int" else -1
        return numbers

    def _check_known(self, values: Array, is_known: Array) -> None:
        """Refuse unknown tokens if there is no OOV index."""
        if not is_known.all():
            raise ConfigError(
                "When `num_oov_indices=0` all inputs should be in vocabulary, found OOV values "
                f"{short(np.unique(values[~is_known])[:10].tolist())}, consider setting `num_oov_indices=1`."
            )

    def _oov_indices(self, values: Array) -> Array:
        """Return the OOV indices of unknown tokens, by a hash."""
        return _buckets(values, self.num_oov_indices, self.salt) + self._first_oov_index

    def _look_up(self, inputs: Any) -> Any:
        """Return indices of tokens, or tokens of indices, by NumPy."""
        self._require_vocabulary()
        values = on_host(self, inputs)
        if self.invert:
            table = np.array(self.get_vocabulary(), dtype=object)
            places = values.astype(np.int64)
            inside = (places >= 0) & (places < len(table))
            looked_up = np.where(inside, table[np.where(inside, places, 0)], self.oov_token)
            if self._kind is int:
                return ops.convert_to_tensor(looked_up.astype(np.int64))
            return text_array([str(token) for token in looked_up.ravel().tolist()], looked_up.shape)
        numbers, keys = self._numbers(), self._keys(values)
        different, at = np.unique(keys, return_inverse=True)
        is_known = np.array([key in numbers for key in different.tolist()], bool)
        places = np.array([numbers.get(key, 0) for key in different.tolist()], np.int64)
        if self.num_oov_indices == 0:
            self._check_known(different, is_known)
        elif self.num_oov_indices == 1:
            places[~is_known] = self._first_oov_index
        elif not is_known.all():
            places[~is_known] = self._oov_indices(different[~is_known])
        return self._encoded(ops.convert_to_tensor(places[at].reshape(keys.shape)))


class StringLookup(_Lookup, HostLayer):
    """Indices of texts in a vocabulary, or inverted, texts of indices.

    Args:
        max_tokens: greatest size of the vocabulary, all indices counted; None for any.
        num_oov_indices: indices of unknown texts, by a hash; with none, these are an error.
        mask_token: has index 0, and is left out of vectors; None for none.
        oov_token: stands for unknown texts in the vocabulary.
        vocabulary: the texts in order, or a file with one a line, whose tokens the layer keeps; None for `adapt` or
            `set_vocabulary`.
        idf_weights: of each text, for "tf_idf".
        invert: return an array of texts for indices.
        output_mode: "int" (int64), "one_hot", "multi_hot", "count", or "tf_idf" for counts times weights.
        pad_to_max_tokens: make vectors as long as `max_tokens`.
        sparse, encoding: must be False and "utf-8".
        salt: see `Hashing`, for unknown texts.
        options: of Keras' configurations.
    """

    _kind = str

    def __init__(
        self,
        max_tokens: int | None = None,
        num_oov_indices: int = 1,
        mask_token: str | None = None,
        oov_token: str | None = "[UNK]",
        vocabulary: Any = None,
        idf_weights: Any = None,
        invert: bool = False,
        output_mode: str = "int",
        pad_to_max_tokens: bool = False,
        sparse: bool = False,
        encoding: str = "utf-8",
        name: str | None = None,
        salt: Salt = None,
    ) -> None:
        arguments = {key: value for key, value in locals().items() if key not in ("self", "__class__")}
        if encoding != "utf-8":
            raise ConfigError(f"not supported: encoding={encoding!r} of StringLookup; only 'utf-8'")
        super().__init__(arguments)
        self.encoding = encoding
        self._input_dtype = "int64" if invert else "U"

    @also_symbolic
    def __call__(self, inputs: Any, training: bool | None = None) -> Any:
        """Return indices of texts of any shape, or vectors; inverted, an array of texts. `training` has no effect."""
        return self._look_up(inputs)


class IntegerLookup(_Lookup):
    """Indices of integers in a vocabulary, or inverted, integers of indices; see `StringLookup`. Works inside a model.

    Args:
        vocabulary_dtype: must be "int64".
        oov_method: unknown integers get their index by "floormod", or by a hash ("farmhash"), on the host only.
        salt: of "farmhash".
    """

    _kind = int

    def __init__(
        self,
        max_tokens: int | None = None,
        num_oov_indices: int = 1,
        mask_token: int | None = None,
        oov_token: int | None = -1,
        vocabulary: Any = None,
        vocabulary_dtype: str = "int64",
        idf_weights: Any = None,
        invert: bool = False,
        output_mode: str = "int",
        sparse: bool = False,
        pad_to_max_tokens: bool = False,
        oov_method: str = "floormod",
        salt: Salt = None,
        name: str | None = None,
    ) -> None:
        arguments = {key: value for key, value in locals().items() if key not in ("self", "__class__")}
        if vocabulary_dtype != "int64":
            raise ConfigError(
                "Only `vocabulary_dtype='int64'` is supported at this time. Received: "
                f"vocabulary_dtype={vocabulary_dtype}"
            )
        if oov_method not in ("floormod", "farmhash"):
            raise ConfigError(f"oov_method={oov_method!r} of IntegerLookup: expected 'floormod' or 'farmhash'")
        if salt is not None and oov_method != "farmhash":
            raise ConfigError(
                f"`salt` can only be used when `oov_method='farmhash'`. Received: oov_method={oov_method}"
            )
        self.oov_method = oov_method
        super().__init__(arguments)
        self.vocabulary_dtype = vocabulary_dtype

    def _oov_indices(self, values: Array) -> Array:
        if self.oov_method == "farmhash":
            return super()._oov_indices(values)
        return values % self.num_oov_indices + self._first_oov_index

    def call(self, inputs: Any) -> Any:
        """Return indices of integers of any shape, or vectors; inverted, the integers of indices.

        Raises:
            ConfigError: no vocabulary, or an unknown integer without an OOV index outside a model.
            DataError: an unknown integer without an OOV index inside a model; it is named -1.
        """
        tokens = self._require_vocabulary()
        if inputs.value is not None or (self.oov_method == "farmhash" and self.num_oov_indices > 1):
            return self._look_up(inputs)
        numbers = ops.cast(inputs, "int64")
        if self.invert:
            table = np.array(self.get_vocabulary(), np.int64)
            inside = ops.logical_and(numbers >= 0, numbers < len(table))
            return ops.where(inside, ops.take(table, ops.where(inside, numbers, 0)), self.oov_token)
        order = np.argsort(np.array(tokens, np.int64), kind="stable")
        table = np.array(tokens, np.int64)[order]
        at = ops.minimum(ops.cast(ops.searchsorted(table, numbers), "int64"), len(table) - 1)
        is_known = ops.equal(ops.take(table, at), numbers)
        unknown: Any = -1
        if self.num_oov_indices:
            unknown = ops.mod(numbers, self.num_oov_indices) + self._first_oov_index
        places = ops.where(is_known, ops.take(order + self._first_token_index, at), unknown)
        masked = None if self.mask_token is None else ops.equal(numbers, self.mask_token)
        if masked is not None:
            places = ops.where(masked, 0, places)
        if not self.num_oov_indices:
            places = existing_rows(self._display_name, self.vocabulary_size(), places)
        if masked is not None and self.output_mode != "int":
            places = ops.where(masked, -1, places)
        return self._encoded(places)
