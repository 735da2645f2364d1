"""Types of layers, under Keras' names: a policy says what a layer computes in and what its weights are kept in.

Both are the same so far, float32 or float64; policies of half precision are refused by name.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

from dptrain.errors import ConfigError
from dptrain.registry.names import not_there

__all__ = [
    "DTypePolicy",
    "Policy",
    "dtype_policy",
    "global_policy",
    "set_dtype_policy",
    "set_global_policy",
]

if not TYPE_CHECKING:  # for which any name would do
    __getattr__ = not_there("mixed_precision", __all__)

DTYPES = ("float32", "float64")


class DTypePolicy:
    """The types of a layer.

    Args:
        name: "float32" or "float64".

    Attributes:
        name: as above.
        compute_dtype: what the layer computes in.
        variable_dtype: what its weights are kept in.

    Raises:
        ConfigError: another name.
    """

    def __init__(self, name: str) -> None:
        if name not in DTYPES:
            raise ConfigError(f"not supported: dtype policy {name!r}; expected {' or '.join(map(repr, DTYPES))}")
        self.name = self.compute_dtype = self.variable_dtype = name

    def get_config(self) -> dict[str, Any]:
        """Return the name."""
        return {"name": self.name}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Return the policy of a `get_config`."""
        return cls(**config)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DTypePolicy) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        return f'<DTypePolicy "{self.name}">'


_global = DTypePolicy("float32")


def dtype_policy() -> DTypePolicy:
    """Return the policy of layers and models that are given none."""
    return _global


def set_dtype_policy(policy: str | DTypePolicy) -> None:
    """Set the policy of layers and models made from now on that are given none.

    Call it on every rank.

    Raises:
        ConfigError: there is no such policy.
    """
    global _global
    _global = policy if isinstance(policy, DTypePolicy) else DTypePolicy(policy)


Policy, global_policy, set_global_policy = DTypePolicy, dtype_policy, set_dtype_policy


def dtype_name(dtype: Any) -> str | None:
    """Return the type that an argument `dtype` of a layer or a model means; None where it means none.

    Args:
        dtype: a name, a NumPy type, a policy, or Keras' description of one.

    Raises:
        ConfigError: a type that there is not.
    """
    if isinstance(dtype, Mapping):
        inner = dtype.get("config")
        dtype = inner.get("name") if isinstance(inner, Mapping) else None
    name = dtype.name if isinstance(dtype, DTypePolicy) else getattr(dtype, "name", getattr(dtype, "__name__", dtype))
    if name not in (None, *DTYPES):
        raise ConfigError(f"not supported: dtype = {name!r}")
    return None if name is None else str(name)
