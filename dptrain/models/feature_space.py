"""FeatureSpace: encodes the columns of a table on the host."""

import io
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, Self

import numpy as np

from dptrain import comm as comms
from dptrain import layers, ops
from dptrain.batches.adapters import copied
from dptrain.errors import ConfigError
from dptrain.layers import Input, Layer
from dptrain.layers.preprocessing.lookups import on_host
from dptrain.program.tensor import Tensor
from dptrain.registry.serialization import Configurable
from dptrain.runtime.types import is_floating
from dptrain.saving import keras_h5, keras_zip
from dptrain.saving.weights import require_ending, write

_MODULE = "keras.src.layers.preprocessing.feature_space"
_MODES = ("int", "one_hot", "float")
_numbers = count()


def _described(value: Configurable) -> dict[str, Any]:
    """Return the description of an object of this module in Keras' files."""
    name = type(value).__name__
    return {"module": _MODULE, "class_name": name, "config": value._get_config(), "registered_name": name}


class Cross(Configurable):
    """Several features crossed into one category, by a hash.

    Args:
        feature_names: of the features.
        crossing_dim: number of categories.
        output_mode: "one_hot" or "int" (else ConfigError).
    """

    def __init__(self, feature_names: Sequence[str], crossing_dim: int, output_mode: str = "one_hot") -> None:
        if output_mode not in _MODES[:2]:
            raise ConfigError(
                "Invalid value for argument `output_mode`. Expected one of {'int', 'one_hot'}. Received: "
                f"output_mode={output_mode}"
            )
        self.feature_names, self.crossing_dim, self.output_mode = tuple(feature_names), crossing_dim, output_mode

    @property
    def name(self) -> str:
        """The names of the features, joined."""
        return "_X_".join(self.feature_names)

    def _get_config(self) -> dict[str, Any]:
        options = {"crossing_dim": self.crossing_dim, "output_mode": self.output_mode}
        return {"feature_names": list(self.feature_names), **options}


class Feature(Configurable):
    """How a column is encoded.

    Args:
        dtype: of the column: "float32", "int32" or "string".
        preprocessor: its layer, or a description of that.
        output_mode: "float", or for categories "int" or "one_hot" (else ConfigError).
    """

    def __init__(self, dtype: str, preprocessor: Any, output_mode: str) -> None:
        if output_mode not in _MODES:
            raise ConfigError(
                "Invalid value for argument `output_mode`. Expected one of {'int', 'one_hot', 'float'}. Received: "
                f"output_mode={output_mode}"
            )
        if isinstance(preprocessor, Mapping):
            if preprocessor.get("class_name") == "TFDIdentity":  # Keras' own
                preprocessor = {**preprocessor, "module": "keras.layers", "class_name": "Identity"}
                preprocessor["registered_name"], preprocessor["config"] = None, {}
            preprocessor = layers.deserialize(preprocessor)
        self.dtype, self.preprocessor, self.output_mode = dtype, preprocessor, output_mode

    def _get_config(self) -> dict[str, Any]:
        """Return the arguments, including what the layer adapted to."""
        described = layers.serialize(self.preprocessor)
        layer = self.preprocessor
        if isinstance(layer, layers.Normalization) and layer.input_mean is None and layer.built:
            mean, variance = (each.numpy().tolist() for each in (layer.adapt_mean, layer.adapt_variance))
            described["config"] |= {"mean": mean, "variance": variance}
        return {"dtype": self.dtype, "preprocessor": described, "output_mode": self.output_mode}


def _named(kind: str, name: str | None) -> str:
    return f"{name or f'{kind}_{next(_numbers)}'}_preprocessor"


