"""Optimizers: what an update is, with no device code. A new one is one file here and one line in this one."""

from dptrain.optimizers.adam import Adam
from dptrain.optimizers.base import Optimizer
from dptrain.optimizers.rmsprop import RMSprop
from dptrain.optimizers.sgd import SGD
from dptrain.registry import lookup

# Names as Keras accepts them; the command line, serialisation and the test matrix read this table.
OPTIMIZERS: dict[str, type[Adam] | type[RMSprop] | type[SGD]] = {"adam": Adam, "rmsprop": RMSprop, "sgd": SGD}

__all__ = ["OPTIMIZERS", "SGD", "Adam", "Optimizer", "RMSprop", "get"]


def get(identifier: str | Optimizer) -> Optimizer:
    """Return the optimizer of that name with Keras' defaults, or the one given.

    Raises:
        ConfigError: no optimizer has that name.
    """
    return identifier if isinstance(identifier, Optimizer) else lookup("optimizer", identifier.lower(), OPTIMIZERS)()
