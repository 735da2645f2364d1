"""Kinds of parallelism, as layouts of a training step's variables for `place`."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from dptrain.program.program import Program
from dptrain.program.sharding.mesh import ALL_GATHER, ALL_REDUCE, BATCH, REDUCE_SCATTER, Axes
from dptrain.program.tensor import Variable

# The axis of a mesh over which tensor parallelism shards kernels.
MODEL = "model"
# Ops that are messages.
SENT = (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER)

Scheme = Literal["sharded", "hierarchical", "pipeline"]


@dataclass(frozen=True, eq=False)
class Parallelism:
    """A kind of parallelism: its name, layouts of variables that are not replicated, and its communication scheme."""

    name: str
    layouts: Mapping[Variable, Axes] = field(default_factory=dict)
    scheme: Scheme = "sharded"


def kinds_of_parallelism(program: Program, slots: Mapping[Variable, Collection[Variable]]) -> list[Parallelism]:
    """Return the kinds that are compared for a training step."""
    weights = [variable for variable in program.state if variable in slots]
    sharded = {slot: _longest(slot) for weight in weights for slot in slots[weight] if slot.shape}
    all_sharded = sharded | {weight: _longest(weight) for weight in weights if weight.shape}
    kernels = _alternating(weights)
    kernels |= {slot: axes for weight, axes in kernels.items() for slot in slots[weight] if slot.shape == weight.shape}
    return [
        Parallelism("data parallel"),
        Parallelism("hierarchical all-reduce", scheme="hierarchical"),
        Parallelism("ZeRO-1", sharded),
        Parallelism("FSDP", all_sharded),
        Parallelism("tensor parallel", kernels),
        Parallelism("pipeline", scheme="pipeline"),
    ]


def _longest(variable: Variable) -> Axes:
    """Shard the longest axis over `BATCH`."""
    longest = max(range(len(variable.shape)), key=lambda axis: variable.shape[axis])
    return tuple(BATCH if axis == longest else None for axis in range(len(variable.shape)))


def _alternating(weights: Sequence[Variable]) -> dict[Variable, Axes]:
    """Return Megatron's pairs: a kernel sharded by its outputs with the vectors behind it, then one by its inputs.

    Source: M. Shoeybi et al., "Megatron-LM", arXiv:1909.08053, section 3. A last kernel without a partner is
        replicated.
    """
    layouts: dict[Variable, Axes] = {}
    pending: list[Variable] = []  # by outputs, until the partner comes
    for weight in weights:
        if len(weight.shape) == 1 and pending and weight.shape[0] == pending[0].shape[-1]:
            pending.append(weight)
        elif len(weight.shape) > 1 and not pending:
            pending = [weight]
        elif len(weight.shape) > 1:
            layouts |= {
                weight_of_pair: (*(None,) * (len(weight_of_pair.shape) - 1), MODEL) for weight_of_pair in pending
            }
            layouts[weight] = (*(None,) * (len(weight.shape) - 2), MODEL, None)
            pending = []
    return layouts
