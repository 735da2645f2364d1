"""File formats by extension, and how rank 0 writes: whole files or none."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dptrain.errors import ConfigError, OutputError
from dptrain.layers.low_rank import file_value
from dptrain.registry.serialization import plain
from dptrain.runtime.storage.files import output_error, write_through_links
from dptrain.saving import keras_2_h5, keras_h5, keras_zip, safetensors_file
from dptrain.saving.reading import Loaded, opened

_ADVICE = "choose another path"


def require_ending(filepath: str | Path, ending: str) -> None:
    """Refuse a path with another extension (a ValueError, as in Keras)."""
    if not Path(filepath).name.endswith(ending):
        raise ConfigError(f"The filename must end in `{ending}`. Received: filepath={filepath}")


def write(path: Path, encode: Callable[[], bytes], *, overwrite: bool) -> None:
    """Write a file under a temporary name, flush it, and rename it into place. On rank 0."""
    try:
        exists = path.exists()
    except OSError as error:
        raise output_error(path, error, advice=_ADVICE) from error
    if exists and not overwrite:
        raise OutputError(f"{path} exists; pass overwrite=True to replace it")
    write_through_links(path, encode(), advice=_ADVICE)


def weights_encoder(path: Path) -> Callable[[Any], bytes]:
    """Return the encoder of a model's weights for a path's extension."""
    if path.name.endswith(".weights.h5"):
        return keras_h5.encode
    if path.name.endswith(".safetensors"):
        return encode_safetensors
    raise ConfigError(f"The filename must end in `.weights.h5` or `.safetensors`. Received: filepath={path}")


def read_weights(
    path: Path, model: Any, *, with_optimizer: bool, skip_mismatch: bool, by_name: bool | None = None
) -> Loaded:
    """Read weights for a model, and the optimizer's state where wanted and present."""
    of_keras_2 = path.name.endswith((".h5", ".hdf5")) and not path.name.endswith(".weights.h5")
    if by_name is not None and not of_keras_2:
        raise ConfigError(f"`by_name` only supports loading legacy '.h5' or '.hdf5' files. Received: {path}")
    if path.name.endswith(".safetensors"):
        return safetensors_file.load(path, model._weights_by_path(), skip_mismatch=skip_mismatch)
    zipped = path.name.endswith(".keras")
    if not zipped and not path.name.endswith((".h5", ".hdf5")):
        raise ConfigError(
            f"The filename must end in `.weights.h5`, `.h5`, `.safetensors` or `.keras`. Received: filepath={path}"
        )
    keras_h5.h5py_module()  # before reading the file, whose faults have another error
    options = {"with_optimizer": with_optimizer, "skip_mismatch": skip_mismatch}
    if zipped:
        return keras_h5.load(keras_zip.open_weights(path), str(path), model, **options)
    with opened(path, keras_h5.MAGIC, "Keras' weights (HDF5)") as file:
        if of_keras_2:
            return keras_2_h5.load(file, str(path), model, skip_mismatch=skip_mismatch, by_name=bool(by_name))
        return keras_h5.load(file, str(path), model, **options)


def encode_safetensors(model: Any) -> bytes:
    """Return the content of a `.safetensors` file of a model's weights, LoRA merged."""
    weights = {path: weight for path, weight in model._weights_by_path().items() if weight.if_missing == "refuse"}
    return safetensors_file.encode(
        {path: file_value(weight) for path, weight in weights.items()}, architecture_of(model)
    )


def architecture_of(model: Any) -> list[dict[str, Any]]:
    """Return class name and configuration of every layer, for people to read; unserializable ones are omitted."""
    architecture = []
    for layer in model.layers:
        try:
            config = plain(layer.get_config())
            json.dumps(config)
        except (ConfigError, NotImplementedError, TypeError):
            config = {}
        architecture.append({"class": type(layer).__name__, "config": config})
    return architecture
