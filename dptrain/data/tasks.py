"""The tasks (several classes, two classes, numbers) and the losses that fit each."""

from typing import Literal

from dptrain.errors import ConfigError
from dptrain.registry.names import suggestion

Task = Literal["multiclass", "binary", "regression"]

# Each task's losses; the first is the default.
LOSSES: dict[Task, tuple[str, ...]] = {
    "multiclass": ("sparse_categorical_crossentropy",),
    "binary": ("binary_crossentropy",),
    "regression": (
        *("mse", "mae", "huber", "log_cosh", "msle", "mape", "mean_squared_error", "mean_absolute_error"),
        *("mean_squared_logarithmic_error", "mean_absolute_percentage_error"),
    ),
}


def task_of_loss(loss: str) -> Task:
    """Return the task of a loss."""
    for task, losses in LOSSES.items():
        if loss in losses:
            return task
    all_losses = [name for losses in LOSSES.values() for name in losses]
    raise ConfigError(f"unknown loss {loss!r}{suggestion(loss, all_losses)}")


def requested_task(task: Task | None, loss: str | None) -> Task | None:
    """Return the task that `--task` or `--loss` implies, None for neither; refuse a contradiction."""
    by_loss = None if loss is None else task_of_loss(loss)
    if task is not None and by_loss not in (None, task):
        raise ConfigError(
            f"data.task = {task} and train.loss = {loss}: {loss} is for {by_loss}; use one of {', '.join(LOSSES[task])}"
        )
    return task or by_loss
