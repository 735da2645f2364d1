"""Coordination of callbacks across ranks: print once, write once, fail everywhere."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import TypeVar

from dptrain import comm as comms
from dptrain.callbacks.base import Callback
from dptrain.comm import Communicator
from dptrain.errors import printable

T = TypeVar("T")


def ranks_of(callback: Callback) -> Communicator:
    """Return the ranks a callback runs on: the trainer's, or all in a user's own loop."""
    return callback._trainer.comm if "_trainer" in vars(callback) else comms.current()


def say(callback: Callback, message: str) -> None:
    """Print a message on rank 0."""
    if ranks_of(callback).rank == 0:
        print(printable(message, "\n"), flush=True)


def on_all(callback: Callback, where: str, action: Callable[[], T]) -> T:
    """Run an action that may fail and return its result; an error on any rank raises on all. Collective."""
    comm = ranks_of(callback)
    return action() if comm.size == 1 else comm.agree(where, action)


def on_rank_0(callback: Callback, where: str, action: Callable[[], T], *, reads_model: bool = False) -> T | None:
    """Run an action that may fail on rank 0 alone and return its result there, None elsewhere. Collective.

    The other ranks wait: otherwise, if rank 0 failed, they would wait for it forever in the next step. With
    `reads_model` the action may read variables that are sharded over the ranks.
    """
    leads = ranks_of(callback).rank == 0
    with callback.model._readable_on(0) if reads_model and hasattr(callback.model, "_readable_on") else nullcontext():
        return on_all(callback, where, lambda: action() if leads else None)
