"""The arguments of `Model.fit`."""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Literal

from dptrain.batches.inputs import check_counts, check_frequency, check_numbers, refuse_split, rows_of_batch
from dptrain.callbacks import Callback
from dptrain.runtime.limits import limit
from dptrain.train.health import OnNonfinite


@dataclass(frozen=True)
class FitArguments:
    """The parameters of `fit`, in their order and with their defaults."""

    x: Any = None
    y: Any = None
    batch_size: int | None = None
    epochs: int = 1
    verbose: str | int = "auto"
    callbacks: Sequence[Callback] | None = None
    validation_split: float = 0.0
    validation_data: Any = None
    shuffle: bool | Literal["batch"] = True
    class_weight: Mapping[int, float] | None = None
    sample_weight: Any = None
    initial_epoch: int = 0
    steps_per_epoch: int | None = None
    validation_steps: int | None = None
    validation_batch_size: int | None = None
    validation_freq: int | Sequence[int] = 1
    _: KW_ONLY
    drop_last: bool = False
    on_nonfinite: OnNonfinite = "stop"
    skip_outliers: float | None = None
    digest_every: int | None = None

    def check(self) -> None:
        """Refuse numbers that are invalid for any data."""
        check_numbers(0, epochs=self.epochs, initial_epoch=self.initial_epoch)
        check_counts(batch_size=self.batch_size, steps_per_epoch=self.steps_per_epoch)
        check_counts(validation_batch_size=self.validation_batch_size, validation_steps=self.validation_steps)
        check_frequency(self.validation_freq)
        if self.digest_every is not None:
            check_numbers(0, digest_every=self.digest_every)
        if self.validation_split and self.validation_data is None:
            refuse_split(self.x, self.y, self.sample_weight)

    def within_limits(self, size: int | None, rows: int | None) -> "FitArguments":
        """Return these with no more epochs and steps than `config.set_max_epochs` and others allow.

        `size` is the rows of a batch, where known, `rows` those of the data, None if it makes its own batches.
        """
        epochs = min(self.epochs, limit("epochs") or self.epochs)
        size, steps = within_limit(size, self.steps_per_epoch, rows)
        return replace(self, epochs=epochs, batch_size=size, steps_per_epoch=steps)


def within_limit(size: int | None, steps: int | None, rows: int | None) -> tuple[int | None, int | None]:
    """Limit rows of a batch and steps to `config.set_max_steps_per_epoch`; see `within_limits`."""
    most = limit("steps_per_epoch")
    if most is None:
        return size, steps
    if rows is None:
        return size, min(steps or most, most)
    size = rows_of_batch(size, rows, steps)
    if steps is None and -(-rows // max(size, 1)) <= most:
        return size, None
    return size, min(steps or most, most)
