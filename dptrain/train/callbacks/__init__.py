"""Callbacks. A new one is one file here and one line in this one."""

from typing import TYPE_CHECKING

from dptrain.registry import not_there
from dptrain.train.callbacks.backup_and_restore import BackupAndRestore
from dptrain.train.callbacks.base import Callback, CallbackList, Logs, StepLogs
from dptrain.train.callbacks.csv_logger import CSVLogger
from dptrain.train.callbacks.divergence import StopOnDivergence
from dptrain.train.callbacks.early_stopping import EarlyStopping
from dptrain.train.callbacks.history import History
from dptrain.train.callbacks.lambda_callback import LambdaCallback
from dptrain.train.callbacks.learning_rate_scheduler import LearningRateScheduler
from dptrain.train.callbacks.model_checkpoint import ModelCheckpoint
from dptrain.train.callbacks.monitor import MonitorCallback
from dptrain.train.callbacks.progbar_logger import ProgbarLogger
from dptrain.train.callbacks.recorder import EpochRecorder
from dptrain.train.callbacks.reduce_lr_on_plateau import ReduceLROnPlateau
from dptrain.train.callbacks.tensorboard import TensorBoard
from dptrain.train.callbacks.terminate_on_nan import TerminateOnNaN

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
    "ModelCheckpoint",
    "MonitorCallback",
    "ProgbarLogger",
    "ReduceLROnPlateau",
    "StepLogs",
    "StopOnDivergence",
    "TensorBoard",
    "TerminateOnNaN",
]

if not TYPE_CHECKING:  # for which any name would do
    __getattr__ = not_there("callbacks", __all__)
