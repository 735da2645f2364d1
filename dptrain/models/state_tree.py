"""A model's variables as nested dictionaries by their paths, Keras' `get_state_tree` and `set_state_tree`."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from dptrain.errors import ConfigError
from dptrain.program.tensor import Variable, constant

if TYPE_CHECKING:
    from dptrain.models.model import Model


def _variables(model: "Model") -> dict[str, list[Variable]]:
    return {
        "trainable_variables": model.trainable_variables,
        "non_trainable_variables": model.non_trainable_variables,
        "optimizer_variables": model.optimizer.variables if model.compiled else [],
        "metrics_variables": model.metrics_variables,
    }


def state_tree(model: "Model", value_format: str) -> dict[str, Any]:
    """Return the values of a model's variables, nested by their paths."""
    if value_format not in ("backend_tensor", "numpy_array"):
        raise ConfigError(
            "Invalid `value_format` argument. Expected one of {'numpy_array', 'backend_tensor'}. "
            f"Received: value_format={value_format}"
        )
    return {kind: _nested(variables, value_format) for kind, variables in _variables(model).items()}


def _nested(variables: Iterable[Variable], value_format: str) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for variable in variables:
        *outer, name = variable.path.split("/")
        inner = nested
        for word in outer:
            inner = inner.setdefault(word, {})
        if name in inner:
            raise ConfigError(
                f"The following variable path is found twice in the model: '{variable.path}'. `get_state_tree()` can "
                "only be called when all variable paths are unique. Make sure to give unique names to your layers (and "
                "other objects)."
            )
        value = variable.numpy()
        inner[name] = value if value_format == "numpy_array" else constant(value)
    return nested


def set_state_tree(model: "Model", tree: Mapping[str, Any]) -> None:
    """Give a model's variables the values of nested dictionaries; those without one keep theirs."""
    by_kind = _variables(model)
    for kind, nested in tree.items():
        if kind not in by_kind:
            raise ConfigError(f"Unknown variable name: {kind}")
        values = dict(_flat(nested))
        for variable in by_kind[kind]:
            if variable.path in values:
                variable.assign(values[variable.path])


def _flat(nested: Mapping[str, Any], path: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in nested.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{path}{key}/")
        else:
            yield f"{path}{key}", value
