"""State that ops read when they are called, beside their operands."""

from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from dptrain.program.tensor import Tensor, Trace, Variable

# The current trace, or None if ops are executed when they are called.
TRACE: ContextVar["Trace | None"] = ContextVar("trace", default=None)
# Outside a trace, the values that variables have for now, and take; None if they keep their own.
LENT: ContextVar["dict[Variable, Tensor] | None"] = ContextVar("lent", default=None)
# How many gradient tapes are open.
TAPES: ContextVar[int] = ContextVar("tapes", default=0)
# The watcher of every value computed outside a trace.
WATCH: ContextVar["Callable[[Tensor], None] | None"] = ContextVar("watch", default=None)
# The type in which weights are read, or None for their own.
READ_IN: ContextVar["np.dtype[Any] | None"] = ContextVar("read_in", default=None)
# The layer in which ops are called, for their tensors' names.
SCOPE: ContextVar[str] = ContextVar("scope", default="")
