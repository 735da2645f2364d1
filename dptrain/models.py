"""Models as Keras' `keras.models` has them, and from Keras."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from dptrain import comm as comms
from dptrain.comm import Communicator
from dptrain.errors import ConfigError
from dptrain.registry.names import not_there
from dptrain.runtime.failure import phase
from dptrain.saving import from_keras as live
from dptrain.saving import keras_config, keras_zip
from dptrain.saving.snapshot import share
from dptrain.sequential import Sequential

T = TypeVar("T")

__all__ = ["Sequential", "from_keras", "load_model"]

if not TYPE_CHECKING:  # for which any name would do
    __getattr__ = not_there("models", __all__)


def load_model(
    filepath: str | Path, custom_objects: None = None, compile: bool = True, safe_mode: bool = True, **options: Any
) -> Sequential:
    """Return the model in a `.keras` file of dptrain or Keras 3. Collective.

    Training goes on exactly where it stopped: weights, optimizer (iterations, learning rate, slots), loss, metrics
    and, in a file of dptrain's, the seed. NaN in weights are loaded as they are.

    Args:
        filepath: ends in `.keras`.
        custom_objects: dptrain has none; must be None.
        compile: whether to compile the model as it was.
        safe_mode: dptrain never runs code from a file; must be True.
        options: of `Sequential.compile` that a file does not have, such as device="cpu".

    Raises:
        ConfigError: an argument is not supported, or h5py is not installed.
        DataError: the file is missing or damaged, or has what dptrain does not have (other models than Sequential,
            other layers, custom objects); names it.
        AgreedError: either of these, on all ranks, under mpirun.
    """
    path = Path(filepath)
    if path.suffix != ".keras":
        raise ConfigError(f"Invalid filename: expected a `.keras` extension. Received: filepath={path}")
    if custom_objects or not safe_mode:
        raise ConfigError("not supported: custom_objects and safe_mode=False; dptrain runs no code from files")
    comm = comms.current()
    phase.enter("loading")
    file = _agreed(comm, lambda: keras_zip.read(path, compiled=compile) if comm.rank == 0 else None)
    config, seed = comm.broadcast_fact(None if file is None else [file.config, file.seed])
    name, layers, dtype, trainable = keras_config.layers_of(config["config"])
    model = Sequential(layers, trainable, name, seed=seed)
    compiled = keras_config.compiled_of(config.get("compile_config"))
    if compiled is not None:
        optimizer, loss, measured, weighted = compiled
        model.compile(optimizer, loss, metrics=measured, weighted_metrics=weighted, **({"dtype": dtype} | options))
    model.take_loaded(share(comm, None if file is None else file.loaded, model.architecture.layout))
    phase.enter("user code")
    if file is not None:
        _warn(file.loaded.warnings)
    return model


def from_keras(model: Any, *, compile: bool = True, seed: int | None = None, **options: Any) -> Sequential:
    """Return a live Keras 3 model as a dptrain model with the same weights. Collective; rank 0's weights count.

    Args:
        model: a Keras Sequential, or a Functional whose layers are a chain; only its methods are called, Keras is not
            imported.
        compile: whether to take over optimizer (with its state), loss and metrics as well.
        seed: of shuffling and dropout, as `Sequential`'s.
        options: of `Sequential.compile`, such as device="cpu".

    Raises:
        ConfigError: layers, an optimizer, a loss or metrics that dptrain does not have; names them.
        DataError: the weights are not those of the layers.
        AgreedError: either of these, on all ranks, under mpirun.
    """
    comm = comms.current()
    phase.enter("loading")
    found = _agreed(comm, lambda: live.take(model, compiled=compile))
    result = Sequential(found.layers, found.trainable, found.name, seed=seed)
    if found.compiled is not None:
        optimizer, loss, measured, weighted = found.compiled
        options = {"dtype": found.dtype} | options
        result.compile(optimizer, loss, metrics=measured, weighted_metrics=weighted, **options)
    if found.architecture is not None:
        result.take_loaded(share(comm, found.loaded if comm.rank == 0 else None, result.architecture.layout))
    phase.enter("user code")
    if found.loaded is not None and comm.rank == 0:
        _warn(found.loaded.warnings)
    return result


def _agreed(comm: Communicator, action: Callable[[], T]) -> T:
    """Alone an error is raised as it is, on N ranks it is raised on all."""
    return action() if comm.size == 1 else comm.agree("loading", action)


def _warn(lines: list[str]) -> None:
    for line in lines:
        warnings.warn(line, stacklevel=3)
