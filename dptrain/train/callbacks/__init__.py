"""Callbacks. A new one is one file here and one line in this one."""

from dptrain.train.callbacks.base import Callback, CallbackList, Logs, StepLogs
from dptrain.train.callbacks.divergence import StopOnDivergence
from dptrain.train.callbacks.history import History
from dptrain.train.callbacks.progress import EpochPrinter, ProgressLine
from dptrain.train.callbacks.recorder import EpochRecorder

__all__ = [
    "Callback",
    "CallbackList",
    "EpochPrinter",
    "EpochRecorder",
    "History",
    "Logs",
    "ProgressLine",
    "StepLogs",
    "StopOnDivergence",
]
