"""History: the result of `fit`."""

from typing import Any

from dptrain.callbacks.base import Callback, Logs


class History(Callback):
    """Keeps the logs of every epoch.

    Attributes:
        epoch: the epochs, counted from 0.
        history: per log key the values in order of the epochs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.epoch: list[int] = []
        self.history: dict[str, list[float]] = {}

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Reset the epochs; the logs of earlier trainings stay, as in Keras."""
        self.epoch = []

    def state_dict(self) -> dict[str, Any]:
        """Return the epochs and their logs."""
        return {"epoch": self.epoch, "history": self.history}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore them."""
        self.epoch = list(state["epoch"])
        self.history = {key: list(values) for key, values in state["history"].items()}

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Append the logs."""
        self.epoch.append(epoch)
        for key, value in (logs or {}).items():
            self.history.setdefault(key, []).append(value)
