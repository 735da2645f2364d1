"""The reverse pass: gradients as ops, from the gradient rule of each op.

It ignores ranks and devices: a function is differentiated as if one device had the whole batch.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

from dptrain.errors import ConfigError
from dptrain.program.dims import Dim
from dptrain.program.lowering import Insert, lowering_of
from dptrain.program.operand import METHODS, OPERATORS
from dptrain.program.tensor import Node, Tensor, Variable, constant, note_weight_gradients, scope
from dptrain.runtime.types import is_floating


def _operands(tensor: Tensor) -> Sequence[Tensor]:
    custom = getattr(tensor, "own_gradient", None)
    return tensor.inputs if custom is None else (*tensor.inputs, *custom[0])


def topological(
    outputs: Iterable[Tensor], operands: Callable[[Tensor], Sequence[Tensor]] = attrgetter("inputs")
) -> list[Tensor]:
    """Return outputs and all that they depend on, each after its inputs, or other `operands`."""
    order: list[Tensor] = []
    visited: set[Tensor] = set()
    stack: list[Tensor | None] = [*reversed(list(outputs))]
    while stack:
        tensor = stack.pop()
        if tensor is None:  # the inputs of the tensor below are done
            tensor = stack.pop()
            assert tensor is not None
            order.append(tensor)
        elif tensor not in visited:
            visited.add(tensor)
            stack += (tensor, None, *reversed(operands(tensor)))
    return order


def gradients(target: Tensor, sources: Sequence[Tensor], gradient: Any = None) -> list[Tensor | None]:
    """Return the gradient of a floating-point target in each source, None if it does not depend on it.

    `gradient` is the target's cotangent, ones by default, which differentiates the target's sum.

    Raises:
        ConfigError: the target is not floating-point, or an op in between has no gradient.
    """
    if not is_floating(target.dtype):
        raise ConfigError(f"{target} has no gradient: expected floating-point numbers")
    seed = OPERATORS["fill"](shape=target.shape, value=1.0, dtype=target.dtype.name) if gradient is None else gradient
    grads = pulled_back({target: constant(seed, target.dtype)}, sources)
    weights = {
        source: source.variable for source in sources if source.variable is not None and source.variable.trainable
    }
    note_weight_gradients({grads[source]: variable for source, variable in weights.items() if source in grads})
    return [grads.get(source) for source in sources]


def pulled_back(cotangents: Mapping[Tensor, Tensor], sources: Sequence[Tensor]) -> dict[Tensor, Tensor]:
    """Return the gradients of all tensors between cotangents and sources; ConfigError if an op there has none."""
    order = topological(cotangents, _operands)
    depends = set(sources)
    values: dict[Node, dict[int, Tensor]] = {}  # values of ops with several
    for tensor in order:
        if is_floating(tensor.dtype) and any(
            operand in depends for operand in _operands(tensor)
        ):  # integers have no gradient
            depends.add(tensor)
        if tensor.op is not None and tensor.op.has_values:
            values.setdefault(tensor.node, {})[tensor.index] = tensor
    parts: dict[Tensor, list[Tensor]] = {target: [dy] for target, dy in cotangents.items()}
    grad_of: dict[Tensor, Tensor] = {}
    for tensor in reversed(order):
        if tensor in parts:  # complete, as all readers have been visited
            grad_of[tensor] = _total(parts[tensor])
        if tensor.op is None or not any(operand in depends for operand in _operands(tensor)):
            continue
        results: Any = tensor
        dy: Any = grad_of.get(tensor) if tensor in depends else None
        if tensor.op.has_values:
            read_values = values[tensor.node]
            if read_values[next(iter(read_values))] is not tensor:
                continue  # once, when the gradients of all values are known
            results = tuple(read_values.get(value.index, value) for value in tensor.node.values)
            dy = tuple(grad_of.get(value) if value in depends else None for value in results)
            dy = dy if any(grad is not None for grad in dy) else None
        if dy is None:
            continue
        custom = getattr(tensor, "own_gradient", None)
        with scope(tensor.name):  # of the layer's
            if custom is not None:
                operands, grads = custom[0], custom[1](dy)
            elif tensor.op.gradient_rule is None:
                raise ConfigError(f"op {tensor.op.name!r} has no gradient")
            else:
                operands, grads = tensor.inputs, tensor.op.gradient_rule(results, dy, *tensor.inputs)
        for operand, grad in zip(operands, grads if isinstance(grads, tuple) else (grads,), strict=True):
            if grad is not None and operand in depends:
                parts.setdefault(operand, []).append(grad)
    return grad_of


def _total(parts: Sequence[Tensor]) -> Tensor:
    """Sum gradients; those of parts of a tensor, such as a cell's gates, are concatenated."""
    if len(parts) > 1 and all(isinstance(lowering_of(part), Insert) for part in parts):
        joined = _beside_each_other(parts)
        if joined is not None:
            return joined
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _beside_each_other(inserts: Sequence[Tensor]) -> Tensor | None:
    """Return the sum of zero-padded parts as a concatenation if the parts tile an axis, else None."""
    shape, keys = inserts[0].shape, [insert.attributes["key"] for insert in inserts]
    cut = {axis for key in keys for axis, part in enumerate(key) if not _is_all(part, shape[axis])}
    if len(cut) != 1 or len({insert.dtype for insert in inserts}) > 1:
        return None
    (axis,) = cut
    bounds = [(*key[axis], number) for number, key in enumerate(keys) if isinstance(key[axis], tuple)]
    if len(bounds) < len(keys) or any(isinstance(n, Dim) for bound in bounds for n in (*bound, shape[axis])):
        return None
    bounds.sort()
    starts = [0, *(stop for _, stop, _, _ in bounds)]
    if [(start, step) for start, _, step, _ in bounds] != [(n, 1) for n in starts[:-1]] or starts[-1] != shape[axis]:
        return None
    return OPERATORS["join"](*(inserts[number].inputs[0] for *_, number in bounds), axis=axis)


def _is_all(key: Any, length: Any) -> bool:
    """Whether a key takes a whole axis; does not ask for the number of rows."""
    if not isinstance(key, tuple) or isinstance(key[0], Dim) or isinstance(key[1], Dim) != isinstance(length, Dim):
        return False
    return bool(key == (0, length, 1))


def backward(target: Tensor, gradient: Any = None) -> None:
    """Add a target's gradient to `grad` of the trainable variables that it depends on; see `gradients`."""
    leaves = [
        tensor
        for tensor in topological([target], _operands)
        if tensor.variable is not None and tensor.variable.trainable
    ]
    for leaf, grad in zip(leaves, gradients(target, leaves, gradient), strict=True):
        variable = leaf.variable
        if grad is not None and isinstance(variable, Variable):
            before = variable._gradient
            variable._gradient = grad if before is None else before + grad


METHODS["backward"] = backward
