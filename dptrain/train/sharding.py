"""Layouts of a model's variables over a mesh of ranks, and this rank's parts of them."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal, Protocol

import numpy as np

from dptrain.comm.base import Communicator
from dptrain.comm.mesh import BATCH, STAGE, MeshCommunicator
from dptrain.distribution.placing import layout_of
from dptrain.optimizers.base import Optimizer
from dptrain.program.pipeline.stage_assignment import with_slots
from dptrain.program.sharding.local import MeshPosition
from dptrain.program.sharding.mesh import Axes
from dptrain.program.sharding.messages import whole_of
from dptrain.program.tensor import Array, Variable
from dptrain.saving.parts import Part
from dptrain.train.replicas import gathered, kind_of, number_of, require_same_kind

# Sharded over the axis `BATCH`: optimizers' slots (ZeRO-1), or also weights (FSDP).
Sharded = Literal["optimizer", "weights"]
# The home of a variable that not every rank has: its sharding axes, or its stage.
Home = Axes | int
# So many elements along an axis on a rank make parts nearly equal.
_PARTS = 8


class Owner(Protocol):
    """The model that a sharding needs."""

    @property
    def weights(self) -> list[Variable]:
        """All weights."""

    @property
    def _all_optimizers(self) -> list[Optimizer]:
        """Optimizers of the weights."""


def layouts_of(
    owner: Owner,
    variables: Iterable[Variable],
    place: MeshPosition,
    shards: Sharded | None,
    requested: Callable[[Variable, Variable | None], Axes | None],
) -> dict[Variable, Axes]:
    """Return the mesh axes of a model's sharded variables; `requested` returns the user's layout of a variable."""
    kinds: dict[Variable, Variable | None] = dict.fromkeys(owner.weights)
    for optimizer in owner._all_optimizers:
        kinds |= dict(optimizer._all_slots)
    layouts = {}
    for variable in variables:
        if variable not in kinds:
            continue
        axes = list(requested(variable, kinds[variable]) or (None,) * variable.ndim)
        if shards == "weights" or (shards == "optimizer" and kinds[variable] is not None):
            ranks = place.lengths[BATCH]
            free = [axis for axis, mesh in enumerate(axes) if mesh is None and variable.shape[axis] >= ranks > 1]
            if free and BATCH not in axes:
                # Along the first axis each part is one piece of memory; along the longest their lengths differ least.
                longest = max(free, key=lambda axis: (variable.shape[axis], -axis))
                axes[0 if 0 in free and variable.shape[0] >= _PARTS * ranks else longest] = BATCH
        if any(axes):
            place.check(variable, tuple(axes))
            layouts[variable] = tuple(axes)
    return layouts


def slots_of(owner: Owner) -> dict[Variable, list[Variable]]:
    """Return the slots of a model's trained weights."""
    slots: dict[Variable, list[Variable]] = {}
    for optimizer in owner._all_optimizers:
        for slot, weight in optimizer._all_slots:
            slots.setdefault(weight, []).append(slot)
    return slots


