"""Dtype policies, under Keras' names: the dtypes of a layer's computations and of its weights."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any, Self

from dptrain.errors import ArgumentTypeError, ConfigError
from dptrain.registry.names import not_there
from dptrain.runtime.floatx import floatx
from dptrain.runtime.types import POLICY_TYPES, TYPES

__all__ = [
    "DTypePolicy",
    "Policy",
    "dtype_policy",
    "global_policy",
    "set_dtype_policy",
    "set_global_policy",
]

_missing = not_there("mixed_precision", __all__)


def __getattr__(name: str) -> Any:
    """Return Keras' names of other modules' classes."""
    return getattr(import_module("dptrain.optimizers"), name) if name == "LossScaleOptimizer" else _missing(name)


# Compute type and variable type of each policy.
POLICIES = {known.name: (known.name, known.name) for known in POLICY_TYPES} | {
    f"mixed_{known.name}": (known.name, known.compute.name) for known in POLICY_TYPES if known.is_narrow
}


class DTypePolicy:
    """The types of a layer.

    Half precision, bfloat16 or float16, is for storing tensors; computations, including sums, are done in float32 and
    rounded once. A mixed policy keeps weights, and so an optimizer's slots, in float32.

    Source: P. Micikevicius et al., "Mixed precision training", ICLR 2018.

    Args:
        name: "float32", "float64", "bfloat16", "float16", "mixed_bfloat16" or "mixed_float16" (else ConfigError);
            None for that of `dtype_policy()`.

    Attributes:
        name: of the policy.
        compute_dtype: of the layer's computations.
        variable_dtype: of its weights.
    """

    def __init__(self, name: str | None = None) -> None:
        name = dtype_policy().name if name is None else name
        if not isinstance(name, str):
            raise ArgumentTypeError(
                f"'name' must be a string, such as 'mixed_float16'. Received: name={name} (of type {type(name)})"
            )
        if name not in POLICIES:
            raise ConfigError(f"not supported: dtype policy {name!r}; expected {', '.join(map(repr, POLICIES))}")
        self.name: str = name
        self.compute_dtype, self.variable_dtype = POLICIES[name]

    @property
    def _data_dtype(self) -> str:
        """The dtype of inputs, targets, losses and metrics: that of the weights, but never half precision."""
        return TYPES[self.variable_dtype].compute.name

    def get_config(self) -> dict[str, Any]:
        """Return the name."""
        return {"name": self.name}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Return the policy from a `get_config`."""
        return cls(**config)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DTypePolicy) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        return f'<DTypePolicy "{self.name}">'


_global: DTypePolicy | None = None


def dtype_policy() -> DTypePolicy:
    """Return the policy of layers and models without their own; until it is set, that of `dptrain.config.floatx`."""
    return DTypePolicy(floatx().name) if _global is None else _global


def set_dtype_policy(policy: str | DTypePolicy) -> None:
    """Set the policy (else ConfigError) of layers and models made later without their own; call it on every rank."""
    global _global
    if not isinstance(policy, DTypePolicy | str):
        raise ConfigError(
            "Invalid `policy` argument. Expected the string name of a policy (such as 'mixed_float16') or a "
            f"`DTypePolicy` instance. Received: policy={policy} (of type {type(policy)})"
        )
    _global = policy if isinstance(policy, DTypePolicy) else DTypePolicy(policy)


def forget_dtype_policy() -> None:
    """Let the global policy be that of `dptrain.config.floatx` again."""
    global _global
    _global = None


Policy, global_policy, set_global_policy = DTypePolicy, dtype_policy, set_dtype_policy


def policy_of(dtype: Any) -> DTypePolicy | None:
    """Return the policy of an argument `dtype` (a name, NumPy dtype, policy or Keras' description); None for None."""
    if isinstance(dtype, DTypePolicy):
        return dtype
    name = policy_name(dtype)
    if name is not None and name not in POLICIES:
        raise ConfigError(f"not supported: dtype = {name!r}")
    return None if name is None else DTypePolicy(name)


def policy_name(dtype: Any) -> Any:
    """Return the policy's name in an argument `dtype`, unchecked; see `policy_of`."""
    if isinstance(dtype, Mapping):
        inner = dtype.get("config")
        dtype = inner.get("name") if isinstance(inner, Mapping) else None
    return getattr(dtype, "name", getattr(dtype, "__name__", dtype))
