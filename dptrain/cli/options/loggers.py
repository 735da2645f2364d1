"""`--tensorboard`, `--mlflow`, `--wandb`, `--metrics-file`: logs to other tools; one that fails is disabled."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dptrain.callbacks import Callback, Logs, MetricsFile, MlflowCallback, Profiler, TensorBoard, WandbMetricsLogger
from dptrain.callbacks.metrics_file import prometheus_module
from dptrain.callbacks.mlflow_callback import mlflow_module
from dptrain.callbacks.ranks import ranks_of
from dptrain.callbacks.tensorboard import tensorboardx_module
from dptrain.callbacks.wandb_metrics_logger import wandb_module
from dptrain.cli.options.config import Config, leaves, to_dict
from dptrain.errors import ConfigError
from dptrain.runtime.failure import describe
from dptrain.runtime.output import terminal
from dptrain.saving.run_folder import STATE, TENSORBOARD, TRACE

# The value of an option that is given without one.
AUTO = "auto"


class BestEffort(Callback):
    """Calls another callback until it fails, on all ranks or none, then warns once and disables it."""

    _same_on_all_ranks = ("name",)

    def __init__(self, name: str, inner: Callback) -> None:
        super().__init__()
        self.name, self.inner, self.failed = name, inner, False

    def set_model(self, model: Any) -> None:
        """Forward the model."""
        super().set_model(model)
        self.inner.set_model(model)

    def _set_trainer(self, trainer: Any) -> None:
        super()._set_trainer(trainer)
        self.inner._set_trainer(trainer)

    def state_dict(self) -> dict[str, Any]:
        """Return the logger's name and state."""
        return {"name": self.name, "inner": {} if self.failed else self.inner.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the same logger's state."""
        if state["name"] == self.name and state["inner"]:
            self._attempt(lambda: self.inner.load_state_dict(state["inner"]))

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Forward the call."""
        self._attempt(lambda: self.inner.on_train_begin(logs))

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Forward the call."""
        self._attempt(lambda: self.inner.on_epoch_begin(epoch, logs))

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Forward the call."""
        self._attempt(lambda: self.inner.on_epoch_end(epoch, logs))

    def on_test_end(self, logs: Logs | None = None) -> None:
        """Forward the call."""
        self._attempt(lambda: self.inner.on_test_end(logs))

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Forward the call."""
        self._attempt(lambda: self.inner.on_train_end(logs))

    def _release(self) -> None:
        self._attempt(self.inner._release)

    def _attempt(self, action: Callable[[], None]) -> None:
        if self.failed:
            return
        try:
            action()
        except Exception as error:
            self.failed = True
            if ranks_of(self).rank == 0:
                text = f"{self.name} is disabled, and training continues: {describe(error)}"
                terminal.say(f"dptrain: warning: {text}", file=sys.stderr)


def loggers(config: Config, folder: str | None, name: str) -> list[Callback]:
    """Return the configured loggers; none in a fast dev run."""
    logging, callbacks = config.logging, list[Callback]()
    if config.fast_dev_run or folder is None:
        return []
    settings = {leaf.path: value for leaf in leaves() if (value := _at(config, leaf.path)) is not None}
    if logging.tensorboard is not None:
        tensorboardx_module()
        place = Path(folder) / TENSORBOARD if logging.tensorboard == AUTO else Path(logging.tensorboard) / name
        callbacks.append(BestEffort("TensorBoard", TensorBoard(place)))
    if logging.mlflow is not None:
        mlflow_module()
        uri = None if logging.mlflow == AUTO else logging.mlflow
        callbacks.append(BestEffort("MLflow", MlflowCallback(uri, "dptrain", name, settings)))
    if logging.wandb is not None:
        wandb = wandb_module()
        project = "dptrain" if logging.wandb == AUTO else logging.wandb
        quiet = wandb.Settings(silent=config.verbose == 0, console="off")
        init = {"project": project, "name": name, "config": settings, "dir": folder, "settings": quiet}
        callbacks.append(BestEffort("Weights & Biases", WandbMetricsLogger(init=init)))
    if logging.metrics_file is not None:
        prometheus_module()
        path = Path(folder) / STATE if logging.metrics_file == AUTO else Path(logging.metrics_file)
        callbacks.append(MetricsFile(path, name))
    profilers = [Profiler(logging.profile, Path(folder) / TRACE)] if logging.profile else []
    return [*callbacks, *profilers]


def refuse_in_a_sweep(config: Config) -> None:
    """Refuse loggers of single runs."""
    for name, value in to_dict(config)["logging"].items():
        if value is not None:
            advice = "leave it out: results.jsonl and trials.csv have every run's metrics"
            raise ConfigError(
                f"--{name.replace('_', '-')}: not supported in a sweep, where runs are packed together; {advice}"
            )


def _at(config: Any, path: str) -> Any:
    for key in path.split("."):
        config = getattr(config, key)
    return config
