"""Which ending means which format, and how rank 0 writes: whole files or none."""

from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from dptrain.errors import ConfigError, OutputError
from dptrain.runtime.files import output_error, write_atomically
from dptrain.saving import keras_h5, keras_zip, safetensors_file
from dptrain.saving.reading import opened
from dptrain.saving.snapshot import Loaded, Snapshot

_ADVICE = "choose another path"


def require_ending(filepath: str | Path, ending: str) -> None:
    """Refuse a path with another ending.

    Raises:
        ConfigError: it has one (a ValueError, as in Keras).
    """
    if not Path(filepath).name.endswith(ending):
        raise ConfigError(f"The filename must end in `{ending}`. Received: filepath={filepath}")


def write(path: Path, encode: Callable[[Snapshot], bytes], snapshot: Snapshot, *, overwrite: bool) -> None:
    """Write a model's file under a temporary name, flush it, and rename it into place. On rank 0.

    Raises:
        ConfigError: a library that the format needs is not installed.
        OutputError: the file exists and must not be replaced, or the disk is full or denied; `errno` says which.
    """
    try:
        exists = path.exists()
    except OSError as error:
        raise output_error(path, error, advice=_ADVICE) from error
    if exists and not overwrite:
        raise OutputError(f"{path} exists; pass overwrite=True to replace it")
    write_atomically(path, encode(snapshot), advice=_ADVICE)


def weights_encoder(path: Path) -> Callable[[Snapshot], bytes]:
    """Return what makes the content of a file of weights, by the file's ending.

    Raises:
        ConfigError: an ending that is neither `.weights.h5` nor `.safetensors`.
    """
    if path.name.endswith(".weights.h5"):
        return keras_h5.encode
    if path.name.endswith(".safetensors"):
        return _encode_safetensors
    raise ConfigError(f"The filename must end in `.weights.h5` or `.safetensors`. Received: filepath={path}")


def read_weights(path: Path, model: Snapshot, *, with_optimizer: bool, skip_mismatch: bool) -> Loaded:
    """Read weights for a model.

    Args:
        path: ends in `.weights.h5`, `.safetensors` or `.keras`.
        model: as it is now, what stays where the file does not fit.
        with_optimizer: whether the optimizer's state is wanted, where the file has it.
        skip_mismatch: leave layers that do not fit as they are.

    Raises:
        ConfigError: another ending, or h5py is not installed.
        DataError: the file is missing or damaged, or names or shapes differ: lists every difference.
    """
    layers, layout = model.architecture.layers, model.architecture.layout
    flat = model.weights.astype("float64")
    if path.name.endswith(".safetensors"):
        problems = safetensors_file.load(path, layout, flat, skip_mismatch=skip_mismatch)
        return Loaded(flat, None, problems)
    zipped = path.name.endswith(".keras")
    if not zipped and not path.name.endswith(".weights.h5"):
        raise ConfigError(
            f"The filename must end in `.weights.h5`, `.safetensors` or `.keras`. Received: filepath={path}"
        )
    keras_h5.h5py_module()  # before the file is looked at, for whose faults there is another error
    optimizer = model.compiled[1] if model.compiled is not None and with_optimizer else None

    def load(file: BinaryIO) -> Loaded:
        return keras_h5.load(file, str(path), layers, layout, flat, optimizer=optimizer, skip_mismatch=skip_mismatch)

    if zipped:
        return load(keras_zip.open_weights(path))
    with opened(path, keras_h5.MAGIC, "Keras 3's weights (HDF5)") as file:
        return load(file)


def _encode_safetensors(snapshot: Snapshot) -> bytes:
    architecture = [{"class": type(one).__name__, "config": one.config()} for one in snapshot.architecture.layers]
    return safetensors_file.encode(snapshot.named_weights(), architecture)
