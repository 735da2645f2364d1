"""Pruning schedules: when masks are updated, and how sparse weights are then."""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Self

from dptrain.errors import ConfigError


class PruningSchedule(ABC):
    """Sparsity as a function of the step, the number of updates that an optimizer has made.

    Masks are updated after `begin_step` updates, every `frequency` updates from there, and after `end_step`. A
    subclass, a dataclass, defines `sparsity`.

    Attributes:
        begin_step: 0 or more.
        end_step: after which masks stay unchanged; -1 for never.
        frequency: 1 or more.

    Raises:
        ConfigError: a field is out of range (a ValueError, as in TensorFlow Model Optimization).
    """

    begin_step: int
    end_step: int
    frequency: int

    def __post_init__(self) -> None:
        if self.begin_step < 0:
            raise ConfigError(f"begin_step should be >= 0, got {self.begin_step}")
        if self.end_step != -1 and self.end_step < self.begin_step:
            raise ConfigError(f"end_step should be >= begin_step or -1, got {self.begin_step} and {self.end_step}")
        if self.frequency <= 0:
            raise ConfigError(f"frequency should be > 0, got {self.frequency}")

    @abstractmethod
    def sparsity(self, step: int) -> float:
        """Return the share of zero weights after so many updates."""

    def __call__(self, step: int) -> tuple[bool, float]:
        """Return whether masks are updated after so many updates, and the sparsity."""
        return self.next_step(step - 1) == step, self.sparsity(step)

    def next_step(self, step: int) -> int | None:
        """Return the next number of updates, above `step`, at which masks are updated; None for never."""
        since = max(step - self.begin_step, -1) // self.frequency + 1
        following = self.begin_step + since * self.frequency
        if self.end_step == -1:
            return following
        return min(following, self.end_step) if step < self.end_step else None

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return dict(vars(self))

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Return a schedule with the arguments that `get_config` gave."""
        return cls(**config)


@dataclasses.dataclass(frozen=True)
class ConstantSparsity(PruningSchedule):
    """The same sparsity `target_sparsity`, 0 to below 1, from `begin_step` on; other arguments as `PruningSchedule`."""

    target_sparsity: float
    begin_step: int
    end_step: int = -1
    frequency: int = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sparsity("target_sparsity", self.target_sparsity)

    def sparsity(self, step: int) -> float:
        """Return `target_sparsity`."""
        return self.target_sparsity


@dataclasses.dataclass(frozen=True)
class PolynomialDecay(PruningSchedule):
    """Sparsity that grows fast at first and slowly in the end: s_f + (s_i - s_f) (1 - t)^power, t from 0 to 1.

    Source: M. Zhu and S. Gupta, "To prune, or not to prune: exploring the efficacy of pruning for model compression",
    2017.

    Args:
        initial_sparsity: s_i, 0 to below 1; final_sparsity: s_f, likewise.
        begin_step: of t = 0; end_step: of t = 1, above that. See `PruningSchedule`.
        power: above 0.
        frequency: as `PruningSchedule`.
    """

    initial_sparsity: float
    final_sparsity: float
    begin_step: int
    end_step: int
    power: float = 3
    frequency: int = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.end_step <= self.begin_step:
            raise ConfigError(f"end_step should be > begin_step, got {self.begin_step} and {self.end_step}")
        check_sparsity("initial_sparsity", self.initial_sparsity)
        check_sparsity("final_sparsity", self.final_sparsity)
        if self.power <= 0:
            raise ConfigError(f"power should be > 0, got {self.power}")

    def sparsity(self, step: int) -> float:
        """Return the sparsity of the formula."""
        t = (step - self.begin_step) / (self.end_step - self.begin_step)
        left = (1 - min(max(t, 0.0), 1.0)) ** self.power
        return self.final_sparsity + (self.initial_sparsity - self.final_sparsity) * float(left)


def check_sparsity(name: str, value: float) -> None:
    """Refuse a sparsity outside [0, 1)."""
    if not 0.0 <= value < 1.0:
        raise ConfigError(f"{name} must be in range [0, 1), got {value}")
