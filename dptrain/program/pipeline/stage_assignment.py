"""Assigns layers, and the ops of a step, to the stages of a pipeline.

Layers are cut into runs of about equal memory. An op of the forward pass runs on the last stage whose weights it
depends on, an op of the backward pass where its result is needed, a gradient beside its weight, and an update beside
its variable. Whatever needs no variable of a single stage (data, learning rates, step numbers) each stage computes
itself.
"""

from collections.abc import Callable, Collection, Mapping

from dptrain.errors import ConfigError
from dptrain.program.body import has_body
from dptrain.program.explain import grouped
from dptrain.program.gradient import topological
from dptrain.program.program import Program
from dptrain.program.shapes import local, row_axis, size
from dptrain.program.sharding.mesh import ALL_REDUCE
from dptrain.program.tensor import Node, Tensor, Variable


def layers_of(program: Program, weights: Collection[Variable]) -> list[list[Variable]]:
    """Group weights by layer, in the order in which the program reads them."""
    first: dict[str, int] = {}
    variables_of: dict[str, list[Variable]] = {}
    weight_set = set(weights)
    behind: dict[Tensor, frozenset[str]] = {}  # layers behind tensors that do not count rows
    for number, tensor in enumerate(program.tensors):
        if tensor.op is None:
            is_weight = tensor.variable in weight_set
            behind[tensor] = frozenset([_layer(tensor.variable)] if is_weight and tensor.variable is not None else [])
            continue
        read = frozenset[str]().union(*(behind.get(operand, ()) for operand in tensor.inputs))
        if row_axis(tensor.shape) is None and all(operand in behind for operand in tensor.inputs):
            behind[tensor] = read
        else:
            for layer in read:
                first.setdefault(layer, number)
    for weight in weights:
        variables_of.setdefault(_layer(weight), []).append(weight)
    last = len(program.tensors)
    return [variables_of[layer] for layer in sorted(variables_of, key=lambda layer: first.get(layer, last))]


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
    """Return the stage of each weight, for about equal memory; ConfigError with fewer layers than stages.

    A stage holds its weights, their gradients and slots, and the activations of the microbatches under way there: p in
    the first of p stages, one in the last. `rows` are those of the batch that passes through the stages.
    """
    layers = layers_of(program, weights)
    if len(layers) < stages:
        raise ConfigError(
            f"stages = {stages}: the model has {len(layers)} layer{'s' * (len(layers) != 1)} with weights; "
            "expected at least one per stage"
        )
    state_bytes = [sum(_needed(weight, slots) for weight in layer) for layer in layers]
    activation_bytes = _kept(
        program, {weight: number for number, layer in enumerate(layers) for weight in layer}, -(-rows // microbatches)
    )

    def memory(first: int, end: int, stage: int) -> float:
        under_way = min(stages - stage, microbatches)
        return sum(state_bytes[first:end]) + under_way * sum(activation_bytes[first:end])

    parts = balanced(len(layers), stages, memory)
    return {weight: part for layer, part in zip(layers, parts, strict=True) for weight in layer}


def with_slots(stages: Mapping[Variable, int], slots: Mapping[Variable, Collection[Variable]]) -> dict[Variable, int]:
    """Add the slots of weights to the stages of weights."""
    return {**stages, **{slot: stage for weight, stage in stages.items() for slot in slots.get(weight, ())}}


def _needed(weight: Variable, slots: Mapping[Variable, Collection[Variable]]) -> int:
    nbytes = sum(size(variable.shape) * variable.dtype.itemsize for variable in (weight, *slots.get(weight, ())))
    return nbytes + (size(weight.shape) * weight.dtype.itemsize if weight in slots else 0)


def _kept(program: Program, layers: Mapping[Variable, int], rows: int) -> list[int]:
    """Return the bytes of each layer's activations that the backward pass reads."""
    nbytes, where = [0] * (1 + max(layers.values())), assigned(program, layers)
    forward = set(_forward(program))
    read = {_source(operand) for tensor in program.tensors if tensor not in forward for operand in tensor.inputs}
    for tensor in forward:
        if tensor in read and tensor in where and row_axis(tensor.shape) is not None:
            nbytes[where[tensor]] += size(local(tensor.shape, rows)) * tensor.dtype.itemsize
    return nbytes


def _source(tensor: Tensor) -> Tensor:
    while tensor.op is not None and tensor.op.is_view:
        tensor = tensor.inputs[0]
    return tensor


def balanced(layers: int, stages: int, cost: Callable[[int, int, int], float]) -> list[int]:
    """Cut layers into nonempty runs, one for each stage, with the lowest maximal cost; return the stage of each layer.

    `cost(first, end, stage)` is that of layers first to end - 1 in a stage.
    """
    best: dict[tuple[int, int], tuple[float, int]] = {(0, 0): (0.0, 0)}  # by stages and layers: cost, and last begin
    for stage in range(1, stages + 1):
        for end in range(stage, layers - (stages - stage) + 1):
            before = [begin for begin in range(stage - 1, end) if (stage - 1, begin) in best]
            best[stage, end] = min(
                (max(best[stage - 1, begin][0], cost(begin, end, stage - 1)), begin) for begin in before
            )
    stage_of = [0] * layers
    end = layers
    for stage in range(stages, 0, -1):
        begin = best[stage, end][1]
        stage_of[begin:end] = [stage - 1] * (end - begin)
        end = begin
    return stage_of


def assigned(program: Program, owners: Mapping[Variable, int]) -> dict[Tensor, int]:
    """Return the stage of each tensor that not every stage can compute, given `owners` of single-stage variables."""
    tensors = program.tensors
    needs = {tensor for tensor in tensors if tensor.op is None and tensor.variable in owners}
    for tensor in tensors:
        if not needs.isdisjoint(tensor.inputs):
            needs.add(tensor)
    stage_of = {
        tensor: owners[tensor.variable] for tensor in needs if tensor.op is None and tensor.variable is not None
    }
    forward, gradients = _forward(program), program.weight_gradients
    for tensor in forward:
        if (
            tensor in needs
            and tensor.op is not None
            and (operand_stages := [stage_of[read] for read in tensor.inputs if read in stage_of])
        ):
            stage_of[tensor] = max(operand_stages)
    forward_set = set(forward)
    backward = [
        tensor
        for tensor in topological([tensor for tensor in tensors if tensor in gradients])
        if tensor not in forward_set
    ]
    readers: dict[Tensor, list[Tensor]] = {}
    for tensor in backward:
        for read in tensor.inputs:
            readers.setdefault(read, []).append(tensor)
    for tensor in reversed(backward):
        if tensor in needs and tensor.op is not None:
            weight = gradients.get(tensor)
            if weight is not None and weight in owners:
                stage_of[tensor] = owners[weight]
                continue
            weights = [stage_of[read] for read in map(_source, tensor.inputs) if read.op is None and read in stage_of]
            if needed_stages := [
                *(stage_of[reader] for reader in readers.get(tensor, []) if reader in stage_of),
                *weights,
            ]:
                stage_of[tensor] = max(needed_stages)
    update_stages = {program.updates[tensor]: stage for tensor, stage in owners.items() if tensor in program.updates}
    for tensor in tensors:
        if tensor in needs and tensor not in stage_of:
            largest = max(
                (read for read in tensor.inputs if read in stage_of),
                key=lambda read: (size(read.shape), stage_of[read]),
            )
            stage_of[tensor] = update_stages.get(tensor, stage_of[largest])
    loop_stages: dict[Node, int] = {}
    for tensor, stage in stage_of.items():
        if has_body(tensor):  # all of its values on one stage, which alone executes it
            loop_stages[tensor.node] = max(stage, loop_stages.get(tensor.node, 0))
    return {tensor: loop_stages[tensor.node] if has_body(tensor) else stage for tensor, stage in stage_of.items()}


def _forward(program: Program) -> list[Tensor]:
    """Return the tensors of the forward pass, messages included, in topological order."""
    groups = grouped(program)
    alone = "backward" not in groups and "update" not in groups
    chosen = set(program.tensors if alone else groups.get("forward", []))
    forward = []
    for tensor in program.tensors:
        if tensor in chosen or (tensor.op is ALL_REDUCE and tensor.inputs[0] in chosen):
            chosen.add(tensor)
            forward.append(tensor)
    return forward
