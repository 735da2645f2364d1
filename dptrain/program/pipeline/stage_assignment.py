"""Assigns layers, and the ops of a step, to the stages of a pipeline.

Layers are cut into runs of about equal memory. An op of the forward pass runs on the last stage that has weights behind
it, an op of the backward pass where its result is needed, a gradient beside its weight, and an update beside its
variable. Whatever needs no variable of a single stage (data, learning rates, step numbers) each stage computes itself.
"""

from collections.abc import Callable, Collection, Mapping

from dptrain.errors import ConfigError
from dptrain.program.explain import grouped
from dptrain.program.gradient import topological
from dptrain.program.program import Program
from dptrain.program.shapes import local, row_axis, size
from dptrain.program.sharding.mesh import ALL_REDUCE
from dptrain.program.tensor import Tensor, Variable


def layers_of(program: Program, weights: Collection[Variable]) -> list[list[Variable]]:
    """Return weights by the layer that has them, layers in the order in which the program comes to them."""
    first: dict[str, int] = {}
    found: dict[str, list[Variable]] = {}
    known = set(weights)
    behind: dict[Tensor, frozenset[str]] = {}  # layers, of tensors that count no rows
    for number, one in enumerate(program.tensors):
        if one.op is None:
            is_weight = one.variable in known
            behind[one] = frozenset([_layer(one.variable)] if is_weight and one.variable is not None else [])
            continue
        read = frozenset[str]().union(*(behind.get(each, ()) for each in one.inputs))
        if row_axis(one.shape) is None and all(each in behind for each in one.inputs):
            behind[one] = read
        else:
            for layer in read:
                first.setdefault(layer, number)
    for weight in weights:
        found.setdefault(_layer(weight), []).append(weight)
    last = len(program.tensors)
    return [found[layer] for layer in sorted(found, key=lambda layer: first.get(layer, last))]


def _layer(variable: Variable) -> str:
    return variable._path.rpartition("/")[0] or variable._path


