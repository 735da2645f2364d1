"""Every random draw as a function of (seed, purpose, position): no state to save, the same on every rank.

Source: J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011 (Philox4x64-10, as in NumPy).
The key is (seed, purpose); the counter's upper words are the position, its lowest word is what a draw consumes.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
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
    MODELS = 7
    REPORT = 8
    GENERATION = 9
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


# First position of weights made outside a model, after any model's.
_OUTSIDE = 2**32


class _Streams:
    """The default seed, and what has been drawn from it; `alike`: whether all models get this very seed."""

    def __init__(self, seed: int, alike: bool = False) -> None:
        self.seed, self.alike = seed, alike
        self.positions, self.models = count(_OUTSIDE), 0


_streams = _Streams(0)
_lock = threading.Lock()


def default_seed() -> int:
    """Return the seed of `set_default_seed`, by default 0."""
    return _streams.seed


def set_default_seed(seed: int) -> None:
    """Set the seed of models and of other random values; see `dptrain.utils.set_random_seed`."""
    global _streams
    _streams = _Streams(seed, _streams.alike)


@contextmanager
def seed_of_all_models(seed: int) -> Iterator[None]:
    """Give all models that are made here this seed; afterwards the streams go on as before."""
    global _streams
    before, _streams = _streams, _Streams(seed, alike=True)
    try:
        yield
    finally:
        _streams = before


@contextmanager
def keeping_model_seeds() -> Iterator[None]:
    """Let models that are made here, and get their weights elsewhere, not change the seeds of later ones."""
    streams = _streams
    models = streams.models
    try:
        yield
    finally:
        streams.models = models


def seeds_set() -> object:
    """Return an object that changes with each call of `set_default_seed`."""
    return _streams


def next_position() -> int:
    """Return a new position for random values outside models; `set_default_seed` restarts the count."""
    return next(_streams.positions)


def next_model_seed() -> int:
    """Return the seed of a new model without its own: the default seed first, then others that follow from it."""
    streams = _streams
    with _lock:
        index, streams.models = streams.models, streams.models + 1
    if streams.alike or not index:
        return streams.seed
    return int(stream(streams.seed, Purpose.MODELS, index).integers(2**63))
