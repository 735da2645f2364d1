"""What callbacks do together with the other ranks' ones: speak once, write once, fail everywhere."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import TypeVar

from dptrain import comm as comms
from dptrain.callbacks.base import Callback
from dptrain.comm import Communicator
from dptrain.errors import printable

T = TypeVar("T")


def ranks_of(callback: Callback) -> Communicator:
    """Return the ranks on which a callback is called: the trainer's, or all of the job in a loop of the user's own."""
    return callback._trainer.comm if "_trainer" in vars(callback) else comms.current()


def say(callback: Callback, message: str) -> None:
    """Print a message on rank 0."""
    if ranks_of(callback).rank == 0:
        print(printable(message, "\n"), flush=True)


def on_all(callback: Callback, where: str, action: Callable[[], T]) -> T:
    """Run what may fail and return its result. Collective.

    Raises:
        AgreedError: it failed on any rank, on all of them; alone the error itself is raised, as in Keras.
    """
    comm = ranks_of(callback)
    return action() if comm.size == 1 else comm.agree(where, action)


def on_rank_0(callback: Callback, where: str, action: Callable[[], T], *, reads_model: bool = False) -> T | None:
    """Run what may fail on rank 0 alone and return its result there, None elsewhere. Collective.

    The other ranks wait: were they to go on, and rank 0 to fail, they would wait for it for ever in the next step.

    Args:
        callback: that is called.
        where: what is being done, for messages.
        action: as above.
        reads_model: it reads the model's variables, of which the other ranks may have parts.

    Raises:
        AgreedError: as `on_all`.
    """
    leads = ranks_of(callback).rank == 0
    with callback.model._readable_on(0) if reads_model and hasattr(callback.model, "_readable_on") else nullcontext():
        return on_all(callback, where, lambda: action() if leads else None)