def cut_into_stages(
    program: Program,
    weights: Collection[Variable],
    slots: Mapping[Variable, Collection[Variable]],
    stages: int,
    rows: int,
    microbatches: int,
) -> dict[Variable, int]:
    """Return the stage of each weight.

    A stage takes memory for its weights, their gradients and slots, and for what the backward pass needs of the forward
    passes that are under way there: the first of p stages has p microbatches under way, the last one has one.

    Args:
        program: of a step.
        weights: of the model.
        slots: of each trained weight.
        stages: how many.
        rows: of the batch that goes through them.
        microbatches: into which it is cut.

    Raises:
        ConfigError: there are fewer layers with weights than stages.
    """
    layers = layers_of(program, weights)
    if len(layers) < stages:
        raise ConfigError(
            f"stages = {stages}: the model has {len(layers)} layer{'s' * (len(layers) != 1)} with weights; "
            "expected a layer for each stage at least"
        )
    held = [sum(_needed(one, slots) for one in layer) for layer in layers]
    kept = _kept(
        program, {one: number for number, layer in enumerate(layers) for one in layer}, -(-rows // microbatches)
    )

    def memory(first: int, end: int, stage: int) -> float:
        under_way = min(stages - stage, microbatches)
        return sum(held[first:end]) + under_way * sum(kept[first:end])

    parts = balanced(len(layers), stages, memory)
    return {one: part for layer, part in zip(layers, parts, strict=True) for one in layer}


def with_slots(stages: Mapping[Variable, int], slots: Mapping[Variable, Collection[Variable]]) -> dict[Variable, int]:
    """Return the stages of weights and of their slots.

    Args:
        stages: of weights.
        slots: of each trained weight.
    """
    return {**stages, **{slot: stage for one, stage in stages.items() for slot in slots.get(one, ())}}


def _needed(weight: Variable, slots: Mapping[Variable, Collection[Variable]]) -> int:
    nbytes = sum(size(one.shape) * one.dtype.itemsize for one in (weight, *slots.get(weight, ())))
    return nbytes + (size(weight.shape) * weight.dtype.itemsize if weight in slots else 0)


def _kept(program: Program, layers: Mapping[Variable, int], rows: int) -> list[int]:
    """Return the bytes that each layer makes in the forward pass and the backward pass reads."""
    found, where = [0] * (1 + max(layers.values())), assigned(program, layers)
    forward = set(_forward(program))
    read = {_source(each) for one in program.tensors if one not in forward for each in one.inputs}
    for one in forward:
        if one in read and one in where and row_axis(one.shape) is not None:
            found[where[one]] += size(local(one.shape, rows)) * one.dtype.itemsize
    return found


def _source(tensor: Tensor) -> Tensor:
    while tensor.op is not None and tensor.op.is_view:
        tensor = tensor.inputs[0]
    return tensor


def balanced(layers: int, stages: int, cost: Callable[[int, int, int], float]) -> list[int]:
    """Return the stage of each layer: runs of layers, of which the greatest cost is as low as possible.

    Args:
        layers: as many as there are stages, at least.
        stages: none of them is empty.
        cost: of the layers from a first one to before an end in a stage.
    """
    best: dict[tuple[int, int], tuple[float, int]] = {(0, 0): (0.0, 0)}  # by stages and layers: cost, and last begin
    for stage in range(1, stages + 1):
        for end in range(stage, layers - (stages - stage) + 1):
            before = [begin for begin in range(stage - 1, end) if (stage - 1, begin) in best]
            best[stage, end] = min(
                (max(best[stage - 1, begin][0], cost(begin, end, stage - 1)), begin) for begin in before
            )
    found = [0] * layers
    end = layers
    for stage in range(stages, 0, -1):
        begin = best[stage, end][1]
        found[begin:end] = [stage - 1] * (end - begin)
        end = begin
    return found


def assigned(program: Program, owners: Mapping[Variable, int]) -> dict[Tensor, int]:
    """Return the stage that computes each tensor; none of those that any stage can compute for itself.

    Args:
        program: traced or placed.
        owners: stages of the variables that one stage has; all stages have the others.
    """
    tensors = program.tensors
    needs = {one for one in tensors if one.op is None and one.variable in owners}
    for one in tensors:
        if not needs.isdisjoint(one.inputs):
            needs.add(one)
    found = {one: owners[one.variable] for one in needs if one.op is None and one.variable is not None}
    forward, gradients = _forward(program), program.weight_gradients
    for one in forward:
        if one in needs and one.op is not None and (known := [found[read] for read in one.inputs if read in found]):
            found[one] = max(known)
    done = set(forward)
    backward = [one for one in topological([one for one in tensors if one in gradients]) if one not in done]
    readers: dict[Tensor, list[Tensor]] = {}
    for one in backward:
        for read in one.inputs:
            readers.setdefault(read, []).append(one)
    for one in reversed(backward):
        if one in needs and one.op is not None:
            weight = gradients.get(one)
            if weight is not None and weight in owners:
                found[one] = owners[weight]
                continue
            weights = [found[read] for read in map(_source, one.inputs) if read.op is None and read in found]
            if needed := [*(found[each] for each in readers.get(one, []) if each in found), *weights]:
                found[one] = max(needed)
    made = {program.updates[one]: stage for one, stage in owners.items() if one in program.updates}
    for one in tensors:
        if one in needs and one not in found:
            largest = max(
                (read for read in one.inputs if read in found), key=lambda read: (size(read.shape), found[read])
            )
            found[one] = made.get(one, found[largest])
    return found


def _forward(program: Program) -> list[Tensor]:
    """Return the tensors of the forward pass, messages among them, each after its inputs."""
    groups = grouped(program)
    alone = "backward" not in groups and "update" not in groups
    chosen = set(program.tensors if alone else groups.get("forward", []))
    found = []
    for one in program.tensors:
        if one in chosen or (one.op is ALL_REDUCE and one.inputs[0] in chosen):
            chosen.add(one)
            found.append(one)
    return found
