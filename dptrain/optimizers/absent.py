"""The optimizer of a model that was compiled without one."""

from collections.abc import Iterable
from typing import Any

from dptrain.errors import ConfigError
from dptrain.optimizers.base import Optimizer
from dptrain.program.tensor import Tensor, Variable

_REASON = "the model was compiled with optimizer=None, which trains nothing: call `compile` with an optimizer"


class AbsentOptimizer(Optimizer):
    """No optimizer: the model evaluates, or trains by its own steps; the counter is the only variable."""

    def __init__(self) -> None:
        super().__init__(0.0)

    def scale_loss(self, loss: Any) -> Any:
        """Raise ConfigError before gradients are computed."""
        raise ConfigError(_REASON)

    def get_config(self) -> dict[str, Any]:
        """Return {}."""
        return {}

    def build(self, variables: Iterable[Variable]) -> None:
        """Create nothing."""
        self.built = True

    def update_step(self, gradient: Tensor, variable: Variable, learning_rate: Tensor) -> None:
        """Raise ConfigError."""
        raise ConfigError(_REASON)
