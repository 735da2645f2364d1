"""MlflowCallback: logs settings and metrics to a run of MLflow."""

import os
import time
from collections.abc import Mapping
from typing import Any

from dptrain.callbacks.base import Callback, Logs
from dptrain.callbacks.models import rates_of
from dptrain.callbacks.ranks import on_rank_0
from dptrain.errors import ConfigError
from dptrain.runtime.extras import pip_install

# MLflow's limits: parameters per call, characters per value.
_MAX_PARAMS, _MAX_LETTERS = 100, 6000


class MlflowCallback(Callback):
    """Logs every epoch's losses, metrics and learning rate to a run of MLflow, on rank 0.

    A training that resumes from a checkpoint continues its MLflow run.

    Args:
        tracking_uri: server, database or folder ("file:///..."); None for MLflow's own setting.
        experiment_name: created if needed; None for MLflow's default experiment.
        run_name: of the new run.
        params: settings to log, by name.
        run_id: of a run to log to; None for the active run, or else a new one.

    Source of the name: mlflow.keras.MlflowCallback.
    """

    _same_on_all_ranks = ()

    def __init__(
        self,
        tracking_uri: str | None = None,
        experiment_name: str | None = None,
        run_name: str | None = None,
        params: Mapping[str, Any] | None = None,
        run_id: str | None = None,
    ) -> None:
        super().__init__()
        self.tracking_uri, self.experiment_name, self.run_name = tracking_uri, experiment_name, run_name
        self.run_id = run_id
        self._settings = dict(params or {})
        self._client: Any = None
        self._owns = False  # whether the run is to be ended here

    def state_dict(self) -> dict[str, Any]:
        """Return the run's id."""
        return {"run_id": self.run_id, "owns": self._owns}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume that run, before anything is logged."""
        self.run_id, self._owns = state["run_id"], state["owns"]

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Require MLflow. Collective."""
        on_rank_0(self, "MLflow", mlflow_module)

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Begin a run, once a resumed one would be known. Collective."""
        on_rank_0(self, "MLflow", self._begin)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Log the epoch, counted from 0. Collective."""
        on_rank_0(self, "MLflow", lambda: self._log(epoch, dict(logs or {})))

    def on_train_end(self, logs: Logs | None = None) -> None:
        """End the run. Collective."""
        on_rank_0(self, "MLflow", lambda: self._end("FINISHED"))

    def _release(self) -> None:
        """End the run as failed, after an error."""
        self._end("FAILED")

    def _begin(self) -> None:
        if self._client is not None:
            return
        mlflow = mlflow_module()
        if (self.tracking_uri or "").startswith(("file:", "/", ".")):
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow from 3.7 requires it for folders
        self._client = mlflow.MlflowClient(self.tracking_uri)
        active = mlflow.active_run()
        if self.run_id is not None:
            if self._owns:
                self._client.update_run(self.run_id, status="RUNNING")
            return
        if active is not None:
            self.run_id = active.info.run_id
        else:
            self.run_id = self._client.create_run(self._experiment(), run_name=self.run_name).info.run_id
            self._owns = True
        params = [mlflow.entities.Param(key, str(value)[:_MAX_LETTERS]) for key, value in self._settings.items()]
        for first in range(0, len(params), _MAX_PARAMS):
            self._client.log_batch(self.run_id, params=params[first : first + _MAX_PARAMS])

    def _experiment(self) -> str:
        name = self.experiment_name or "Default"
        experiment = self._client.get_experiment_by_name(name)
        identity: str = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        return identity

    def _log(self, epoch: int, logs: dict[str, Any]) -> None:
        entities, now = mlflow_module().entities, round(time.time() * 1000)
        values = logs | rates_of(self.model.optimizer)
        metrics = [entities.Metric(key, float(value), now, epoch) for key, value in values.items()]
        self._client.log_batch(self.run_id, metrics=metrics)

    def _end(self, status: str) -> None:
        client, self._client = self._client, None
        if client is not None and self._owns:
            client.set_terminated(self.run_id, status)


def mlflow_module() -> Any:
    """Import MLflow, or raise ConfigError."""
    try:
        import mlflow
        import mlflow.entities
    except ImportError as error:
        raise ConfigError(f"MlflowCallback needs MLflow: {pip_install('mlflow')}") from error
    return mlflow
