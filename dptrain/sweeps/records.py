"""The words of a sweep as plain records: what is trained, and how it ended."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

# The swept fields of a trial: name -> value, of what JSON can carry.
Setting = Mapping[str, Any]


class Status(StrEnum):
    """How a run stands after a segment."""

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
        """Whether the run will not go on."""
        return self is not Status.PAUSED

    @property
    def is_success(self) -> bool:
        """Whether nothing went wrong."""
        return self not in (Status.DIVERGED, Status.FAILED)


@dataclass(frozen=True)
class Trial:
    """One setting, over all its seeds.

    Attributes:
        number: from 0, in the order in which settings came up.
        setting: value of every swept field; the same fields in all trials.
    """

    number: int
    setting: Setting


@dataclass(frozen=True)
class Run:
    """One training: a setting, a seed and, in cross-validation, a fold.

    Attributes:
        number: from 0, in the order in which runs came up.
        trial: the trial's number.
        seed: of initial weights, order of the data and dropout; in cross-validation also of the folds.
        fold: which one is held out, from 0.
        folds: how many there are; 1 without cross-validation.
    """

    number: int
    trial: int
    seed: int
    fold: int = 0
    folds: int = 1

    @property
    def replicate(self) -> tuple[int, int]:
        """Which of its trial's runs it is: seed and fold, which trials are compared over."""
        return self.seed, self.fold

    @property
    def name(self) -> str:
        """Return "trial-3-seed-5" or "trial-3-seed-5-fold-2": of files."""
        return f"trial-{self.trial}-seed-{self.seed}" + (f"-fold-{self.fold + 1}" if self.folds > 1 else "")

    @property
    def label(self) -> str:
        """Return "seed 3", or "seed 3, fold 2/5"."""
        return f"seed {self.seed}" + (f", fold {self.fold + 1}/{self.folds}" if self.folds > 1 else "")


@dataclass(frozen=True)
class Segment:
    """Epochs of a run that are trained in one go.

    Attributes:
        run: the run.
        begin: epochs that are done before it, whose state is kept where this is not 0.
        end: epochs that are done after it; None for as many as the run's own configuration says.
        keep: whether its state is wanted even if the run has come to its end.
    """

    run: Run
    begin: int = 0
    end: int | None = None
    keep: bool = False


@dataclass(frozen=True)
class Ending:
    """How a segment ended.

    Attributes:
        run: the run.
        status: how the run stands.
        epochs: that it has done in all.
        seconds: that it has taken in all.
        metrics: the last values of the logs ("loss", "val_accuracy", ...); empty where no epoch was finished.
        reason: one line, where something went wrong.
        exit_code: of the error, where something went wrong, else 0.
    """

    run: Run
    status: Status
    epochs: int
    seconds: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""
    exit_code: int = 0
