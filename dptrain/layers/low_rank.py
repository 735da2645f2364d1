"""The trained product of two narrow matrices that LoRA adds to a frozen one, and its sum with that for files."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dptrain.program.tensor import Variable

# Sums that layers read instead of their frozen matrices, while a program is exported.
_sums: ContextVar[dict[Variable, Variable] | None] = ContextVar("sums", default=None)


@dataclass(frozen=True, eq=False)
class LowRank:
    """scale * a @ b, with a (..., rank) and b (rank, columns)."""

    a: Variable
    b: Variable
    scale: float

    def merged(self, matrix: Variable) -> npt.NDArray[Any]:
        """Return the sum of a matrix and the product, in the type of the matrix; collective if they are sharded."""
        product = self.a.numpy().reshape(-1, self.b.shape[0]) @ self.b.numpy()
        total = matrix.numpy() + self.scale * product.reshape(matrix.shape)
        merged: npt.NDArray[Any] = total.astype(matrix.dtype)
        return merged


def file_value(variable: Variable) -> npt.NDArray[Any]:
    """Return what files of weights have of a variable."""
    merged: npt.NDArray[Any] = variable.numpy() if variable.low_rank is None else variable.low_rank.merged(variable)
    return merged


def read_without_file(variable: Variable) -> dict[Variable, npt.NDArray[Any]]:
    """Return the new value of a variable that a file of weights lacks, if it gets one."""
    return {variable: np.zeros(variable.shape, variable.dtype)} if variable.if_missing == "zero" else {}


def sum_of(matrix: Variable) -> Variable | None:
    """Return the variable that is read instead of a frozen matrix and the product; None in most programs."""
    sums = _sums.get()
    return None if sums is None else sums.get(matrix)


@contextmanager
def merging(variables: Iterable[Variable]) -> Iterator[None]:
    """Trace programs in this context that have one variable for each frozen matrix and its product."""
    sums = {}
    for variable in variables:
        if variable.low_rank is not None:
            sums[variable] = Variable(variable.low_rank.merged(variable), variable.name, trainable=False)
            sums[variable]._path, sums[variable].autocast = variable._path, variable.autocast
    token = _sums.set(sums)
    try:
        yield
    finally:
        _sums.reset(token)
