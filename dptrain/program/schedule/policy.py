"""What a backend wants of the fuser, as data: all in which the schedules of two backends may differ.

`backend/cuda/policy.py` is a GPU's. The CPU still has a fuser of its own (`codegen/fuse.py`). To use this one it needs
a policy that stores what two nests read (`recomputed` 0) and has no heavy frames; externs for BLAS products and for
functions of whole arrays; a renderer that binds rows to threads and columns to vectors, and keeps a row's elements
between passes instead of computing them again. Nests that reduce along rows and over them are new to the fuser then.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dptrain.program.schedule.nest import Axes, Frame
from dptrain.program.tensor import Tensor


@dataclass(frozen=True)
class Epilogue:
    """What a product's nest may compute from its elements, besides functions of each.

    Attributes:
        joins: reductions over its rows, as `Reduction.join`.
        updates: new values of variables.
    """

    joins: frozenset[str]
    updates: bool


@dataclass(frozen=True, eq=False)
class Policy:
    """How a backend wants a program to be fused.

    Attributes:
        recomputed: the most ops that several nests each compute again for an element; the result of more is stored.
        chain: the most ops in a chain that a nest computes again for each element.
        extern: returns the frame of the hand-written kernel that computes a tensor; None if statements do.
        operands: returns what that kernel, or a plain loop over terms, reads in memory.
        row_operand: returns the operand of which each row of an extern's result reads the same row alone, if any.
        epilogue: returns what may follow a product in its nest; None for nothing.
        reduction: returns the frame and the axes of a reduction's own nest, "map" for one over all elements; None if
            one thread alone reduces, or for other tensors.
        heavy: frames at whose level others, for which nobody waits, would have too few threads: they run later.
        earliest: frames that run as soon as they can.
    """

    recomputed: int
    chain: int
    extern: Callable[[Tensor], Frame | None]
    operands: Callable[[Tensor], Sequence[Tensor]]
    row_operand: Callable[[Tensor], Tensor | None]
    epilogue: Callable[[Tensor], Epilogue | None]
    reduction: Callable[[Tensor], tuple[Frame, Axes] | None]
    heavy: frozenset[Frame]
    earliest: frozenset[Frame]
