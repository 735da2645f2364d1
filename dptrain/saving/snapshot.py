"""What of a model goes into a file and comes out of one."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from dptrain.comm import Communicator
from dptrain.losses import Loss
from dptrain.model import Architecture
from dptrain.optimizers import Optimizer
from dptrain.params import ParamLayout
from dptrain.saving.reading import Array

if TYPE_CHECKING:
    from dptrain.train.replica import Replica


# Metrics and weighted metrics as `compile` got them, and their keys in logs; loss, optimizer and these.
Measures = tuple[Any, Any, list[str]]
Compiled = tuple[Loss, Optimizer, Measures]


@dataclass
class OptimizerState:
    """Where an optimizer stands.

    Attributes:
        iterations: updates made.
        slots: flat buffers by name, as the replica's; empty before the first update.
        learning_rate: the one in use; None where the optimizer has its own, such as a schedule.
    """

    iterations: int = 0
    slots: dict[str, Array] = field(default_factory=dict)
    learning_rate: float | None = None

    @classmethod
    def of(cls, replica: "Replica") -> "OptimizerState":
        """Return a copy of a compiled replica's."""
        used = replica.iterations > 0
        slots = {name: replica.backend.download(buffer) for name, buffer in replica.slots.items()} if used else {}
        return cls(replica.iterations, slots)

    def rearranged(self, layout: ParamLayout, source: ParamLayout) -> "OptimizerState":
        """Return it laid out for a model with other trained parameters, from `source`; it stays the same."""
        slots = {name: layout.rearranged_slot(flat, source) for name, flat in self.slots.items()}
        return replace(self, slots=slots)

    def restore(self, replica: "Replica") -> None:
        """Give it to a replica that is compiled with the optimizer that it belongs to."""
        replica.iterations = self.iterations
        for name, flat in self.slots.items():
            replica.backend.write(replica.slots[name], flat.astype(replica.backend.dtype))


@dataclass(frozen=True)
class Snapshot:
    """A model on the host.

    Attributes:
        name: the model's.
        seed: of shuffling and dropout.
        dtype: "float32" or "float64".
        architecture: layers and shapes.
        weights: flat.
        compiled: loss, optimizer, and (metrics, weighted metrics, log keys) as `compile` got them; None before.
        state: the optimizer's.
    """

    name: str
    seed: int
    dtype: str
    architecture: Architecture
    weights: Array
    compiled: Compiled | None
    state: OptimizerState

    def as_trainable_now(self, trainable: bool) -> "Snapshot":
        """Return it laid out by what `trainable` of the model (as given) and of its layers says now."""
        before, now = self.architecture.layout, self.architecture.as_trainable_now(trainable)
        if now is self.architecture:
            return self
        weights, state = now.layout.rearranged(self.weights, before), self.state.rearranged(now.layout, before)
        return replace(self, architecture=now, weights=weights, state=state)

    def named_weights(self) -> Mapping[str, Array]:
        """Return the weights by name, in the model's dtype."""
        return self.architecture.layout.views(self.weights.astype(self.dtype))


@dataclass
class Loaded:
    """Weights and optimizer from a file.

    Attributes:
        weights: flat, float64.
        state: the optimizer's, where the file has it and it was asked for.
        warnings: what was left out, one line each.
    """

    weights: Array
    state: OptimizerState | None = None
    warnings: list[str] = field(default_factory=list)


def share(comm: Communicator, loaded: Loaded | None, layout: ParamLayout) -> Loaded:
    """Return rank 0's `loaded` on every rank. Collective.

    Args:
        comm: the ranks.
        loaded: on rank 0; None elsewhere.
        layout: of the model, the same on all ranks.
    """
    if comm.size == 1:
        assert loaded is not None
        return loaded
    fact = None
    if loaded is not None:
        state = loaded.state
        about = None if state is None else [state.iterations, state.learning_rate, list(state.slots)]
        fact = [about, loaded.warnings]
    about, warnings = comm.broadcast_fact(fact)
    weights = _shared(comm, None if loaded is None else loaded.weights, layout.full_size)
    if about is None:
        return Loaded(weights, None, warnings)
    iterations, learning_rate, names = about
    mine: dict[str, Any] = loaded.state.slots if loaded is not None and loaded.state is not None else {}
    slots = {name: _shared(comm, mine.get(name), layout.size) for name in names}
    return Loaded(weights, OptimizerState(iterations, slots, learning_rate), warnings)


def _shared(comm: Communicator, flat: Array | None, size: int) -> Array:
    buffer = np.empty(size) if flat is None else np.ascontiguousarray(flat, np.float64)
    comm.broadcast(buffer)
    return buffer
