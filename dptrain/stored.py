"""A model's weights as users read and set them, and its files (formats: `dptrain.saving`)."""

import json
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from dptrain import comm as comms
from dptrain.errors import ConfigError
from dptrain.network import Network
from dptrain.runtime.failure import phase
from dptrain.runtime.launcher import detect_launch
from dptrain.saving import keras_config, keras_zip
from dptrain.saving.snapshot import Loaded, OptimizerState, Snapshot, share
from dptrain.saving.weights import read_weights, require_ending, weights_encoder, write

Array = npt.NDArray[Any]


class StoredNetwork(Network):
    """A network whose weights can be read and set, and that goes into files and comes back."""

    # Weights

    def get_weights(self) -> list[Array]:
        """Return copies of the weights in Keras' order: [kernel, bias, ...], kernels as (inputs, outputs)."""
        flat = self._flat_weights()
        return [entry.view(flat).copy() for entry in self.architecture.layout.entries]

    def set_weights(self, weights: Sequence[Array]) -> None:
        """Set all weights, in the order of `get_weights`.

        Raises:
            ConfigError: their number or a shape differs from the model's (a ValueError, as in Keras).
        """
        entries = self.architecture.layout.entries
        if len(weights) != len(entries):
            raise ConfigError(
                f"You called `set_weights(weights)` on model {self.name!r} with a weight list of length "
                f"{len(weights)}, "
                f"but the model was expecting {len(entries)} weights."
            )
        flat = self._flat_weights()
        for entry, weight in zip(entries, weights, strict=True):
            array = np.asarray(weight)
            if array.shape != entry.shape:
                raise ConfigError(f"weight {entry.name!r}: expected shape {entry.shape}, found {array.shape}")
            entry.view(flat)[...] = array
        if self._replica is not None:
            self._replica.backend.write(self._replica.params, flat)
        self._weights = flat

    def named_weights(self) -> dict[str, Array]:
        """Return copies of the weights by name ("dense/kernel")."""
        names = [entry.name for entry in self.architecture.layout.entries]
        return dict(zip(names, self.get_weights(), strict=True))

    def count_params(self) -> int:
        """Return the number of weights."""
        return self.architecture.layout.count

    def summary(self) -> None:
        """Print the layers, their output shapes and numbers of weights, on rank 0."""
        launch = detect_launch()  # not the communicator: looking at a model need not start MPI
        if launch is None or launch.rank == 0:
            now = self.architecture.as_trainable_now(self.trainable)
            print(f'Model: "{self.name}"\n{now.summary()}')

    # Files

    def save(self, filepath: str | Path, overwrite: bool = True) -> None:
        """Write the whole model to a `.keras` file, which Keras 3 reads as well. Collective; rank 0 writes.

        It holds layers, weights and, if the model is compiled, optimizer with its state, loss and metrics.

        Args:
            filepath: ends in `.keras`.
            overwrite: whether an existing file may be replaced; Keras would ask.

        Raises:
            ConfigError: another ending, the model has no input shape yet, or h5py is not installed.
            OutputError: the file exists, or the disk is full or denied; an existing file stays as it was.
            AgreedError: either of these, on all ranks, under mpirun.
        """
        require_ending(filepath, ".keras")
        self._write_file(Path(filepath), keras_zip.encode, overwrite)

    def save_weights(self, filepath: str | Path, overwrite: bool = True) -> None:
        """Write the weights to a `.weights.h5` (with the optimizer's state, as Keras) or `.safetensors` file.

        Collective; rank 0 writes.

        Args:
            filepath: its ending says the format.
            overwrite: whether an existing file may be replaced; Keras would ask.

        Raises:
            ConfigError: as `save`.
            OutputError: as `save`.
            AgreedError: either of these, on all ranks, under mpirun.
        """
        self._write_file(Path(filepath), weights_encoder(Path(filepath)), overwrite)

    def load_weights(self, filepath: str | Path, skip_mismatch: bool = False) -> None:
        """Read weights from a `.weights.h5`, `.safetensors` or `.keras` file. Collective; rank 0 reads.

        As in Keras, the optimizer's state in a Keras file is taken over where this model's has been in use already.
        NaN in weights are loaded as they are.

        Args:
            filepath: its ending says the format.
            skip_mismatch: leave layers that do not fit as they are, with a warning.

        Raises:
            ConfigError: another ending, the model has no input shape yet, or h5py is not installed.
            DataError: the file is missing or damaged, or names or shapes differ: lists every difference.
            AgreedError: either of these, on all ranks, under mpirun.
        """
        comm = comms.current()
        phase.enter("loading")

        def read() -> Loaded | None:
            if comm.rank != 0:
                return None
            snapshot = self._snapshot()
            used = snapshot.state.iterations > 0
            return read_weights(Path(filepath), snapshot, with_optimizer=used, skip_mismatch=skip_mismatch)

        found = self._agreed(comm, "loading", read)
        loaded = share(comm, found, self.architecture.layout)
        self.take_loaded(loaded)
        phase.enter("user code")
        if comm.rank == 0:
            for line in loaded.warnings:
                warnings.warn(line, stacklevel=2)

    def take_loaded(self, loaded: Loaded) -> None:
        """Take over weights, and the optimizer's state if there is one, from a file; the same on all ranks."""
        self._weights = loaded.weights
        if self._replica is not None:
            self._replica.backend.write(self._replica.params, loaded.weights.astype(self._replica.backend.dtype))
        if loaded.state is None or self._compiled is None:
            return
        if loaded.state.learning_rate is not None:
            self._compiled[1].learning_rate = loaded.state.learning_rate
        self._optimizer_state = loaded.state
        if self._replica is not None:
            loaded.state.restore(self._replica)

    def get_config(self) -> dict[str, Any]:
        """Return name, layers and input shape as Keras' `Sequential.get_config` does."""
        shapes = None if self._awaits_shape() or not self._stack else self.architecture
        return keras_config.sequential_config(self.name, self.layers, shapes, self._dtype(), self.trainable)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """Return a new model of a `get_config`, of dptrain's or Keras'.

        Raises:
            ConfigError: it has what dptrain does not have; names it.
        """
        name, layers, _, trainable = keras_config.layers_of(config)
        return cls(layers, trainable=trainable, name=name)

    def to_json(self, **kwargs: Any) -> str:
        """Return the model without weights as JSON, the same as config.json in a `.keras` file.

        Args:
            kwargs: of `json.dumps`.
        """
        # Without a loss, as if it were not compiled: such steps are not in files either.
        compiled = None if self._compiled is None or self._without_loss() else self._compiled[:3]
        return json.dumps(keras_config.model_config(self.get_config(), compiled), **kwargs)

    def _write_file(self, path: Path, encode: Callable[[Snapshot], bytes], overwrite: bool) -> None:
        comm = comms.current()
        phase.enter("saving")

        def action() -> None:
            if comm.rank == 0:
                write(path, encode, self._snapshot().as_trainable_now(self.trainable), overwrite=overwrite)

        self._agreed(comm, "saving", action)
        phase.enter("user code")

    def _snapshot(self) -> Snapshot:
        """Return a copy of everything that goes into a file."""
        state = self._optimizer_state or OptimizerState()
        if self._replica is not None and self._compiled is not None:
            state = OptimizerState.of(self._replica)
        # Without a loss, as if it were not compiled: such steps are not in files either.
        compiled = None if self._compiled is None or self._without_loss() else self._compiled[:3]
        return Snapshot(self.name, self.seed, self._dtype(), self.architecture, self._flat_weights(), compiled, state)

    def _dtype(self) -> str:
        return "float32" if self._compiled is None else str(self._compiled[3]["dtype"])
