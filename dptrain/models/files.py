"""A model's files and configuration: `save`, `load_weights`, `export` and others."""

import inspect
import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy.typing as npt

from dptrain import comm as comms
from dptrain.errors import ArgumentTypeError, ConfigError, printable
from dptrain.layers.base import build_shape
from dptrain.models.base import BaseModel
from dptrain.models.configuration import functional_config, functional_ends
from dptrain.program import tree
from dptrain.program.turns import TURNS
from dptrain.registry.names import lookup
from dptrain.registry.serialization import custom_object_scope, plain
from dptrain.runtime.failure import phase
from dptrain.runtime.output.terminal import say
from dptrain.saving import keras_2_config, keras_2_h5, keras_config, keras_h5, keras_zip, model_folder
from dptrain.saving.program import encode as encode_program
from dptrain.saving.reading import Loaded, share
from dptrain.saving.saveables import layers_with_stores
from dptrain.saving.weights import read_weights, require_ending, weights_encoder, write

T = TypeVar("T")
Array = npt.NDArray[Any]


class Files(BaseModel):
    """Adds files and configurations to models."""

    def _named_weights(self) -> dict[str, Array]:
        """Return copies of the weights by path ("dense/kernel")."""
        weights = self._weights_by_path()
        with TURNS.of(reads=frozenset(weights.values())):
            return {path: weight.numpy() for path, weight in weights.items()}

    def save(self, filepath: str | Path, overwrite: bool = True, zipped: bool | None = None) -> None:
        """Write the whole model to a `.keras` file, or to Keras 2's `.h5`. Collective; rank 0 writes.

        It holds layers, weights and, if the model is compiled, optimizer with its state, loss and metrics.

        Args:
            filepath: ends in `.keras`; or in `.h5` or `.hdf5`, which Keras 3 reads too, and where random layers start
                anew.
            overwrite: whether an existing file may be replaced; Keras would ask.
            zipped: False writes what a `.keras` file holds as files of a folder, `filepath`.

        Raises:
            ConfigError: another ending (for a folder, `.keras`), the input shape is unknown, or h5py is not installed.
            OutputError: the file exists, or the disk is full or denied; an existing file stays as it was.
            AgreedError: either of these, on all ranks, under mpirun.
        """
        if str(filepath).endswith((".h5", ".hdf5")):
            self._write_file(Path(filepath), lambda: keras_2_h5.encode(self), overwrite)
            return
        is_folder = zipped is False
        if is_folder and str(filepath).endswith(".keras"):
            raise ConfigError(
                "When using `zipped=False`, the `filepath` argument should not end in `.keras`. Received: "
                f"filepath={filepath}"
            )
        if not is_folder:
            require_ending(filepath, ".keras")
        if self._is_unbuilt and comms.current().rank == 0:
            warnings.warn(
                "You are saving a model that has not yet been built. It might not contain any weights yet. Consider "
                "building the model first by calling it on some data.",
                stacklevel=2,
            )
        self._write_file(
            Path(filepath),
            lambda: keras_zip.encode(self),
            overwrite,
            with_weights=not self._is_unbuilt,
            to_folder=model_folder.write if is_folder else None,
        )

    def save_weights(self, filepath: str | Path, overwrite: bool = True) -> None:
        """Write the weights to a `.weights.h5` (with the optimizer's state, like Keras) or `.safetensors` file.

        Collective; rank 0 writes. Arguments and errors are those of `save`.
        """
        encode = weights_encoder(Path(filepath))
        self._write_file(Path(filepath), lambda: encode(self), overwrite)

    def load_weights(self, filepath: str | Path, skip_mismatch: bool = False, *, by_name: bool | None = None) -> None:
        """Read weights from `.weights.h5`, `.safetensors`, `.keras` or Keras 2's `.h5`. Collective; rank 0 reads.

        Keras 2's files go by the order of layers, others by names. As in Keras, the optimizer's state in a Keras file
        is loaded if this model's has been used already. NaN in weights are loaded as they are.

        Args:
            filepath: its ending names the format.
            skip_mismatch: leave layers that do not match as they are, with a warning.
            by_name: for Keras 2's `.h5`: match layers by name, skipping those only in the file or only in the model.

        Raises:
            ConfigError: another ending, the input shape is unknown, h5py is not installed, or `by_name` for another
                kind of file.
            DataError: the file is missing or damaged, or names or shapes differ: lists every difference.
            AgreedError: either of these, on all ranks, under mpirun.
        """
        comm = comms.current()

        def read() -> Loaded | None:
            self._require_weights()
            if comm.rank != 0:
                return None
            used = self.compiled and int(self._compiled_optimizer.variables[0]) > 0
            path = Path(filepath)
            return read_weights(path, self, with_optimizer=used, skip_mismatch=skip_mismatch, by_name=by_name)

        with comms.meeting("load_weights"), phase.during("loading"):
            on_rank_0 = self._agreed(comm, "loading", read)
            loaded = share(comm, on_rank_0, keras_h5.stored_variables(self), layers_with_stores(self))
            loaded.assign()
        if comm.rank == 0:
            for line in loaded.warnings:
                warnings.warn(printable(line), stacklevel=2)

    def export(
        self,
        filepath: str | Path,
        format: str = "program",
        verbose: Any = None,
        *,
        overwrite: bool = True,
        length: int | None = None,
    ) -> None:
        """Write a program to a file that needs none of the model's Python. Collective; rank 0 writes.

        Args:
            filepath: any name.
            format: "program", that of `predict`, which `dptrain.saving.load_program` turns into a function, see
                `dptrain.saving.program`; "generation", that of `generate`, likewise; or "onnx", that of `predict` for
                ONNX Runtime and others, see `dptrain.saving.onnx_file`.
            verbose: whether rank 0 prints where the file is; by default not.
            overwrite: whether an existing file may be replaced.
            length: of the sequences that a generation writes, with their prompts; needed for models of any length.

        Raises:
            ConfigError: the input shape is unknown, the model uses a user's ops or ops that ONNX lacks, or the format
                is unknown or its library not installed.
            OutputError: see `save`.
            AgreedError: either of these, on all ranks, under mpirun.
        """
        formats: dict[str, Callable[[Any], bytes]] = {
            "program": encode_program,
            "generation": lambda model: model._encode_generation(length),
            "onnx": _encode_onnx,
        }
        encode = lookup("format", format, formats)
        if length is not None and format != "generation":
            raise ConfigError(f'export: length={length!r} is for format="generation"; found format={format!r}')
        self._write_file(Path(filepath), lambda: encode(self), overwrite)
        if verbose and comms.current().rank == 0:
            say(f"Saved artifact at '{filepath}'.")

    def _get_config(self) -> dict[str, Any]:
        """Return Keras' `Functional.get_config`, or a subclass's constructor arguments that are attributes."""
        if self._graph is not None and takes_graph(type(self)):
            return functional_config(self, self._require_graph())
        return super()._get_config()

    @classmethod
    def from_config(cls, config: Mapping[str, Any], custom_objects: Mapping[str, Any] | None = None) -> Self:
        """Return a new model from a `get_config` of dptrain, Keras or Keras 2; ConfigError names what is missing here.

        `custom_objects` are the user's classes by name.
        """
        if not isinstance(config, Mapping):
            raise ArgumentTypeError(
                f"Unable to revive model from config. Expected a dictionary of the arguments of {cls.__name__}, as "
                f"`get_config()` returns it. Received: config={config}"
            )
        with custom_object_scope(custom_objects):
            if not ({"layers", "input_layers", "output_layers"} <= set(config) and takes_graph(cls)):
                return super().from_config(config)
            config = keras_2_config.upgraded({"class_name": "Functional", "config": dict(config)})["config"]
            inputs, outputs, dtype = functional_ends(config)
            trainable = bool(config.get("trainable", True))
            make: Callable[..., Self] = cls
            model = make(inputs, outputs, name=config["name"], trainable=trainable)
            model._set_dtype(dtype)
            return model

    def get_build_config(self) -> dict[str, Any] | None:
        """Return what `build_from_config` needs in JSON: the "input_shape"; None before that is known."""
        shape = self._build_shape
        return None if shape is None else {"input_shape": shape}

    def build_from_config(self, config: Mapping[str, Any]) -> None:
        """Build the model from its `get_build_config`."""
        if config.get("input_shape") is not None:
            self.build(config["input_shape"])

    def get_compile_config(self) -> dict[str, Any]:
        """Return the arguments of `compile` in JSON, empty before; ConfigError if they include a lambda."""
        compiled = self._compiled
        return {} if compiled is None else keras_config.compile_config(compiled)

    def compile_from_config(self, config: Mapping[str, Any]) -> None:
        """Compile the model from a `get_compile_config`; ConfigError for what dptrain does not have."""
        arguments = keras_config.compile_arguments(config)
        if arguments is not None:
            self.compile(**arguments)

    def to_json(self, **kwargs: Any) -> str:
        """Return the model without weights as JSON, like config.json in a `.keras` file; `json.dumps` gets `kwargs`."""
        return json.dumps(keras_zip.model_config(self), **kwargs)

    @property
    def _build_shape(self) -> Any:
        """Shapes of the inputs in JSON, with None for the rows; None before they are known."""
        symbols = self._symbols if self._whole_graph is None else self._whole_graph.inputs
        return tree.map_leaves(lambda path, spec: plain(build_shape(spec)), symbols)

    @property
    def _is_unbuilt(self) -> bool:
        """Whether the model has no weights yet, nor the shape to make them for."""
        return self._awaits_shape and not any(layer._own_weights for layer in self._flatten_layers())

    @property
    def _awaits_shape(self) -> bool:
        """Whether the shape of a sample is still unknown."""
        return not self.built

    def _write_file(
        self,
        path: Path,
        encode: Callable[[], bytes],
        overwrite: bool,
        *,
        with_weights: bool = True,
        to_folder: Callable[..., None] | None = None,
    ) -> None:
        comm = comms.current()

        def at_once() -> bytes:  # of one moment, also beside the training of another thread
            with TURNS.of(reads=frozenset(keras_h5.stored_variables(self))):
                return encode()

        def action() -> None:
            if with_weights:
                self._require_weights()
            if comm.rank == 0:
                if to_folder is not None:
                    to_folder(path, at_once(), overwrite=overwrite)
                else:
                    write(path, at_once, overwrite=overwrite)

        with comms.meeting("save"), phase.during("saving"), self._readable_on(0):
            self._agreed(comm, "saving", action)

    def _require_weights(self) -> None:
        """Make the weights; ConfigError if the input shape is unknown."""
        if self._stack:
            self.build(None)
        if not self.weights and (not self.built or self._build_shape is None):
            raise ConfigError(f"model {self.name!r} has no weights yet: call it on data, or build(input_shape), first")
        if any(layer._name is None for layer in self._flatten_layers()):  # it was called, but not in a step
            self._adopt(self._model_seed)


def _encode_onnx(model: Any) -> bytes:
    from dptrain.saving import onnx_file  # its library is an extra

    return onnx_file.encode(model)


def takes_graph(cls: type[Any]) -> bool:
    """Whether a class is constructed from inputs and outputs, as `Model` is."""
    return list(inspect.signature(cls.__init__).parameters)[1:3] == ["inputs", "outputs"]
