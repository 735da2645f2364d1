"""Muon."""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from dptrain.errors import ConfigError
from dptrain.ops import matmul, power, sqrt, square, transpose
from dptrain.ops import sum as summed
from dptrain.ops.manipulation import unshard
from dptrain.optimizers.base import Optimizer, as_dtype, check_range
from dptrain.optimizers.schedules import LearningRateSchedule
from dptrain.optimizers.schedules.base import float64
from dptrain.program.tensor import Tensor, Variable


class Muon(Optimizer):
    """Momentum whose steps for matrices are nearly orthogonal; other variables follow Adam.

        m = momentum m + g;  u = g + momentum m with Nesterov's momentum, else m
        p -= learning_rate rms_rate sqrt(max(rows, columns)) orthogonal(u)

    orthogonal(u) is `ns_steps` steps of the Newton-Schulz iteration x = a x + (b x x^T + c (x x^T)^2) x from u / |u|,
    which brings all singular values near 1.

    Sources: K. Jordan, "Muon: an optimizer for the hidden layers of neural networks", 2024; J. Liu et al., "Muon is
    scalable for LLM training", 2025.

    Args:
        learning_rate, options: see `Optimizer`.
        adam_beta_1, adam_beta_2, epsilon: of Adam, see `Adam`.
        adam_weight_decay, weight_decay: of variables that follow Adam, and of the others.
        exclude_layers: regular expressions; variables with a match in their path follow Adam.
        exclude_embeddings: whether variables with "embedding" in their path follow Adam.
        muon_a, muon_b, muon_c: of the iteration.
        adam_lr_ratio: factor of Adam's learning rate.
        momentum: 0 to below 1.
        ns_steps: number of iterations.
        nesterov: use Nesterov's momentum.
        rms_rate: root mean square of a step over the learning rate; None for p -= learning_rate orthogonal(u).
    """

    def __init__(
        self,
        learning_rate: float | LearningRateSchedule = 0.001,
        adam_beta_1: float = 0.9,
        adam_beta_2: float = 0.999,
        adam_weight_decay: float | None = 0.004,
        epsilon: float = 1e-7,
        weight_decay: float | None = 0.004,
        exclude_layers: Sequence[str] | None = None,
        exclude_embeddings: bool = True,
        muon_a: float = 3.4445,
        muon_b: float = -4.775,
        muon_c: float = 2.0315,
        adam_lr_ratio: float = 1,
        momentum: float = 0.95,
        ns_steps: int = 5,
        nesterov: bool = True,
        rms_rate: float | None = 0.2,
        **options: Any,
    ) -> None:
        super().__init__(learning_rate, weight_decay, **options)
        self.adam_beta_1 = check_range("adam_beta_1", adam_beta_1, least=0.0, below=1.0)
        self.adam_beta_2 = check_range("adam_beta_2", adam_beta_2, least=0.0, below=1.0)
        self.epsilon = check_range("epsilon", epsilon, above=0.0)
        self.momentum = check_range("momentum", momentum, least=0.0, below=1.0)
        self.muon_a, self.muon_b, self.muon_c = (float(coefficient) for coefficient in (muon_a, muon_b, muon_c))
        self.adam_weight_decay, self.adam_lr_ratio, self.rms_rate = adam_weight_decay, adam_lr_ratio, rms_rate
        if isinstance(ns_steps, bool) or not isinstance(ns_steps, int) or ns_steps < 0:
            raise ConfigError(f"ns_steps = {ns_steps!r}: expected an integer of at least 0")
        self.ns_steps, self.nesterov, self.exclude_embeddings = ns_steps, bool(nesterov), bool(exclude_embeddings)
        self.exclude_layers = list(exclude_layers or [])

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments as Keras names and orders them."""
        config = super().get_config()
        names: tuple[str, ...] = (
            "adam_beta_1",
            "adam_beta_2",
            "epsilon",
            "exclude_layers",
            "muon_a",
            "muon_b",
            "muon_c",
        )
        names += ("adam_lr_ratio", "momentum", "ns_steps", "nesterov", "exclude_embeddings", "adam_weight_decay")
        common = {key: value for key, value in config.items() if key not in (*names, "rms_rate")}
        return common | {name: getattr(self, name) for name in (*names, "rms_rate")}

    def _follows_adam(self, variable: Variable) -> bool:
        """Return whether a variable is not a matrix, or excluded."""
        is_embedding = self.exclude_embeddings and "embedding" in variable.path.lower()
        excluded = is_embedding or any(re.search(pattern, variable.path) for pattern in self.exclude_layers)
        return len(variable.shape) != 2 or excluded

    def build(self, variables: Iterable[Variable]) -> None:
        """Create momentums, and second moments where Adam needs them."""
        variables = list(variables)
        super().build(variables)
        for variable in variables:
            self.add_optimizer_variables(
                [variable], ("momentum", "velocity") if self._follows_adam(variable) else "momentum"
            )

    def _decays(self, variable: Variable) -> bool:
        """Return whether Adam's or the other weight decay applies to a variable."""
        decay = self.adam_weight_decay if self._follows_adam(variable) else self.weight_decay
        return decay is not None and not self._is_excluded(variable)

    def _decay_of(self, variable: Variable) -> Callable[[Tensor], Tensor] | None:
        if not self._decays(variable):
            return None
        return self._adam_decay if self._follows_adam(variable) else self._decay_factor

    def _adam_decay(self, rate: Tensor) -> Tensor:
        return 1 - (self.adam_weight_decay or 0) * rate

    def update_step(self, gradient: Tensor, variable: Variable, learning_rate: Tensor) -> None:
        """Apply the update rule."""
        slots, dtype = self._slots_of(variable), variable.dtype
        m = slots["momentum"]
        if "velocity" in slots:
            v = slots["velocity"]
            m.assign_add((gradient - m) * (1 - self.adam_beta_1))
            v.assign_add((gradient * gradient - v) * (1 - self.adam_beta_2))
            variable.assign_sub(m / (sqrt(v) + self.epsilon) * self._number(self._alpha, learning_rate, dtype))
            return
        m.assign(m * self.momentum + gradient)
        update = self._orthogonal(gradient + m * self.momentum if self.nesterov else m.value)
        if self.rms_rate is not None:
            update = update * (math.sqrt(max(variable.shape)) * self.rms_rate)
        variable.assign_sub(update * self._number(float64, learning_rate, dtype))

    def _alpha(self, learning_rate: Tensor) -> Tensor:
        t = float64(self.iterations + 1)
        rate = learning_rate * self.adam_lr_ratio
        return rate * sqrt(1 - power(self.adam_beta_2, t)) / (1 - power(self.adam_beta_1, t))

    def _orthogonal(self, x: Tensor) -> Tensor:
        x = unshard(x)  # else each product would gather it
        is_high = x.shape[0] > x.shape[1]
        x = transpose(x) if is_high else x
        x = x / as_dtype(sqrt(summed(square(x))) + 1e-7, x.dtype)
        for _ in range(self.ns_steps):
            squared = matmul(x, transpose(x))
            x = x * self.muon_a + matmul(squared * self.muon_b + matmul(squared * self.muon_c, squared), x)
        return transpose(x) if is_high else x
