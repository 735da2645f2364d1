"""Categories of tables as numbers: by a hash, or by their places in a vocabulary.

Texts stay on the host: layers that take them work on NumPy arrays, before `fit`, in a generator or a `PyDataset`, and
not inside of a model. So does hashing. `IntegerLookup` of a vocabulary may be a part of a model.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from dptrain import ops
from dptrain.errors import ConfigError
from dptrain.layers.base import Layer
from dptrain.layers.categories import encoded
from dptrain.layers.fingerprints import crossed, farm, of_each, sip
from dptrain.layers.standardization import batches_of, is_one_array
from dptrain.program.tensor import Tensor, Variable

Array = npt.NDArray[Any]
Salt = int | Sequence[int] | None
_MODES = ("int", "one_hot", "multi_hot", "count", "tf_idf")


def on_host(layer: Layer, value: Any) -> Array:
    """Return values, texts as an array of `str`.

    Raises:
        ConfigError: they are not known: inside a model or a traced step.
    """
    if isinstance(value, Variable):
        value = value.value
    if isinstance(value, Tensor):
        if value.value is None:
            raise ConfigError(
                f"not supported: layer {layer._display_name!r} ({type(layer).__name__}) inside a model: "
                "it works on the host; call it on arrays before `fit`, in a generator or a PyDataset"
            )
        return value.numpy()
    found = np.asarray(value)
    if found.dtype.kind == "S" or (found.dtype == object and any(isinstance(one, bytes) for one in found.flat)):
        decoded = [one.decode() if isinstance(one, bytes) else str(one) for one in found.ravel().tolist()]
        found = np.array(decoded, dtype=np.str_).reshape(found.shape)
    return found.astype(np.str_) if found.dtype.kind in "OT" else found


def salt_of(salt: Salt) -> list[int] | None:
    """Return both numbers of a salt.

    Raises:
        ConfigError: it is none.
    """
    if salt is None:
        return None
    if isinstance(salt, list | tuple) and len(salt) == 2:
        return [int(one) for one in salt]
    if isinstance(salt, int):
        return [salt, salt]
    raise ConfigError(
        f"The `salt` argument can only be a tuple of size 2 integers, or a single integer. Received: salt={salt}."
    )


def _buckets(values: Array, number: int, salt: Sequence[int] | None) -> Array:
    """Return the bucket of each value, text or whole number (int64)."""
    function: Callable[[bytes], int] = farm if salt is None else lambda text: sip(text, salt)
    return (of_each(values, function) % np.uint64(number)).astype(np.int64)


class Hashing(Layer):
    """The number of the bin that a hash of each text, or whole number, falls into.

    Args:
        num_bins: how many bins, that of `mask_value` among them.
        mask_value: what becomes 0; other values then have the bins from 1.
        salt: of SipHash, two numbers or one for both; None for FarmHash.
        output_mode: "int" (int64), or as of `CategoryEncoding` "one_hot", "multi_hot" or "count".
        sparse: only False.
        options: as `Layer`.

    Raises:
        ConfigError: an argument is out of range, unknown or not supported.
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
        whole = options.pop("dtype", None) if output_mode == "int" else None
        super().__init__(**options)
        self._refuse(sparse=sparse or None)
        if num_bins is None or num_bins <= 0:
            raise ConfigError(
                f"The `num_bins` for `Hashing` cannot be `None` or non-positive values. Received: num_bins={num_bins}."
            )
        if whole is not None and whole not in ("int32", "int64"):
            raise ConfigError(
                "When `output_mode=\"int\"`, `dtype` should be an integer type, 'int32' or 'in64'. Received: "
                f"dtype={whole}"
            )
        if output_mode not in _MODES[:-1]:
            raise ConfigError(
                f"Invalid value for argument `output_mode`. Expected one of {_MODES[:-1]}. Received: "
                f"output_mode={output_mode}"
            )
        self.num_bins, self.mask_value, self.salt = int(num_bins), mask_value, salt_of(salt)
        self.output_mode, self.sparse, self._whole = output_mode, False, whole or "int64"
        self.built = True

    def _get_config(self) -> dict[str, Any]:
        """Return the arguments, the type of the bins among them."""
        return super()._get_config() | ({"dtype": self._whole} if self.output_mode == "int" else {})

    def __call__(self, inputs: Any, training: bool | None = None) -> Any:
        """Return the bins of values, or vectors.

        Args:
            inputs: texts or whole numbers, of any shape; of numbers with decimals these are cut off.
            training: without effect.

        Raises:
            ConfigError: the values are not known: inside a model.
        """
        values = on_host(self, inputs)
        bins = self.num_bins
        masked = None
        if self.mask_value is not None and bins > 1:
            bins, masked = bins - 1, values == self.mask_value
        found = _buckets(values.astype(np.int64) if values.dtype.kind == "f" else values, bins, self.salt)
        if masked is not None:
            found = np.where(masked, 0, found + 1)
        dtype = self._whole if self.output_mode == "int" else self.compute_dtype
        return encoded(ops.convert_to_tensor(found), self.output_mode, self.num_bins, dtype)


