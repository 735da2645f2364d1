"""`keras.models`, and models from Keras."""

from typing import TYPE_CHECKING

from dptrain.models.cloning import clone_model
from dptrain.models.from_files import from_keras, load_model, model_from_json
from dptrain.models.model import Model
from dptrain.models.sequential import Sequential
from dptrain.registry.names import not_there
from dptrain.saving import save_model
from dptrain.saving.keras_config import MODELS

__all__ = ["Model", "Sequential", "clone_model", "from_keras", "load_model", "model_from_json", "save_model"]

MODELS |= {"Sequential": Sequential, "Functional": Model}

if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = not_there("models", __all__)
