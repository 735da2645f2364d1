"""Records of a sweep: trials, runs, segments and how they ended."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

# The swept fields of a trial: name -> value, of what JSON can carry.
Setting = Mapping[str, Any]


class Status(StrEnum):
    """State of a run after a segment."""

    # It waits at a rung for its trial to be promoted; its state is kept.
    PAUSED = "paused"
    DONE = "done"
    # It was paused, and its trial was never promoted.
    PRUNED = "pruned"
    # A loss or a parameter was not finite.
    DIVERGED = "diverged"
    FAILED = "failed"

    @property
    def is_final(self) -> bool:
        """Whether the run has ended for good."""
        return self is not Status.PAUSED

    @property
    def is_success(self) -> bool:
        """Whether nothing went wrong."""
        return self not in (Status.DIVERGED, Status.FAILED)


@dataclass(frozen=True)
class Trial:
    """One setting, over all its seeds."""

    number: int  # from 0, in order of appearance
    setting: Setting  # same fields in all trials


@dataclass(frozen=True)
class Run:
    """One training: a setting, a seed and, in cross-validation, a fold."""

    number: int  # from 0, in order of appearance
    trial: int  # number
    seed: int  # of initial weights, data order, dropout and folds
    fold: int = 0  # held out, from 0
    folds: int = 1  # 1 without cross-validation

    @property
    def replicate(self) -> tuple[int, int]:
        """Seed and fold, over which trials are compared."""
        return self.seed, self.fold

    @property
    def name(self) -> str:
        """Name in files: "trial-3-seed-5" or "trial-3-seed-5-fold-2"."""
        return f"trial-{self.trial}-seed-{self.seed}" + (f"-fold-{self.fold + 1}" if self.folds > 1 else "")

    @property
    def label(self) -> str:
        """Return "seed 3", or "seed 3, fold 2/5"."""
        return f"seed {self.seed}" + (f", fold {self.fold + 1}/{self.folds}" if self.folds > 1 else "")


@dataclass(frozen=True)
class Segment:
    """Epochs of a run that are trained in one go."""

    run: Run
    begin: int = 0  # finished epochs before it; their state is kept unless 0
    end: int | None = None  # finished epochs after it; None for the run's own number
    keep: bool = False  # whether the state of a finished run is wanted


@dataclass(frozen=True)
class Ending:
    """How a segment ended."""

    run: Run
    status: Status
    epochs: int  # in all
    seconds: float  # in all
    metrics: Mapping[str, float] = field(default_factory=dict)  # last values of the logs; empty before the first epoch
    reason: str = ""  # one line, of an error
    exit_code: int = 0  # of an error, else 0
