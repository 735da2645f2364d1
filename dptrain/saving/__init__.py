"""Weights, whole models and programs in files: safetensors, Keras' `.weights.h5` and `.keras`. No pickle anywhere.

Rank 0 reads and writes, and every rank takes part: rank 0's failure is every rank's, and it broadcasts what it read. So
a file may exist on one node only, ranks that see different files cannot diverge, and N readers do not load a shared
file system.
"""

from types import ModuleType
from typing import TYPE_CHECKING, Any

from dptrain.registry.names import not_there
from dptrain.registry.serialization import (
    custom_object_scope,
    get_custom_objects,
    get_registered_name,
    get_registered_object,
    register_keras_serializable,
)

if TYPE_CHECKING:
    from dptrain.models import Model
    from dptrain.models.exported import ExportedProgram

__all__ = [
    "CustomObjectScope",
    "custom_object_scope",
    "deserialize_keras_object",
    "get_custom_objects",
    "get_registered_name",
    "get_registered_object",
    "load_model",
    "load_program",
    "load_weights",
    "register_keras_serializable",
    "save_model",
    "save_weights",
    "serialize_keras_object",
]

CustomObjectScope = custom_object_scope

if not TYPE_CHECKING:  # a type checker would accept any name
    __getattr__ = not_there("saving", __all__)


def load_model(filepath: Any, *arguments: Any, **options: Any) -> "Model":
    """Return the model in a `.keras` file; the same as `dptrain.models.load_model`."""
    from dptrain import models  # above this package

    return models.load_model(filepath, *arguments, **options)


def save_model(model: "Model", filepath: Any, overwrite: bool = True, zipped: bool | None = None) -> None:
    """Write a model to a `.keras` file; the same as `model.save(filepath)`."""
    model.save(filepath, overwrite, **({} if zipped is None else {"zipped": zipped}))


def load_program(filepath: Any, **options: Any) -> "ExportedProgram":
    """Return the function that `model.export(filepath)` wrote; see `dptrain.models.exported.ExportedProgram`."""
    from dptrain.models.exported import ExportedProgram  # above this package

    return ExportedProgram(filepath, **options)


def save_weights(model: "Model", filepath: Any, overwrite: bool = True) -> None:
    """Write a model's weights to a file; the same as `model.save_weights(filepath)`."""
    model.save_weights(filepath, overwrite)


def load_weights(model: "Model", filepath: Any, skip_mismatch: bool = False, *, by_name: bool | None = None) -> None:
    """Read a model's weights from a file; the same as `model.load_weights(filepath)`."""
    model.load_weights(filepath, skip_mismatch, by_name=by_name)


def serialize_keras_object(obj: Any) -> Any:
    """Return a JSON description of an object; see `dptrain.saving.keras_config.serialize_keras_object`."""
    return _keras_config().serialize_keras_object(obj)


def deserialize_keras_object(config: Any, custom_objects: Any = None, safe_mode: bool = True) -> Any:
    """Return the object of a description; see `dptrain.saving.keras_config.deserialize_keras_object`."""
    return _keras_config().deserialize_keras_object(config, custom_objects, safe_mode)


def _keras_config() -> ModuleType:
    """Import the module of configurations and all classes that it can describe."""
    import dptrain.models  # noqa: F401  # above this package: it tells the module of its classes
    from dptrain.saving import keras_config

    return keras_config
