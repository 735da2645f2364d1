"""What stands for the optimizer of a model that was compiled without one."""

from collections.abc import Iterable
from typing import Any

from dptrain.errors import ConfigError
from dptrain.optimizers.base import Optimizer
from dptrain.program.tensor import Tensor, Variable

_REASON = "the model was compiled with optimizer=None, which trains nothing: call `compile` with an optimizer"


class AbsentOptimizer(Optimizer):
    """No optimizer: a model with it evaluates, and trains by steps of its own; it has no variables but its counter."""

    def __init__(self) -> None:
        super().__init__(0.0)

    def scale_loss(self, loss: Any) -> Any:
        """Refuse, before gradients are computed.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(_REASON)

    def get_config(self) -> dict[str, Any]:
        """Return no arguments: the constructor has none."""
        return {}

    def build(self, variables: Iterable[Variable]) -> None:
        """Make nothing."""
        self.built = True

    def update_step(self, gradient: Tensor, variable: Variable, learning_rate: Tensor) -> None:
        """Refuse.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(_REASON)
