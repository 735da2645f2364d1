"""History: what `fit` returns."""

from dptrain.train.callbacks.base import Callback, Logs


class History(Callback):
    """Keeps the logs of every epoch.

    Attributes:
        epoch: the epochs, counted from 0.
        history: per log key the values in order of the epochs.
    """

    def __init__(self) -> None:
        self.epoch: list[int] = []
        self.history: dict[str, list[float]] = {}

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """Append the logs."""
        self.epoch.append(epoch)
        for key, value in logs.items():
            self.history.setdefault(key, []).append(value)
