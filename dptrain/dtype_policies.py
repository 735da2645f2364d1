"""Keras' functions for dtype policies, which `dptrain.mixed_precision` defines."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dptrain.errors import ConfigError
from dptrain.mixed_precision import DTypePolicy, dtype_policy, policy_of
from dptrain.registry.names import not_there

# Its name in Keras 3.0.
FloatDTypePolicy = DTypePolicy

__all__ = ["DTypePolicy", "FloatDTypePolicy", "deserialize", "get", "serialize"]

if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = not_there("dtype_policies", __all__)


def get(identifier: Any) -> DTypePolicy:
    """Return the policy for a policy, its name, a NumPy type or Keras' description; the global one for None."""
    if isinstance(identifier, Mapping):
        return deserialize(identifier)
    policy = policy_of(identifier)
    return dtype_policy() if policy is None else policy


def serialize(dtype_policy: DTypePolicy) -> dict[str, Any]:
    """Return a policy as Keras writes it to JSON."""
    config = dtype_policy.get_config()
    return {"module": "keras", "class_name": "DTypePolicy", "config": config, "registered_name": None}


def deserialize(config: Mapping[str, Any], custom_objects: Mapping[str, Any] | None = None) -> DTypePolicy:
    """Return the policy that `serialize` or Keras described with "class_name" and "config".

    `custom_objects` are the user's subclasses by name; ConfigError for an unknown or unsupported policy.
    """
    name = config.get("class_name")
    classes: dict[Any, Any] = {"DTypePolicy": DTypePolicy, "FloatDTypePolicy": DTypePolicy, **(custom_objects or {})}
    if name not in classes or not isinstance(config.get("config"), Mapping):
        raise ConfigError(f"not supported: dtype policy {name!r}; expected {', '.join(map(repr, classes))}")
    policy: DTypePolicy = classes[name].from_config(config["config"])
    return policy