class FeatureSpace(Layer):
    """Encodes the columns of a table, each by its own layer, as inputs of a network.

    It works on the host: call it on a dictionary of columns before `fit`, in a generator or a `PyDataset`. A model of
    the encoded features begins with `get_encoded_features()`.

    Args:
        features: for each column a `Feature`, or its kind: "float", "float_rescaled", "float_normalized",
            "float_discretized", "integer_categorical", "string_categorical", "integer_hashed", "string_hashed".
        output_mode: "concat" for one vector per row, "dict" for each feature by name.
        crosses: tuples of feature names, or `FeatureSpace.cross`, that form a category together.
        crossing_dim, hashing_dim, num_discretization_bins: categories of a cross, of hashed and of discretized
            features.
        name: of the layer.

    Raises:
        ConfigError: no features, or something unknown.
    """

    def __init__(
        self,
        features: Mapping[str, Any],
        output_mode: str = "concat",
        crosses: Sequence[Any] | None = None,
        crossing_dim: int = 32,
        hashing_dim: int = 32,
        num_discretization_bins: int = 32,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        if not features:
            raise ConfigError("The `features` argument cannot be None or empty.")
        if output_mode not in ("dict", "concat"):
            raise ConfigError(
                "Invalid value for argument `output_mode`. Expected one of {'dict', 'concat'}. Received: "
                f"output_mode={output_mode}"
            )
        self.output_mode, self.crossing_dim = output_mode, crossing_dim
        self.hashing_dim, self.num_discretization_bins = hashing_dim, num_discretization_bins
        self.features = {key: self._feature(key, feature) for key, feature in features.items()}
        self.crosses = [self._cross(cross) for cross in crosses or ()]
        self.preprocessors = {key: feature.preprocessor for key, feature in self.features.items()}
        self.crossers = {
            cross.name: layers.HashedCrossing(cross.crossing_dim, name=cross.name) for cross in self.crosses
        }
        self._encoded: Any = None
        self.built = True

    # Kinds of features

    @classmethod
    def cross(cls, feature_names: Sequence[str], crossing_dim: int, output_mode: str = "one_hot") -> Cross:
        """Describe a cross of several features."""
        return Cross(feature_names, crossing_dim, output_mode)

    @classmethod
    def feature(cls, dtype: str, preprocessor: Any, output_mode: str) -> Feature:
        """Describe a feature with a custom layer."""
        return Feature(dtype, preprocessor, output_mode)

    @classmethod
    def float(cls, name: str | None = None) -> Feature:
        """Describe a number that is passed unchanged."""
        return Feature("float32", layers.Identity(name=_named("float", name)), "float")

    @classmethod
    def float_rescaled(cls, scale: Any = 1.0, offset: Any = 0.0, name: str | None = None) -> Feature:
        """Describe a number times `scale` plus `offset`."""
        return Feature("float32", layers.Rescaling(scale, offset, name=_named("float_rescaled", name)), "float")

    @classmethod
    def float_normalized(cls, name: str | None = None) -> Feature:
        """Describe a number normalized to mean 0 and variance 1."""
        return Feature("float32", layers.Normalization(-1, name=_named("float_normalized", name)), "float")

    @classmethod
    def float_discretized(
        cls, num_bins: int | None, bin_boundaries: Any = None, output_mode: str = "one_hot", name: str | None = None
    ) -> Feature:
        """Describe a number as its bin, of equally many samples each, or between boundaries."""
        bins = layers.Discretization(bin_boundaries, num_bins, name=_named("float_discretized", name))
        return Feature("float32", bins, output_mode)

    @classmethod
    def integer_categorical(
        cls,
        max_tokens: int | None = None,
        num_oov_indices: int = 1,
        output_mode: str = "one_hot",
        name: str | None = None,
    ) -> Feature:
        """Describe an integer as its index in a vocabulary."""
        named = _named("integer_categorical", name)
        return Feature("int32", layers.IntegerLookup(max_tokens, num_oov_indices, name=named), output_mode)

    @classmethod
    def string_categorical(
        cls,
        max_tokens: int | None = None,
        num_oov_indices: int = 1,
        output_mode: str = "one_hot",
        name: str | None = None,
    ) -> Feature:
        """Describe a text as its index in a vocabulary."""
        named = _named("string_categorical", name)
        return Feature("string", layers.StringLookup(max_tokens, num_oov_indices, name=named), output_mode)

    @classmethod
    def string_hashed(cls, num_bins: int, output_mode: str = "one_hot", name: str | None = None) -> Feature:
        """Describe a text as its hash bin."""
        return Feature("string", layers.Hashing(num_bins, name=_named("string_hashed", name)), output_mode)

    @classmethod
    def integer_hashed(cls, num_bins: int, output_mode: str = "one_hot", name: str | None = None) -> Feature:
        """Describe an integer as its hash bin."""
        return Feature("int32", layers.Hashing(num_bins, name=_named("integer_hashed", name)), output_mode)

    def _feature(self, name: str, kind: Any) -> Feature:
        if isinstance(kind, Feature):
            return kind
        if isinstance(kind, Mapping):
            return Feature(**kind["config"])
        kinds = {
            **{kind: (getattr(self, kind), ()) for kind in ("float", "float_normalized", "float_rescaled")},
            "float_discretized": (self.float_discretized, (self.num_discretization_bins,)),
            **{kind: (getattr(self, kind), ()) for kind in ("integer_categorical", "string_categorical")},
            **{kind: (getattr(self, kind), (self.hashing_dim,)) for kind in ("integer_hashed", "string_hashed")},
        }
        if kind not in kinds:
            raise ConfigError(f"Invalid feature type: {kind}")
        make, arguments = kinds[kind]
        feature: Feature = make(*arguments, name=name)
        return feature

    def _cross(self, names: Any) -> Cross:
        if isinstance(names, Mapping):
            names = Cross(**names["config"])
        elif not isinstance(names, Cross):
            names = Cross(names, self.crossing_dim)
        cross: Cross = names
        if unknown := [name for name in cross.feature_names if name not in self.features]:
            raise ConfigError(
                "All features referenced in the `crosses` argument should be present in the `features` dict. Received "
                f"unknown features: {unknown}"
            )
        return cross

    # Adapting

    def _to_adapt(self) -> list[str]:
        """Return the features whose layers must adapt to data first."""
        waiting = []
        for name, layer in self.preprocessors.items():
            if isinstance(layer, layers.Normalization):
                waits = layer.input_mean is None and not layer.built
            elif isinstance(layer, layers.Discretization):
                waits = layer.bin_boundaries is None
            elif isinstance(layer, layers.IntegerLookup | layers.StringLookup):
                waits = layer.vocabulary is None
            else:
                continue
            if waits:
                waiting.append(name)
        return waiting

    def adapt(self, dataset: Any) -> None:
        """Adapt the layers without fixed vocabularies, bins or moments.

        `dataset` is a dictionary of columns, (rows,) or (rows, 1), or an iterable of such batches (else ConfigError).
        """
        batches = [dataset] if isinstance(dataset, Mapping) else [copied(batch) for batch in dataset]
        if not batches or any(not isinstance(batch, Mapping) for batch in batches):
            raise ConfigError(
                f"`adapt()` can only be called on a dict of arrays/lists, or such batches. Received: {type(dataset)}"
            )
        for name, layer in self.preprocessors.items():
            if hasattr(layer, "adapt") and self._learns(layer):
                columns = [self._column(batch[name]) for batch in batches]
                layer.adapt(np.concatenate(columns))
        self._encoded = None

    @staticmethod
    def _learns(layer: Any) -> bool:
        if isinstance(layer, layers.Normalization):
            return layer.input_mean is None
        if isinstance(layer, layers.Discretization):
            return layer.num_bins is not None
        return not (isinstance(layer, layers.IntegerLookup | layers.StringLookup) and layer.has_fixed_vocabulary)

    @staticmethod
    def _column(values: Any) -> Any:
        column = np.asarray(values)
        return column[:, None] if column.ndim == 1 else column

    # Encoding

    def __call__(self, data: Any) -> Any:
        """Return the encoded columns: a tensor, or with "dict" a tensor of each feature by name.

        `data` is a dictionary of columns, (rows,) or (rows, 1), or of the values of a single row.

        Raises:
            ConfigError: other data, a layer that has not been adapted, or features that cannot be concatenated.
        """
        if not isinstance(data, Mapping):
            raise ConfigError(
                f"A FeatureSpace can only be called with a dict. Received: data={data} (of type {type(data)}"
            )
        if waiting := self._to_adapt():
            raise ConfigError(
                "You need to call `.adapt(dataset)` on the FeatureSpace before you can start using it: "
                f"{', '.join(waiting)} of {self._display_name!r}"
            )
        if missing := [name for name in self.features if name not in data]:
            raise ConfigError(f"FeatureSpace {self._display_name!r}: no column {missing[0]!r}; found {', '.join(data)}")
        columns = {name: on_host(self, data[name]) for name in self.features}
        single = any(column.ndim == 0 for column in columns.values())
        features = {}
        for name, column in columns.items():
            values = column.reshape(1, 1) if column.ndim == 0 else self._column(column)
            numbers = self.features[name].dtype.startswith("float")
            features[name] = self.preprocessors[name](values.astype(np.float32) if numbers else values)
        crossed = {
            cross.name: self.crossers[cross.name]([features[n] for n in cross.feature_names]) for cross in self.crosses
        }
        encoded = {
            name: self._with_mode(name, tensor)
            for group in (features, crossed)
            for name, tensor in sorted(group.items())
        }
        if self.output_mode == "dict":
            return {name: tensor[0] if single else tensor for name, tensor in encoded.items()}
        for name, tensor in encoded.items():
            if not is_floating(tensor.dtype):
                raise ConfigError(
                    f"Cannot concatenate features because feature '{name}' has not been encoded (it has dtype "
                    f"{tensor.dtype.name}). Consider using `output_mode='dict'`."
                )
        joined = ops.concatenate(list(encoded.values()), -1)
        return joined[0] if single else joined

    def _with_mode(self, name: str, value: Tensor) -> Tensor:
        modes = {cross.name: cross.output_mode for cross in self.crosses}
        if (modes[name] if name in modes else self.features[name].output_mode) != "one_hot":
            return value
        if value.dtype.kind not in "iu":
            raise ConfigError(
                f"Feature '{name}' has `output_mode='one_hot'`. Thus its preprocessor should return an integer dtype. "
                f"Instead it returns a {value.dtype.name} dtype."
            )
        layer = self.crossers.get(name) or self.preprocessors[name]
        if isinstance(layer, layers.IntegerLookup | layers.StringLookup):
            classes = layer.vocabulary_size()
        elif isinstance(layer, layers.Discretization):
            classes = max(layer.num_bins or 0, len(layer.bin_boundaries or ()) + 1)  # few rows have fewer bins
        elif isinstance(layer, layers.Hashing | layers.HashedCrossing):
            classes = layer.num_bins
        elif isinstance(layer, layers.CategoryEncoding):
            classes = layer.num_tokens
        else:
            raise ConfigError(
                f"Feature '{name}' has `output_mode='one_hot'`. However it isn't a standard feature and the "
                "dimensionality of its output space is not known, thus it cannot be one-hot encoded. Try using "
                "`output_mode='int'`."
            )
        encoded: Tensor = layers.CategoryEncoding(classes, "multi_hot")(value)
        return encoded

    def get_encoded_features(self) -> Any:
        """Return symbolic tensors like the encoded features, as inputs of a model; ConfigError before `adapt`."""
        if self._encoded is None:
            samples = {"string": "", "int32": 0}
            row = {name: [samples.get(feature.dtype, 0.0)] for name, feature in self.features.items()}
            for name, layer in self.preprocessors.items():  # unknown values may be an error
                if isinstance(layer, layers.IntegerLookup | layers.StringLookup) and layer.vocabulary:
                    row[name] = layer.vocabulary[:1]
            encoded = self({name: np.array(value) for name, value in row.items()})

            def symbol(tensor: Tensor, name: str | None = None) -> Tensor:
                return Input(tuple(int(n) for n in tensor.shape[1:]), dtype=tensor.dtype.name, name=name)

            named = encoded.items() if isinstance(encoded, Mapping) else ()
            self._encoded = {name: symbol(tensor, name) for name, tensor in named} if named else symbol(encoded)
        return self._encoded

    def get_inputs(self) -> Any:
        """Raise ConfigError: the columns of a table do not go into a model."""
        raise ConfigError(
            "not supported: FeatureSpace.get_inputs(): texts stay on the host; call the space on the columns, and "
            "start the model with get_encoded_features()"
        )

    # Files

    def _get_config(self) -> dict[str, Any]:
        """Return the arguments, including what layers adapted to."""
        return {
            "features": {name: _described(feature) for name, feature in self.features.items()},
            "output_mode": self.output_mode,
            "crosses": [_described(cross) for cross in self.crosses],
            **{name: getattr(self, name) for name in ("crossing_dim", "hashing_dim", "num_discretization_bins")},
        }

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Return the space that `config` describes, adapted as it was."""
        return cls(**config)

    def save(self, filepath: str | Path, overwrite: bool = True) -> None:
        """Write the space to a `.keras` file, which `load_model` reads. Collective; rank 0 writes.

        Raises:
            ConfigError: another ending, or h5py is not installed.
            OutputError: the file exists and `overwrite` is False, or it cannot be written.
            AgreedError: either of these, on all ranks, under mpirun.
        """
        require_ending(filepath, ".keras")
        comm = comms.current()

        def action() -> None:
            if comm.rank == 0:
                write(Path(filepath), self._encode, overwrite=overwrite)

        action() if comm.size == 1 else comm.agree("saving", action)

    def _encode(self) -> bytes:
        config = {"module": "keras.utils", "class_name": "FeatureSpace", "config": self._get_config()}
        weights = io.BytesIO()
        with keras_h5.h5py_module().File(weights, "w"):
            pass  # layers have their adapted state in their arguments
        return keras_zip.archived(config | {"registered_name": "FeatureSpace"}, 0, weights.getvalue())