class HashedCrossing(Layer):
    """The number of the bin that a hash of several features together falls into.

    Args:
        num_bins: how many bins.
        output_mode: "int" (int64) or "one_hot".
        sparse: only False.
        name: as `Layer`.
        dtype: of what comes out.
        options: as `Layer`.

    Raises:
        ConfigError: an argument is unknown or not supported.
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
        self._whole = dtype or "int64"
        self.built = True

    def _get_config(self) -> dict[str, Any]:
        """Return the arguments, the type among them."""
        own = {"dtype": self._whole} if self.output_mode == "int" else {}
        return {key: one for key, one in (super()._get_config() | own).items() if key != "trainable"}

    def __call__(self, inputs: Any, training: bool | None = None) -> Any:
        """Return the bins of features together, or vectors.

        Args:
            inputs: two features or more, texts or whole numbers, of shape (), (rows,) or (rows, 1) each.
            training: without effect.

        Raises:
            ConfigError: other shapes or types, or values are not known: inside a model.
        """
        if not isinstance(inputs, list | tuple) or len(inputs) < 2:
            raise ConfigError(
                f"`HashedCrossing` should be called on at least two inputs, a list or tuple. Received: inputs={inputs}"
            )
        values = [on_host(self, one) for one in inputs]
        shape = values[0].shape
        if any(one.shape != shape for one in values) or len(shape) > 2 or (len(shape) == 2 and shape[1] != 1):
            raise ConfigError(
                "All `HashedCrossing` inputs should have the same shape, `()`, `(batch_size)` or `(batch_size, 1)`. "
                f"Received: {[one.shape for one in values]}"
            )
        if any(one.dtype.kind not in "iuU" for one in values):
            raise ConfigError(
                "All `HashedCrossing` inputs should have an integer or string dtype. Received: "
                f"{[one.dtype.name for one in values]}"
            )
        prints = [
            of_each(one, farm) if one.dtype.kind == "U" else one.astype(np.int64).view(np.uint64) for one in values
        ]
        rows = zip(*(one.ravel().tolist() for one in prints), strict=True)
        found = np.array([crossed(one) % self.num_bins for one in rows], np.int64).reshape(shape)
        dtype = self._whole if self.output_mode == "int" else self.compute_dtype
        return encoded(ops.convert_to_tensor(found), self.output_mode, self.num_bins, dtype)


class _Lookup(Layer):
    """Places of values in a vocabulary: first that of the mask, if there is one, then those of what is not known.

    Args:
        given: the arguments of the layer by name; see `StringLookup`.

    Raises:
        ConfigError: an argument is out of range, unknown or not supported.
    """

    _kind: ClassVar[type]
    # Arguments that a configuration of Keras' has besides.
    _read: ClassVar[Sequence[str]] = ("vocabulary_size", "has_input_vocabulary", "trainable", "dtype")

    _takes_ids = True

    def __init__(self, given: Mapping[str, Any]) -> None:
        super().__init__(name=given["name"])
        self.autocast = False  # half precision would round numbers that are looked up
        mode = {"binary": "multi_hot", "tf-idf": "tf_idf"}.get(given["output_mode"], given["output_mode"])
        most, unknown = given["max_tokens"], given["num_oov_indices"]
        self._refuse(sparse=given["sparse"] or None)
        if most is not None and most <= 1:
            raise ConfigError(f"If set, `max_tokens` must be greater than 1. Received: max_tokens={most}")
        if given["pad_to_max_tokens"] and most is None:
            raise ConfigError(f"If pad_to_max_tokens is True, must set `max_tokens`. Received: max_tokens={most}")
        if unknown < 0:
            raise ConfigError(
                f"`num_oov_indices` must be greater than or equal to 0. Received: num_oov_indices={unknown}"
            )
        if mode not in _MODES:
            raise ConfigError(
                f"Invalid value for argument `output_mode`. Expected one of {_MODES}. Received: output_mode={mode}"
            )
        if given["invert"] and mode != "int":
            raise ConfigError(f"`output_mode` must be `'int'` when `invert` is true. Received: output_mode={mode}")
        if given["idf_weights"] is not None and mode != "tf_idf":
            raise ConfigError(
                "`idf_weights` should only be set if `output_mode` is `'tf_idf'`. Received: "
                f"idf_weights={given['idf_weights']} and output_mode={mode}"
            )
        self.max_tokens, self.num_oov_indices, self.output_mode = most, int(unknown), mode
        self.mask_token, self.oov_token = given["mask_token"], given["oov_token"]
        self.invert, self.sparse = bool(given["invert"]), False
        self.pad_to_max_tokens, self.salt = bool(given["pad_to_max_tokens"]), salt_of(given["salt"])
        self._tokens: list[Any] = []
        self.idf_weights: Any = None
        if isinstance(given["vocabulary"], str | Path):  # which may stand in a file of a model
            raise ConfigError(
                f"not supported: vocabulary={str(given['vocabulary'])!r}, a file; call set_vocabulary(path)"
            )
        self.is_given = False  # rather than found by `adapt`
        if given["vocabulary"] is not None:
            self.set_vocabulary(given["vocabulary"], given["idf_weights"])
        self.built = True

    @property
    def vocabulary(self) -> list[Any] | None:
        """What is known, as the constructor takes it; None before there is any."""
        return list(self._tokens) or None

    @property
    def _first_unknown(self) -> int:
        return int(self.mask_token is not None and self.output_mode == "int")

    @property
    def _first_known(self) -> int:
        return self._first_unknown + self.num_oov_indices

    def vocabulary_size(self) -> int:
        """Return how many values there are, with those of masks and what is not known."""
        return len(self._tokens) + self._first_known

    def get_vocabulary(self, include_special_tokens: bool = True) -> list[Any]:
        """Return what each place stands for."""
        special = [self.mask_token] * self._first_unknown + [self.oov_token] * self.num_oov_indices
        return (special if include_special_tokens else []) + list(self._tokens)

    def set_vocabulary(self, vocabulary: Any, idf_weights: Any = None) -> None:
        """Set what is known.

        Args:
            vocabulary: the values in order, with or without those of masks and what is not known in front; or the name
                of a file, a value a line.
            idf_weights: of "tf_idf", for each value.

        Raises:
            ConfigError: there are none, too many, some twice or at a place where they do not belong.
        """
        given = self._lines(vocabulary) if isinstance(vocabulary, str | Path) else on_host(self, vocabulary).tolist()
        if not given:
            raise ConfigError(f"Cannot set an empty vocabulary. Received: vocabulary={vocabulary}")
        special = self.get_vocabulary()[: self._first_known]
        has_special = given[: len(special)] == special and bool(special)
        tokens = given[len(special) :] if has_special else given
        repeated = [one for one, count in Counter(tokens).items() if count > 1]
        if repeated:
            raise ConfigError(
                "The passed vocabulary has at least one repeated term. Please uniquify your dataset. The repeated "
                f"terms are: {repeated[:10]}"
            )
        reserved = [self.mask_token, *([self.oov_token] if self.invert else [])]
        for one in reserved:
            if one is not None and one in tokens:
                raise ConfigError(
                    f"Found reserved token {one!r} at unexpected location in `vocabulary`: remove mask and OOV tokens, "
                    f"or put them at the start in this order: {special}"
                )
        size = len(tokens) + self._first_known
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
            if weights.shape != (len(given),):
                raise ConfigError(
                    f"`idf_weights` must be the same length as vocabulary. len(idf_weights) is {weights.size}; "
                    f"len(vocabulary) is {len(given)}"
                )
            front = [] if has_special else [weights.mean()] * self._first_known
            self.idf_weights = [*front, *weights.tolist()]
        self.is_given = True
        self._changes += 1  # of what programs were traced with

    def _lines(self, path: str | Path) -> list[Any]:
        try:
            lines = Path(path).read_text(encoding="utf-8").splitlines()
            return [self._kind(one) for one in lines]
        except (OSError, ValueError) as error:
            raise ConfigError(f"Vocabulary file {path}: {error}") from error

    def adapt(self, data: Any, steps: int | None = None) -> None:
        """Take the vocabulary from data: what occurs most comes first, of equal numbers what is greater.

        Args:
            data: an array or a list, or an iterable of batches; with "tf_idf" a row is a document.
            steps: how many batches; None for all.

        Raises:
            ConfigError: the vocabulary was given.
        """
        whole = is_one_array(data)
        counts: Counter[Any] = Counter()
        documents: Counter[Any] = Counter()
        number = 0
        for batch in [data] if whole else islice(batches_of(data), steps):
            values = self._keys(on_host(self, batch))
            counts.update(values.ravel().tolist())
            rows = values.reshape(1, -1) if values.ndim < 2 and not whole else values.reshape(len(values), -1)
            number += len(rows)
            for row in rows if self.output_mode == "tf_idf" else ():
                documents.update(set(row.tolist()))
        self._take_most(counts, documents, number)

    def _take_most(self, counts: Counter[Any], documents: Counter[Any], number: int) -> None:
        """Take the values that occur most for the vocabulary.

        Args:
            counts: how often each value occurs.
            documents: of "tf_idf", in how many rows.
            number: of rows.

        Raises:
            ConfigError: the vocabulary was given.
        """
        if self.is_given:
            raise ConfigError(
                f"Cannot adapt layer '{self._display_name}' after setting a static vocabulary via "
                "`vocabulary` argument or `set_vocabulary()` method."
            )
        for one in (self.mask_token, self.oov_token):
            counts.pop(one, None)
        ordered = sorted(counts, key=lambda one: (counts[one], one.encode() if isinstance(one, str) else one))[::-1]
        ordered = ordered if self.max_tokens is None else ordered[: self.max_tokens - self._first_known]
        weights = None
        if self.output_mode == "tf_idf":
            weights = np.log(1 + number / (1 + np.array([documents[one] for one in ordered], np.float64)))
        self.set_vocabulary(ordered, weights)
        self.is_given = False

    def _keys(self, values: Array) -> Array:
        """Return values in the vocabulary's type."""
        return values.astype(np.str_ if self._kind is str else np.int64)

    def _get_own_config(self) -> dict[str, Any]:
        """Return the arguments, with the vocabulary that `adapt` found."""
        weights = None if self.idf_weights is None else list(self.idf_weights[self._first_known :])
        return super()._get_own_config() | {"vocabulary": self.vocabulary, "idf_weights": weights}

    def _get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments, which `trainable` is not one of."""
        return {key: one for key, one in super()._get_config().items() if key != "trainable"}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Return the layer that `config` described.

        Raises:
            ConfigError: as `Layer.from_config`.
        """
        return super().from_config({key: one for key, one in config.items() if key not in cls._read})

    def _known(self) -> list[Any]:
        if not self._tokens:
            raise ConfigError(
                f"You must set the vocabulary of layer {self._display_name!r} before calling it: pass a "
                "`vocabulary` argument, or call `adapt` with some sample data."
            )
        return self._tokens

    def _encoded(self, places: Tensor) -> Tensor:
        """Return places as the mode has them."""
        if self.output_mode == "int":
            return places
        depth = self.max_tokens if self.pad_to_max_tokens else self.vocabulary_size()
        mode = "count" if self.output_mode == "tf_idf" else self.output_mode
        found = encoded(places, mode, depth, self.compute_dtype)
        if self.output_mode != "tf_idf":
            return found
        weights = np.pad(np.asarray(self.idf_weights), (0, depth - len(self.idf_weights)))
        return found * ops.cast(weights, found.dtype)

    def _counted(self, rows: Sequence[Sequence[Any]]) -> Tensor:
        """Return rows of different lengths as vectors of "multi_hot", "count" or "tf_idf".

        Raises:
            ConfigError: there is no vocabulary.
        """
        numbers = {one: place + self._first_known for place, one in enumerate(self._known())}
        depth = self.max_tokens if self.pad_to_max_tokens else self.vocabulary_size()
        found = np.zeros((len(rows), depth or 0), self.compute_dtype)
        for vector, row in zip(found, rows, strict=True):
            for one, count in Counter(row).items():
                if one != self.mask_token:
                    vector[numbers.get(one, self._first_unknown)] += count
        if self.output_mode == "multi_hot":
            found = np.minimum(found, 1)
        elif self.output_mode == "tf_idf":
            found[:, : len(self.idf_weights)] *= np.asarray(self.idf_weights)
        return ops.convert_to_tensor(found.astype(self.compute_dtype))

    def _all_known(self, values: Array, known: Array) -> None:
        """Check that there is nothing unknown where there is no place for it.

        Raises:
            ConfigError: there is.
        """
        if not known.all():
            raise ConfigError(
                "When `num_oov_indices=0` all inputs should be in vocabulary, found OOV values "
                f"{np.unique(values[~known])[:10].tolist()}, consider setting `num_oov_indices=1`."
            )

    def _of_unknown(self, values: Array) -> Array:
        """Return the places of values that are not known, by a hash."""
        return _buckets(values, self.num_oov_indices, self.salt) + self._first_unknown

    def _on_host(self, inputs: Any) -> Any:
        """Return places of values, or values of places, computed by NumPy."""
        tokens = self._known()
        values = on_host(self, inputs)
        if self.invert:
            table = np.array(self.get_vocabulary(), dtype=object)
            places = values.astype(np.int64)
            inside = (places >= 0) & (places < len(table))
            found = np.where(inside, table[np.where(inside, places, 0)], self.oov_token)
            return found.astype(np.str_) if self._kind is str else ops.convert_to_tensor(found.astype(np.int64))
        numbers = {one: place + self._first_known for place, one in enumerate(tokens)}
        if self.mask_token is not None:
            numbers[self.mask_token] = 0 if self.output_mode == "int" else -1
        keys = self._keys(values)
        different, at = np.unique(keys, return_inverse=True)
        known = np.array([one in numbers for one in different.tolist()], bool)
        places = np.array([numbers.get(one, 0) for one in different.tolist()], np.int64)
        if self.num_oov_indices == 0:
            self._all_known(different, known)
        elif self.num_oov_indices == 1:
            places[~known] = self._first_unknown
        elif not known.all():
            places[~known] = self._of_unknown(different[~known])
        return self._encoded(ops.convert_to_tensor(places[at].reshape(keys.shape)))


