"""Which variables of a model are sharded over a mesh of ranks, and this rank's parts of them."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal, Protocol

import numpy as np

from dptrain.comm.base import Communicator
from dptrain.comm.mesh import BATCH, STAGE, MeshCommunicator
from dptrain.distribution.placing import layout_of
from dptrain.optimizers.base import Optimizer
from dptrain.program.cutting import with_slots
from dptrain.program.local import Place
from dptrain.program.mesh import Axes
from dptrain.program.messages import whole_of
from dptrain.program.tensor import Array, Variable
from dptrain.saving.parts import Part
from dptrain.train.replicas import gathered, kind_of, number_of, require_same_kind

# What is sharded over the axis `BATCH`: optimizers' slots (ZeRO-1), or weights as well (FSDP).
Sharded = Literal["optimizer", "weights"]
# Where a variable is that not every rank has: over which axes it is sharded, or on which stage it is.
Home = Axes | int
# How many elements of a rank's along an axis make parts nearly equal.
_PARTS = 8


class Owner(Protocol):
    """A model, as its sharding sees it."""

    @property
    def weights(self) -> list[Variable]:
        """All of them."""

    @property
    def _all_optimizers(self) -> list[Optimizer]:
        """What updates them."""


def layouts_of(
    owner: Owner,
    variables: Iterable[Variable],
    place: Place,
    shards: Sharded | None,
    given: Callable[[Variable, Variable | None], Axes | None],
) -> dict[Variable, Axes]:
    """Return over which axes of a mesh a model's variables are sharded, those that are.

    Args:
        owner: the model.
        variables: as above.
        place: a rank's in the mesh.
        shards: what is sharded over the axis `BATCH`, beside what `given` says; None for nothing.
        given: returns the layout of a variable, which is a slot of the second one or of none; None for no axis.

    Raises:
        ConfigError: a layout does not fit its variable, or leaves ranks without a part of it.
    """
    kinds: dict[Variable, Variable | None] = dict.fromkeys(owner.weights)
    for optimizer in owner._all_optimizers:
        kinds |= dict(optimizer._all_slots)
    found = {}
    for one in variables:
        if one not in kinds:
            continue
        axes = list(given(one, kinds[one]) or (None,) * one.ndim)
        if shards == "weights" or (shards == "optimizer" and kinds[one] is not None):
            ranks = place.lengths[BATCH]
            free = [axis for axis, mesh in enumerate(axes) if mesh is None and one.shape[axis] >= ranks > 1]
            if free and BATCH not in axes:
                # Along the first axis each part is one piece of memory; along the longest their lengths differ least.
                longest = max(free, key=lambda axis: (one.shape[axis], -axis))
                axes[0 if 0 in free and one.shape[0] >= _PARTS * ranks else longest] = BATCH
        if any(axes):
            place.check(one, tuple(axes))
            found[one] = tuple(axes)
    return found


def slots_of(owner: Owner) -> dict[Variable, list[Variable]]:
    """Return the slots of a model's trained weights."""
    found: dict[Variable, list[Variable]] = {}
    for optimizer in owner._all_optimizers:
        for slot, weight in optimizer._all_slots:
            found.setdefault(weight, []).append(slot)
    return found


