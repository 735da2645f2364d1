"""State that ops read when they are called, beside their operands."""

from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from dptrain.program.tensor import Tensor, Trace

# What is written down, or None where ops are executed when they are called.
TRACE: ContextVar["Trace | None"] = ContextVar("trace", default=None)
# How many gradient tapes are open.
TAPES: ContextVar[int] = ContextVar("tapes", default=0)
# What looks at every value that is computed outside of a trace.
WATCH: ContextVar["Callable[[Tensor], None] | None"] = ContextVar("watch", default=None)
# In which type weights are read, or None for that in which they are kept.
READ_IN: ContextVar["np.dtype[Any] | None"] = ContextVar("read_in", default=None)
# The layer that ops are called in, which their tensors are named after.
SCOPE: ContextVar[str] = ContextVar("scope", default="")