class StringLookup(_Lookup):
    """The places of texts in a vocabulary, or the other way round.

    Args:
        max_tokens: of the vocabulary at most, all places counted; None for any number.
        num_oov_indices: places of texts that are not known, by a hash; none makes them an error.
        mask_token: what becomes 0, and is left out of vectors; None for nothing.
        oov_token: what stands for unknown texts in the vocabulary.
        vocabulary: the texts in order; None for `adapt`, or `set_vocabulary`, which reads files.
        idf_weights: of "tf_idf", of each text.
        invert: return texts of places, as an array.
        output_mode: "int" (int64), "one_hot", "multi_hot", "count", or "tf_idf" for counts times weights.
        pad_to_max_tokens: make vectors as long as `max_tokens`.
        sparse: only False.
        encoding: only "utf-8".
        name: as `Layer`.
        salt: as of `Hashing`, for texts that are not known.
        options: of Keras' configurations.

    Raises:
        ConfigError: an argument is out of range, unknown or not supported.
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
        given = {key: one for key, one in locals().items() if key not in ("self", "__class__")}
        if encoding != "utf-8":
            raise ConfigError(f"not supported: encoding={encoding!r} of StringLookup; only 'utf-8'")
        super().__init__(given)
        self.encoding = encoding

    def __call__(self, inputs: Any, training: bool | None = None) -> Any:
        """Return places of texts, or vectors; inverted, an array of texts.

        Args:
            inputs: texts of any shape, an array or a list.
            training: without effect.

        Raises:
            ConfigError: there is no vocabulary, or the values are not known: inside a model.
        """
        return self._on_host(inputs)


class IntegerLookup(_Lookup):
    """The places of whole numbers in a vocabulary, or the other way round; also inside a model.

    Args:
        max_tokens: as of `StringLookup`, and so what follows.
        num_oov_indices: places of numbers that are not known.
        mask_token: what becomes 0.
        oov_token: what stands for unknown numbers in the vocabulary.
        vocabulary: the numbers in order.
        vocabulary_dtype: only "int64".
        idf_weights: of "tf_idf".
        invert: return numbers of places.
        output_mode: as above.
        sparse: only False.
        pad_to_max_tokens: as above.
        oov_method: how unknown numbers find their place: "floormod" by the rest of a division, "farmhash" by a hash, on
            the host alone.
        salt: of "farmhash".
        name: as `Layer`.

    Raises:
        ConfigError: an argument is out of range, unknown or not supported.
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
        given = {key: one for key, one in locals().items() if key not in ("self", "__class__")}
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
        super().__init__(given)
        self.vocabulary_dtype = vocabulary_dtype

    def _of_unknown(self, values: Array) -> Array:
        if self.oov_method == "farmhash":
            return super()._of_unknown(values)
        return values % self.num_oov_indices + self._first_unknown

    def call(self, inputs: Any) -> Any:
        """Return places of numbers, or vectors; inverted, the numbers of places.

        Args:
            inputs: whole numbers of any shape.

        Raises:
            ConfigError: there is no vocabulary; or a number is not known, and has no place.
        """
        tokens = self._known()
        if inputs.value is not None or (self.oov_method == "farmhash" and self.num_oov_indices > 1):
            return self._on_host(inputs)
        numbers = ops.cast(inputs, "int64")
        if self.invert:
            table = np.array(self.get_vocabulary(), np.int64)
            inside = ops.logical_and(numbers >= 0, numbers < len(table))
            return ops.where(inside, ops.take(table, ops.where(inside, numbers, 0)), self.oov_token)
        order = np.argsort(np.array(tokens, np.int64))
        table = np.array(tokens, np.int64)[order]
        at = ops.minimum(ops.cast(ops.searchsorted(table, numbers), "int64"), len(table) - 1)
        known = ops.equal(ops.take(table, at), numbers)
        unknown: Any = -1
        if self.num_oov_indices:
            unknown = ops.mod(numbers, self.num_oov_indices) + self._first_unknown
        places = ops.where(known, ops.take(order + self._first_known, at), unknown)
        if self.mask_token is not None:
            places = ops.where(ops.equal(numbers, self.mask_token), 0 if self.output_mode == "int" else -1, places)
        return self._encoded(places)