class Sharding:
    """The layouts of a model's variables, and the variables that have this rank's parts; a `Storage` of the whole ones.

    Reading a sharded variable gathers it: all ranks must read it.

    Args:
        comm: the ranks.
        owner: the model.
        shards: what is sharded over the axis `BATCH`, beside what the current distribution says; None for nothing.

    Attributes:
        comm: as above.
        place: this rank's in the mesh.
    """

    def __init__(self, comm: MeshCommunicator, owner: Owner, shards: Sharded | None) -> None:
        self.comm, self._owner, self._shards = comm, owner, shards
        self.place = Place(comm.lengths, comm.coordinates)
        self._parts: dict[Variable, Variable] = {}
        self._homes: dict[Variable, Home] = {}
        self._stages: dict[Variable, int] = {}  # of weights
        self._sharded_over: dict[Variable, frozenset[str]] = {}  # by part
        self._fetched: dict[Variable, Array] = {}
        self._copies: dict[Variable, Variable] = {}

    # Layouts

    def layouts(self, variables: Iterable[Variable]) -> dict[Variable, Axes]:
        """Return over which axes of the mesh variables are sharded, those that are.

        Raises:
            ConfigError: a layout does not fit its variable, or leaves ranks without a part of it.
        """
        wanted = list(variables)
        known = {one: home for one in wanted if isinstance(home := self._homes.get(one), tuple)}
        new = [one for one in wanted if one not in known]
        return known | layouts_of(self._owner, new, self.place, self._shards, layout_of)

    # Stages

    @property
    def stages(self) -> int:
        """Into how many stages the model's layers are cut."""
        return self.place.lengths.get(STAGE, 1)

    @property
    def has_stages(self) -> bool:
        """Whether weights know their stages."""
        return bool(self._stages)

    def assign(self, stages: Mapping[Variable, int]) -> None:
        """Let weights, and their slots, be on these stages alone."""
        self._stages = dict(stages)

    def owners(self, variables: Iterable[Variable]) -> dict[Variable, int]:
        """Return the stages of variables, of those that one stage alone has."""
        if not self._stages:
            return {}
        known = with_slots(self._stages, self.slots())
        return {one: known[one] for one in variables if one in known}

    def slots(self) -> dict[Variable, list[Variable]]:
        """Return the slots of trained weights."""
        return slots_of(self._owner)

    @property
    def weights(self) -> list[Variable]:
        """Of the model."""
        return self._owner.weights

    # Parts

    def _divided(self, variables: Iterable[Variable]) -> dict[Variable, Home]:
        """Return where variables are, of those that not every rank has."""
        found = list(variables)
        return {**self.layouts(found), **self.owners(found)}

    def parts(self, homes: Mapping[Variable, Home]) -> dict[Variable, Variable]:
        """Return the variables that have this rank's parts, made of the whole ones' values at their first use.

        Of a variable of another stage the part is empty.
        """
        for one, home in homes.items():
            if one not in self._parts:
                self._cut(one, home, None if self._is_elsewhere(home) else one.numpy())
        return {one: self._parts[one] for one in homes}

    def _is_elsewhere(self, home: Home) -> bool:
        return not isinstance(home, tuple) and home != self.place.coordinates[STAGE]

    def _cut(self, variable: Variable, home: Home, value: Array | None) -> None:
        """Keep this rank's part of a variable's value."""
        if value is None or self._is_elsewhere(home):
            own = np.empty(0, variable.dtype)
        else:
            own = value[self.place.key(variable.shape, home)] if isinstance(home, tuple) else value
        part = Variable(own, variable.name, variable.trainable)
        part.path, part.aggregation = variable.path, variable.aggregation
        self._parts[variable], self._homes[variable] = part, home
        over = home if isinstance(home, tuple) else (STAGE,)
        self._sharded_over[part] = frozenset(mesh for mesh in over if mesh is not None)
        variable.move(self)

    def copy(self, variable: Variable) -> Variable:
        """Return a variable of this rank's that is to hold a copy of a sharded one's whole value."""
        if variable not in self._copies:
            self._copies[variable] = Variable(np.zeros(variable.shape, variable.dtype), variable.name, trainable=False)
            self._copies[variable].path = variable.path
        return self._copies[variable]

    def forget_copies(self) -> list[Variable]:
        """Return the variables that `copy` has returned, which are given back."""
        found, self._copies = list(self._copies.values()), {}
        return found

    def local(self, variables: Iterable[Variable]) -> list[Variable]:
        """Return what this rank has in memory of variables: the parts of those that are sharded."""
        found = list(variables)
        parts = self.parts(self._divided(found))
        return [parts.get(one, one) for one in found]

    def take(self, variables: Iterable[Variable]) -> None:
        """Shard those variables that are to be, and are not yet: by rank 0's values. Collective.

        Raises:
            AgreedError: the ranks have different variables.
        """
        homes = self._divided(variables)
        new = [one for one in homes if one not in self._parts]
        if not new:
            return
        require_same_kind(self.comm, new, gathered(self.comm, kind_of(new))[:, 0])
        for one in new:  # one by one: together they may not fit into memory
            value = one.numpy()
            found = gathered(self.comm, number_of(value.reshape(-1).view(np.uint8).data))
            if (found != found[0]).any():
                self.comm.broadcast(value)
            self._cut(one, homes[one], value)

    def part(self, variable: Variable) -> Part:
        """Return this rank's part of a variable, and who has the same. Collective at the first call."""
        (own,) = self.local([variable])
        whole, home = tuple(map(int, variable.shape)), self._homes.get(variable)
        axes = home if isinstance(home, tuple) else (None,) * len(whole)
        start = tuple(one.start or 0 for one in self.place.key(whole, axes))
        is_here = home is None or not self._is_elsewhere(home)
        return Part(own, start, whole, self.comm.sharing(self._over(own)), is_here)

    def by_group(self, variables: Iterable[Variable]) -> dict[Communicator, list[Variable]]:
        """Return what this rank has of variables, by the ranks that have the same. Collective."""
        found: dict[Communicator, list[Variable]] = {}
        for one in self.local(variables):
            found.setdefault(self.comm.sharing(self._over(one)), []).append(one)
        return found

    def name(self, variable: Variable) -> str:
        """Return what tells a variable of this rank's apart from others: its path, and of a part whose it is."""
        over = self._over(variable)
        if not over:
            return variable.path
        place = ", ".join(f"{axis} {self.place.coordinates[axis]}" for axis in self.place.lengths if axis in over)
        return f"{variable.path} of {place}"

    def groups(self, variables: Iterable[Variable]) -> list[tuple[list[list[int]], list[int]]]:
        """Return groups of ranks that have the same of some variables, for all ranks, and the numbers of these.

        The first are the variables that all ranks have, if only none.
        """
        found: dict[frozenset[str], list[int]] = {frozenset(): []}
        if self.stages > 1:
            found[frozenset([STAGE])] = []
        for number, one in enumerate(variables):
            found.setdefault(self._over(one), []).append(number)
        return [(self.comm.partition(axes), found[axes]) for axes in sorted(found, key=sorted)]

    def _over(self, variable: Variable) -> frozenset[str]:
        """Return over which axes of the mesh a variable that this rank has is sharded."""
        return self._sharded_over.get(variable, frozenset())

    # As a storage

    def read(self, variable: Variable) -> Array:
        """Return a variable's whole value. Collective, but for what was fetched."""
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
        """Let a rank read whole variables by itself while this context lasts. Collective.

        Args:
            variables: returns them.
            rank: that reads.
        """
        for one in variables():
            if one.storage is self:
                value = self.read(one)
                if self.comm.rank == rank:
                    self._fetched[one] = value
        try:
            yield
        finally:
            self._fetched.clear()
