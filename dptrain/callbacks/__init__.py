"""Callbacks. A new callback is a file here and a line below."""

from typing import TYPE_CHECKING

from dptrain.callbacks.backup_and_restore import BackupAndRestore
from dptrain.callbacks.base import Callback, CallbackList, Logs, StepLogs
from dptrain.callbacks.csv_logger import CSVLogger
from dptrain.callbacks.early_stopping import EarlyStopping
from dptrain.callbacks.history import History
from dptrain.callbacks.lambda_callback import LambdaCallback
from dptrain.callbacks.learning_rate_scheduler import LearningRateScheduler
from dptrain.callbacks.metrics_file import MetricsFile
from dptrain.callbacks.mlflow_callback import MlflowCallback
from dptrain.callbacks.model_checkpoint import ModelCheckpoint
from dptrain.callbacks.monitor import MonitorCallback
from dptrain.callbacks.profiler import Profiler
from dptrain.callbacks.progbar_logger import ProgbarLogger
from dptrain.callbacks.recorder import EpochRecorder
from dptrain.callbacks.reduce_lr_on_plateau import ReduceLROnPlateau
from dptrain.callbacks.swap_ema_weights import SwapEMAWeights
from dptrain.callbacks.tensorboard import TensorBoard
from dptrain.callbacks.terminate_on_nan import TerminateOnNaN
from dptrain.callbacks.wandb_metrics_logger import WandbMetricsLogger
from dptrain.registry.names import not_there

__all__ = [
    "BackupAndRestore",
    "CSVLogger",
    "Callback",
    "CallbackList",
    "EarlyStopping",
    "EpochRecorder",
    "History",
    "LambdaCallback",
    "LearningRateScheduler",
    "Logs",
    "MetricsFile",
    "MlflowCallback",
    "ModelCheckpoint",
    "MonitorCallback",
    "Profiler",
    "ProgbarLogger",
    "ReduceLROnPlateau",
    "StepLogs",
    "SwapEMAWeights",
    "TensorBoard",
    "TerminateOnNaN",
    "WandbMetricsLogger",
]

if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = not_there("callbacks", __all__)
