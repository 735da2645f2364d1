"""Every random draw as a function of (seed, purpose, position): no state to save, the same on every rank.

Source: J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011 (Philox4x64-10, as in NumPy).
The key is (seed, purpose); the counter's upper words are the position, its lowest word is what a draw consumes.
"""

from enum import IntEnum
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np

from dptrain.errors import ConfigError
from dptrain.registry.names import not_there

# Keras' functions in `keras.random`, which are ops here.
_OPS = [
    *("SeedGenerator", "beta", "binomial", "categorical", "dropout", "gamma", "normal", "randint", "shuffle"),
    *("truncated_normal", "uniform"),
]

if not TYPE_CHECKING:  # type checkers would accept any name
    _missing = not_there("random", _OPS)

    def __getattr__(name: str) -> Any:
        if name not in _OPS:
            return _missing(name)
        from dptrain.ops import random  # it imports this module

        return getattr(random, name)


class Purpose(IntEnum):
    """The purpose of a stream of random numbers; two purposes never share numbers."""

    INITIALIZE = 1
    SHUFFLE = 2
    DROPOUT = 3
    SWEEP = 4
    HOLD_OUT = 5
    RESAMPLING = 6
    NOISE = 100  # for steps that users write


def stream(seed: int, purpose: Purpose, *position: int, offset: int = 0) -> np.random.Generator:
    """Return the generator at (seed, purpose, position).

    Args:
        seed: 0 to 2**64 - 1.
        purpose: what the numbers are for.
        position: up to three integers of 0 to 2**64 - 1, such as (epoch,) or (step, layer).
        offset: number of blocks of four 64-bit numbers to skip.
    """
    key = np.array([seed, int(purpose)], np.uint64)  # NumPy takes twice as long over lists
    counter = np.array([offset, *position, 0, 0, 0][:4], np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


def own_seed(seed: int | None) -> int | None:
    """Check and return a layer's or an initializer's seed; None stands for the run's."""
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**64):
        raise ConfigError(f"`seed` argument should be an integer of 0 to 2**64 - 1. Received: seed={seed}")
    return seed


_default_seed = 0
# First position of weights made outside a model, after any model's.
_OUTSIDE = 2**32
_positions = count(_OUTSIDE)


def default_seed() -> int:
    """Return the seed of `set_default_seed`, by default 0."""
    return _default_seed


def set_default_seed(seed: int) -> None:
    """Set the seed of models and of other random values; see `dptrain.utils.set_random_seed`."""
    global _default_seed, _positions
    _default_seed, _positions = seed, count(_OUTSIDE)


def seeds_set() -> object:
    """Return an object that changes with each call of `set_default_seed`."""
    return _positions


def next_position() -> int:
    """Return a new position for random values outside models; `set_default_seed` restarts the count."""
    return next(_positions)
