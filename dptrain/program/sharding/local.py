"""A placed program as one rank of a mesh executes it: with the shapes of what this rank has.

`place` says where tensors lie, and keeps the shapes of whole tensors. Here lengths that are sharded become those of the
rank's parts, nearly equal ones, but for rows of the batch, which stay dims: so backends execute programs of any mesh as
they execute any other. Variables that are sharded are replaced by variables of the rank's parts.

A gather of what follows from weights alone is made anew for readers that come later: layers' weights are there while
they are needed, in the forward pass and again in the backward pass.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from dptrain.comm.mesh import BATCH
from dptrain.comm.parts import cut
from dptrain.errors import ConfigError
from dptrain.program.dims import Dim
from dptrain.program.lowering import Element, axes_of
from dptrain.program.operand import METHODS
from dptrain.program.passes import rewritten
from dptrain.program.shapes import Shape, size
from dptrain.program.sharding.mesh import (
    ALL_GATHER,
    ALL_REDUCE,
    OWN_PART,
    REDUCE_SCATTER,
    Axes,
    PlacedProgram,
    Placement,
)
from dptrain.program.sharding.messages import is_read_through, levels
from dptrain.program.sharding.placement import laid_out
from dptrain.program.tensor import Tensor, Variable, placeholder


@dataclass(frozen=True)
class MeshPosition:
    """Where a rank is in a mesh.

    Attributes:
        lengths: of the mesh's axes.
        coordinates: of the rank along each.
    """

    lengths: Mapping[str, int]
    coordinates: Mapping[str, int]

    def check(self, variable: Variable, axes: Axes) -> None:
        """Refuse a layout that does not fit its variable, or leaves ranks without a part of it.

        Raises:
            ConfigError: as above.
        """
        for axis, (n, mesh) in enumerate(zip(variable.shape, laid_out(variable, axes).axes, strict=True)):
            if mesh is not None and n < self.lengths[mesh]:
                raise ConfigError(
                    f"layout {axes} of {variable._path!r}, of shape {variable.shape}: axis {axis} of length {n} cannot "
                    f"be sharded over the {self.lengths[mesh]} ranks along {mesh!r}; choose a longer one, or none"
                )

    def bounds(self, mesh: str, length: int) -> tuple[int, int]:
        """Return from where to where the rank has its part of so many elements along an axis of the mesh."""
        return cut(0, length, self.lengths[mesh])[self.coordinates[mesh]]

    def counts(self, mesh: str, length: int) -> tuple[int, ...]:
        """Return how many elements each rank along an axis of the mesh has of so many."""
        return tuple(stop - start for start, stop in cut(0, length, self.lengths[mesh]))

    def key(self, shape: Shape, axes: Axes) -> tuple[slice, ...]:
        """Return the rank's part of an array that has no rows of the batch."""
        return tuple(
            slice(None) if mesh is None else slice(*self.bounds(mesh, int(n)))
            for n, mesh in zip(shape, axes, strict=True)
        )

    def shape(self, shape: Shape, axes: Axes) -> Shape:
        """Return the shape of the rank's part of a tensor."""
        found = []
        for n, mesh in zip(shape, axes, strict=True):
            if mesh is not None and not isinstance(n, Dim):
                start, stop = self.bounds(mesh, int(n))
                n = stop - start
            elif mesh not in (None, BATCH):
                raise ConfigError(f"not supported: rows of the batch sharded over {mesh!r}")
            found.append(n)
        return tuple(found)


def localized(placed: PlacedProgram, place: MeshPosition, parts: Mapping[Variable, Variable]) -> PlacedProgram:
    """Return the program of one rank of a mesh.

    Args:
        placed: by `placement.place`.
        place: the rank's.
        parts: of sharded variables, the variable that has this rank's part.

    Raises:
        ConfigError: a length is sharded that is not known, or leaves ranks without a part of a variable.
    """
    for variable, placement in placed.layouts.items():
        place.check(variable, placement.axes)
    known: dict[Tensor, Tensor] = {}
    state: dict[Variable, Tensor] = {}
    for variable, one in placed.state.items():
        if (own := parts.get(variable)) is not None:
            state[own] = known[one] = placeholder(own.shape, own.dtype, own._path, own)
        else:
            state[variable] = one
    for one in placed.tensors:
        if one not in known:
            known[one] = _localized(one, placed.placements[one], place, [known[read] for read in one.inputs])
    made = replace(
        placed,
        state=state,
        outputs={name: known[one] for name, one in placed.outputs.items()},
        updates={parts.get(variable, variable): known[one] for variable, one in placed.updates.items()},
        placements={known[one]: placement for one, placement in placed.placements.items() if one in known},
        layouts={},
    )
    in_order = rewritten(made, gathered_in_order())
    assert isinstance(in_order, PlacedProgram)
    return scheduled(regathered(in_order))


def _localized(tensor: Tensor, placement: Placement, place: MeshPosition, inputs: list[Tensor]) -> Tensor:
    if tensor.op is None:
        return tensor
    shape = place.shape(tensor.shape, placement.axes)
    about = tensor.attributes
    mesh = about.get("mesh") if tensor.op in (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, OWN_PART) else None
    if mesh is not None and tensor.op is not OWN_PART:
        if place.lengths[mesh] == 1:
            return inputs[0]
        about = {**about, "whole": size(tensor.shape)}
        if tensor.op is not ALL_REDUCE:
            about["counts"] = place.counts(mesh, int(tensor.shape[about["axis"]]))
    elif mesh is not None and not isinstance(tensor.shape[about["axis"]], Dim):
        start, stop = place.bounds(mesh, int(tensor.shape[about["axis"]]))
        found: Tensor = METHODS["[]"](inputs[0], (*(slice(None),) * about["axis"], slice(start, stop)))
        return found
    elif mesh is None:
        about = attributes_of_part(tensor, [one.shape for one in inputs], shape)
    if shape == tensor.shape and about == tensor.attributes:
        return tensor.with_inputs(inputs)
    return Tensor(tensor.op, inputs, about, shape, tensor.dtype, name=tensor.name)


