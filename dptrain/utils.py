"""Small helpers with Keras' names."""

from dptrain.data.py_dataset import PyDataset
from dptrain.errors import ConfigError
from dptrain.launcher import detect_launch

# Its name in Keras 2.
Sequence = PyDataset

__all__ = ["PyDataset", "Sequence", "check_seed", "default_seed", "set_random_seed"]

_default_seed = 0


def set_random_seed(seed: int) -> None:
    """Set the seed of models made from now on: initial weights, shuffling, dropout.

    Call it with the same seed on every rank.

    Args:
        seed: 0 to 2**63 - 1.

    Raises:
        ConfigError: the seed is out of range.
    """
    global _default_seed
    _default_seed = check_seed(seed)


def rank() -> int:
    """Return this process's number among those that the launcher started, 0 to `world_size` - 1; starts no MPI."""
    launch = detect_launch()
    return 0 if launch is None else launch.rank


def world_size() -> int:
    """Return how many processes the launcher started; starts no MPI."""
    launch = detect_launch()
    return 1 if launch is None else launch.size


def default_seed() -> int:
    """Return the seed that `set_random_seed` set, else 0."""
    return _default_seed


def check_seed(seed: int) -> int:
    """Return a seed that is in range.

    Raises:
        ConfigError: it is not.
    """
    if not 0 <= seed < 2**63:
        raise ConfigError(f"seed = {seed}: expected 0 to 2**63 - 1")
    return seed
