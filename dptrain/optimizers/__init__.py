"""Optimizers, without device code. A new one is a file, its name below, and in `OptimizerConfig` of `cli/options/`."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dptrain.errors import ConfigError
from dptrain.optimizers import schedules
from dptrain.optimizers.adadelta import Adadelta
from dptrain.optimizers.adafactor import Adafactor
from dptrain.optimizers.adagrad import Adagrad
from dptrain.optimizers.adam import Adam
from dptrain.optimizers.adamax import Adamax
from dptrain.optimizers.adamw import AdamW
from dptrain.optimizers.base import CLASSES, Optimizer
from dptrain.optimizers.ftrl import Ftrl
from dptrain.optimizers.lamb import Lamb
from dptrain.optimizers.lion import Lion
from dptrain.optimizers.loss_scale_optimizer import LossScaleOptimizer
from dptrain.optimizers.multi_optimizer import MultiOptimizer, OptimizerMap
from dptrain.optimizers.muon import Muon
from dptrain.optimizers.nadam import Nadam
from dptrain.optimizers.rmsprop import RMSprop
from dptrain.optimizers.schedule_free_adamw import ScheduleFreeAdamW
from dptrain.optimizers.sgd import SGD
from dptrain.registry import serialization
from dptrain.registry.names import not_there
from dptrain.registry.serialization import Registry

# Names as Keras accepts them; the command line, serialisation and the test matrix read this table.
OPTIMIZERS: dict[str, type[Any]] = {
    kind.__name__.lower(): kind
    for kind in (
        *(Adadelta, Adafactor, Adagrad, Adam, AdamW, Adamax, Ftrl, Lamb, Lion, Muon, Nadam, RMSprop),
        *(ScheduleFreeAdamW, SGD),
    )
}
CLASSES |= OPTIMIZERS | {"lossscaleoptimizer": LossScaleOptimizer, "multioptimizer": MultiOptimizer}

__all__ = [
    "CLASSES",
    "OPTIMIZERS",
    "SGD",
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Ftrl",
    "Lamb",
    "Lion",
    "LossScaleOptimizer",
    "MultiOptimizer",
    "Muon",
    "Nadam",
    "Optimizer",
    "OptimizerMap",
    "RMSprop",
    "ScheduleFreeAdamW",
    "deserialize",
    "get",
    "schedules",
    "serialize",
]

if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = not_there("optimizers", __all__)

# Only `serialize`: `get` and `deserialize` differ, as Keras takes names in any case and users' schedules.
serialize = Registry[Optimizer]("optimizer", "keras.optimizers", Optimizer, CLASSES).serialize


def get(identifier: Any) -> Any:
    """Return an optimizer by name (with Keras' defaults) or configuration, itself, or None; else ConfigError."""
    if identifier is None or isinstance(identifier, Optimizer):
        return identifier
    if isinstance(identifier, str):
        return deserialize({"class_name": identifier, "config": {}})
    if isinstance(identifier, Mapping):
        return deserialize(identifier)
    raise ConfigError(f"Could not interpret optimizer identifier: {identifier}")


def deserialize(config: Mapping[str, Any], custom_objects: Mapping[str, type[Any]] | None = None) -> Optimizer:
    """Return the optimizer that `serialize` or Keras described: "class_name", in any case, and "config".

    `custom_objects` are further classes by name. Raises ConfigError like `get`.
    """
    classes = CLASSES | dict(custom_objects or {})
    optimizer: Optimizer = serialization.from_description("optimizer", config, classes, custom_objects)
    return optimizer