class Sharding:
    """Layouts of a model's variables, and variables with this rank's parts; a `Storage` of the whole ones.

    Reading a sharded variable gathers it: all ranks must read it.
    """

    def __init__(self, comm: MeshCommunicator, owner: Owner, shards: Sharded | None) -> None:
        self.comm, self._owner, self._shards = comm, owner, shards
        self.place = MeshPosition(comm.lengths, comm.coordinates)
        self._parts: dict[Variable, Variable] = {}
        self._homes: dict[Variable, Home] = {}
        self._stages: dict[Variable, int] = {}  # of weights
        self._sharded_over: dict[Variable, frozenset[str]] = {}  # by part
        self._fetched: dict[Variable, Array] = {}
        self._copies: dict[Variable, Variable] = {}

    # Layouts

    def layouts(self, variables: Iterable[Variable]) -> dict[Variable, Axes]:
        """Return the mesh axes of the sharded ones among these variables."""
        requested = list(variables)
        sharded = {variable: home for variable in requested if isinstance(home := self._homes.get(variable), tuple)}
        new = [variable for variable in requested if variable not in sharded]
        return sharded | layouts_of(self._owner, new, self.place, self._shards, layout_of)

    # Stages

    @property
    def stages(self) -> int:
        """Number of pipeline stages."""
        return self.place.lengths.get(STAGE, 1)

    @property
    def has_stages(self) -> bool:
        """Whether weights are assigned to stages."""
        return bool(self._stages)

    def assign(self, stages: Mapping[Variable, int]) -> None:
        """Assign weights, and with them their slots, to stages."""
        self._stages = dict(stages)

    def owners(self, variables: Iterable[Variable]) -> dict[Variable, int]:
        """Return the stages of the variables that only one stage has."""
        if not self._stages:
            return {}
        stages = with_slots(self._stages, self.slots())
        return {variable: stages[variable] for variable in variables if variable in stages}

    def slots(self) -> dict[Variable, list[Variable]]:
        """Return the slots of trained weights."""
        return slots_of(self._owner)

    @property
    def weights(self) -> list[Variable]:
        """Weights of the model."""
        return self._owner.weights

    # Parts

    def _divided(self, variables: Iterable[Variable]) -> dict[Variable, Home]:
        """Return the homes of the variables that not every rank has."""
        listed = list(variables)
        return {**self.layouts(listed), **self.owners(listed)}

    def parts(self, homes: Mapping[Variable, Home]) -> dict[Variable, Variable]:
        """Return the variables with this rank's parts, cut at first use; empty for another stage's."""
        for variable, home in homes.items():
            if variable not in self._parts:
                self._cut(variable, home, None if self._is_elsewhere(home) else variable.numpy())
        return {variable: self._parts[variable] for variable in homes}

    def _is_elsewhere(self, home: Home) -> bool:
        return not isinstance(home, tuple) and home != self.place.coordinates[STAGE]

    def _cut(self, variable: Variable, home: Home, value: Array | None) -> None:
        """Cut this rank's part out of a variable's value."""
        if value is None or self._is_elsewhere(home):
            content = np.empty(0, variable.dtype)
        else:
            content = value[self.place.key(variable.shape, home)] if isinstance(home, tuple) else value
        part = Variable(content, variable.name, variable.trainable)
        part._path, part.aggregation = variable._path, variable.aggregation
        self._parts[variable], self._homes[variable] = part, home
        over = home if isinstance(home, tuple) else (STAGE,)
        self._sharded_over[part] = frozenset(mesh for mesh in over if mesh is not None)
        variable._move(self)

    def copy(self, variable: Variable) -> Variable:
        """Return a variable of this rank for a copy of a sharded one's whole value."""
        if variable not in self._copies:
            self._copies[variable] = Variable(np.zeros(variable.shape, variable.dtype), variable.name, trainable=False)
            self._copies[variable]._path = variable._path
        return self._copies[variable]

    def forget_copies(self) -> list[Variable]:
        """Return and forget the variables that `copy` returned."""
        copies, self._copies = list(self._copies.values()), {}
        return copies

    def local(self, variables: Iterable[Variable]) -> list[Variable]:
        """Return this rank's variables in memory: the parts of the sharded ones."""
        listed = list(variables)
        parts = self.parts(self._divided(listed))
        return [parts.get(variable, variable) for variable in listed]

    def take(self, variables: Iterable[Variable]) -> None:
        """Shard the variables that should be and are not yet, by rank 0's values. Collective."""
        homes = self._divided(variables)
        new = [variable for variable in homes if variable not in self._parts]
        if not new:
            return
        require_same_kind(self.comm, new, gathered(self.comm, kind_of(new))[:, 0])
        for variable in new:  # one by one: together they may not fit into memory
            value = variable.numpy()
            digests = gathered(self.comm, number_of(value.reshape(-1).view(np.uint8).data))
            if (digests != digests[0]).any():
                self.comm.broadcast(value)
            self._cut(variable, homes[variable], value)

    def part(self, variable: Variable) -> Part:
        """Return this rank's part of a variable, and the ranks that share it. Collective at the first call."""
        (part,) = self.local([variable])
        whole, home = tuple(map(int, variable.shape)), self._homes.get(variable)
        axes = home if isinstance(home, tuple) else (None,) * len(whole)
        start = tuple(along.start or 0 for along in self.place.key(whole, axes))
        is_here = home is None or not self._is_elsewhere(home)
        return Part(part, start, whole, self.comm.sharing(self._over(part)), is_here)

    def by_group(self, variables: Iterable[Variable]) -> dict[Communicator, list[Variable]]:
        """Return this rank's variables by the group of ranks that share them. Collective."""
        groups: dict[Communicator, list[Variable]] = {}
        for variable in self.local(variables):
            groups.setdefault(self.comm.sharing(self._over(variable)), []).append(variable)
        return groups

    def name(self, variable: Variable) -> str:
        """Return a unique name of this rank's variable: its path, and coordinates of a part."""
        over = self._over(variable)
        if not over:
            return variable._path
        place = ", ".join(f"{axis} {self.place.coordinates[axis]}" for axis in self.place.lengths if axis in over)
        return f"{variable._path} of {place}"

    def groups(self, variables: Iterable[Variable]) -> list[tuple[list[list[int]], list[int]]]:
        """Return groups of ranks that share some of the variables, and the indices of these, on all ranks.

        The first are the variables that all ranks have, even if there are none.
        """
        numbers: dict[frozenset[str], list[int]] = {frozenset(): []}
        if self.stages > 1:
            numbers[frozenset([STAGE])] = []
        for number, variable in enumerate(variables):
            numbers.setdefault(self._over(variable), []).append(number)
        return [(self.comm.partition(axes), numbers[axes]) for axes in sorted(numbers, key=sorted)]

    def _over(self, variable: Variable) -> frozenset[str]:
        return self._sharded_over.get(variable, frozenset())

    # As a storage

    def read(self, variable: Variable) -> Array:
        """Return a variable's whole value. Collective, unless it was fetched."""
        if variable in self._fetched:
            return self._fetched[variable].copy()
        value, home = self._parts[variable].numpy(), self._homes[variable]
        if not isinstance(home, tuple):
            whole = np.empty(variable.shape, variable.dtype)
            sizes = [whole.size if stage == home else 0 for stage in range(self.stages)]
            self.comm.along(STAGE).all_gather(value.reshape(-1), whole.reshape(-1), sizes)
            return whole
        for axis, mesh in enumerate(home):
            if mesh is not None:
                counts = self.place.counts(mesh, variable.shape[axis])
                value = whole_of(value, axis, counts, self.comm.along(mesh))
        return value

    def write(self, variable: Variable, value: Array) -> None:
        """Replace this rank's part of a variable's value."""
        home = self._homes[variable]
        if isinstance(home, tuple):
            self._parts[variable].assign(value[self.place.key(variable.shape, home)])
        elif not self._is_elsewhere(home):
            self._parts[variable].assign(value)

    @contextmanager
    def fetched(self, variables: Callable[[], Sequence[Variable]], rank: int = 0) -> Iterator[None]:
        """Let one rank read whole variables alone while this context lasts. Collective."""
        for variable in variables():
            if variable.storage is self:
                value = self.read(variable)
                if self.comm.rank == rank:
                    self._fetched[variable] = value
        try:
            yield
        finally:
            self._fetched.clear()
