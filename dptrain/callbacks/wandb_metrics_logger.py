"""WandbMetricsLogger: logs settings and metrics to a run of Weights & Biases."""

from collections.abc import Mapping
from typing import Any

from dptrain.callbacks.base import Callback, Logs
from dptrain.callbacks.models import rates_of
from dptrain.callbacks.ranks import on_rank_0
from dptrain.errors import ConfigError
from dptrain.runtime.extras import pip_install


class WandbMetricsLogger(Callback):
    """Logs every epoch's losses, metrics and learning rate to a run of Weights & Biases, on rank 0.

    Keys are those of W&B's own callback: "epoch/loss", "epoch/learning_rate", ... over "epoch/epoch".

    Args:
        log_freq: "epoch" (else ConfigError).
        initial_global_step: added to the number of the epoch.
        init: keywords of `wandb.init` for a run that this callback begins, ends and resumes; None to log to the run
            that the script has begun with `wandb.init`.

    Source of the name: wandb.integration.keras.WandbMetricsLogger.
    """

    _same_on_all_ranks = ("log_freq", "initial_global_step")

    def __init__(
        self, log_freq: str = "epoch", initial_global_step: int = 0, init: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__()
        if log_freq != "epoch":
            raise ConfigError(f"not supported: log_freq={log_freq!r} of WandbMetricsLogger; expected 'epoch'")
        self.log_freq, self.initial_global_step = log_freq, initial_global_step
        self.init = None if init is None else dict(init)
        self._run: Any = None

    def state_dict(self) -> dict[str, Any]:
        """Return the id of the run that this callback began."""
        return {"id": None if self.init is None or self._run is None else self._run.id}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume that run, before anything is logged."""
        if self.init is not None:
            self.init |= {"id": state["id"], "resume": "allow"}

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Require wandb and the script's run. Collective."""
        on_rank_0(self, "Weights & Biases", self._check)

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Begin a run, once a resumed one would be known. Collective."""
        on_rank_0(self, "Weights & Biases", self._begin)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Log the epoch, counted from 0. Collective."""
        values = {f"epoch/{key}": value for key, value in (logs or {}).items()}
        number = {"epoch/epoch": self.initial_global_step + epoch}

        def log() -> None:
            rates = {f"epoch/{name}": rate for name, rate in rates_of(self.model.optimizer).items()}
            self._run.log(number | values | rates)

        on_rank_0(self, "Weights & Biases", log)

    def on_train_end(self, logs: Logs | None = None) -> None:
        """End the run that this callback began. Collective."""
        on_rank_0(self, "Weights & Biases", lambda: self._end(0))

    def _release(self) -> None:
        """End the run as failed, after an error."""
        self._end(1)

    def _check(self) -> None:
        if self.init is None and wandb_module().run is None:
            raise ConfigError("You must call `wandb.init()` before WandbMetricsLogger()")

    def _begin(self) -> None:
        if self._run is not None:
            return
        wandb = wandb_module()
        self._run = wandb.run if self.init is None else wandb.init(**self.init)
        self._run.define_metric("epoch/epoch")
        self._run.define_metric("epoch/*", step_metric="epoch/epoch")

    def _end(self, exit_code: int) -> None:
        run, self._run = self._run, None
        if run is not None and self.init is not None:
            run.finish(exit_code=exit_code)


def wandb_module() -> Any:
    """Import wandb, or raise ConfigError."""
    try:
        import wandb
    except ImportError as error:
        raise ConfigError(f"WandbMetricsLogger needs wandb: {pip_install('wandb')}") from error
    return wandb