def attributes_of_part(made: Tensor, shapes: list[Shape], out: Shape) -> dict[str, Any]:
    """Return the attributes of a tensor's op for parts of its operands and of what it makes.

    Args:
        made: the whole tensor.
        shapes: of the operands' parts.
        out: of the tensor's.
    """
    found = dict(made.attributes)
    if "key" in found:  # of what is taken from the operand, or put into zeros
        old, new = (made.shape, out) if "shape" in found else (made.inputs[0].shape, shapes[0])
        found["key"] = tuple(
            (0, n, 1) if one == (0, before, 1) else one for one, before, n in zip(found["key"], old, new, strict=True)
        )
    return found | ({"shape": out} if "shape" in found else {})


def gathered_in_order() -> Callable[[Tensor], Tensor]:
    """Return a pass: for the gather of what is made of a tensor, what is made of the gather; each gather once.

    Of a transpose: a backward pass gathers weights as the forward pass does. A rank gives its part where it lies, and
    if that is of the first axis, whatever comes lies where it is to lie as well; who reads the transpose reads it in
    another order. Of a conversion to a wider type: fewer bytes travel, and products read factors in half precision.
    """
    known: dict[tuple[int, str, int], Tensor] = {}

    def change(tensor: Tensor) -> Tensor:
        if tensor.op is not ALL_GATHER:
            return tensor
        taken, about, shape = tensor.inputs[0], dict(tensor.attributes), tensor.shape
        axes = None if taken.op is None else axes_of(taken)
        if axes is None and not _widens(taken):
            return known.setdefault((id(taken), about["mesh"], about["axis"]), tensor)
        if axes is not None:
            about["axis"], shape = axes.index(about["axis"]), tuple(shape[axis] for axis in axes)
        (beneath,) = taken.inputs
        gathered = change(Tensor(ALL_GATHER, (beneath,), about, shape, beneath.dtype, name=beneath.name))
        made = attributes_of_part(taken, [shape], tensor.shape)
        return Tensor(taken.op, (gathered,), made, tensor.shape, tensor.dtype, name=tensor.name)

    return change


def _widens(tensor: Tensor) -> bool:
    lowering = None if tensor.op is None else tensor.op.lowering
    converts = isinstance(lowering, Element) and lowering.converts
    return converts and tensor.inputs[0].dtype.itemsize < tensor.dtype.itemsize


def regathered(program: PlacedProgram) -> PlacedProgram:
    """Return a program in which what weights are gathered for at one time is not kept for a later one."""
    from_weights: set[Tensor] = set()
    for one in program.tensors:
        if one.variable is not None or (one.op is not None and one.inputs and from_weights.issuperset(one.inputs)):
            from_weights.add(one)
    level, sent = levels(program)
    new: dict[Tensor, Tensor] = {}
    copies: dict[tuple[Tensor, int], Tensor] = {}

    def is_late(tensor: Tensor, wanted: int) -> bool:
        if tensor.op is ALL_GATHER:
            return tensor in from_weights and wanted > sent[tensor] + 1
        return is_read_through(tensor) and is_late(tensor.inputs[0], wanted)

    def at(tensor: Tensor, wanted: int) -> Tensor:
        """Return what a reader of this level reads."""
        if not is_late(tensor, wanted):
            return new[tensor]
        key = tensor, wanted
        if key not in copies:
            inputs = [at(one, wanted) for one in tensor.inputs]
            copies[key] = Tensor(tensor.op, inputs, tensor.attributes, tensor.shape, tensor.dtype, name=tensor.name)
        return copies[key]

    for one in program.tensors:
        waits = is_read_through(one)
        new[one] = one.with_inputs([new[read] if waits else at(read, level[one]) for read in one.inputs])
    return _replaced(program, new) if copies else program


def scheduled(program: PlacedProgram) -> PlacedProgram:
    """Return a program in which what travels knows when, and in which order.

    Here ranks still have the same program but for lengths. Later some may find ops equal that are not on others, whose
    parts have other lengths: what they send must not depend on it.
    """
    _, sent = levels(program)
    ends = dict[Tensor, int]()  # how many ops lie behind a tensor
    for one in program.tensors:
        ends[one] = 1 + max((ends[read] for read in one.inputs), default=0)
    order = {one: number for number, one in enumerate(sorted(sent, key=lambda one: (sent[one], ends[one])))}
    new: dict[Tensor, Tensor] = {}
    for one in program.tensors:
        new[one] = one.with_inputs([new[read] for read in one.inputs])
        if one in sent:
            about = {**one.attributes, "stage": sent[one], "number": order[one]}
            new[one] = Tensor(one.op, new[one].inputs, about, one.shape, one.dtype, name=one.name)
    return _replaced(program, new)


def _replaced(program: PlacedProgram, new: Mapping[Tensor, Tensor]) -> PlacedProgram:
    """Return a program in which other tensors stand for all."""
    return replace(
        program,
        outputs={name: new[one] for name, one in program.outputs.items()},
        updates={variable: new[one] for variable, one in program.updates.items()},
        placements={new[one]: program.placements[one] for one in program.tensors if one in program.placements},
    )
