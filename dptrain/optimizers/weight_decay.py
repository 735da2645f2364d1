"""Weight decay of an optimizer: which variables decay, and by how much."""

import re
from collections.abc import Callable, Iterable, Set

from dptrain.errors import ConfigError
from dptrain.program.tensor import Tensor, Variable


class Decaying:
    """An optimizer whose variables decay by `weight_decay` times the learning rate, but for excluded ones."""

    weight_decay: float | None
    built: bool
    _excluded: Set[Variable] = frozenset()
    _excluded_names: re.Pattern[str] | None = None

    def exclude_from_weight_decay(
        self, var_list: Iterable[Variable] | None = None, var_names: Iterable[str] | None = None
    ) -> None:
        """Exclude variables from weight decay, before the optimizer is built.

        Args:
            var_list: the variables.
            var_names: regular expressions to search for in a variable's own name ("bias").

        Raises:
            ConfigError: the optimizer is built.
        """
        if self.built:
            raise ConfigError(
                "`exclude_from_weight_decay()` can only be configued before the optimizer is built."  # Keras' spelling
            )
        self._excluded = set(var_list or ())
        names = sorted(set(var_names or ()))
        self._excluded_names = re.compile("|".join(names)) if names else None

    def _decays(self, variable: Variable) -> bool:
        return self.weight_decay is not None and not self._is_excluded(variable)

    def _is_excluded(self, variable: Variable) -> bool:
        named = self._excluded_names is not None and self._excluded_names.search(variable.name) is not None
        return variable in self._excluded or named

    def _decay_of(self, variable: Variable) -> Callable[[Tensor], Tensor] | None:
        """Return the decay factor of a variable as a function of the learning rate; None without decay."""
        return self._decay_factor if self._decays(variable) else None

    def _decay_factor(self, rate: Tensor) -> Tensor:
        return 1 - (self.weight_decay or 0) * rate
