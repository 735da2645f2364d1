"""The reverse pass: gradients as ops, from the gradient rule of each op.

Nothing here knows of ranks or devices: a function is differentiated as if one device had the whole batch.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from dptrain.errors import ConfigError
from dptrain.program.operand import METHODS, OPERATORS
from dptrain.program.tensor import Tensor, Variable, constant, note_of_weights


def topological(outputs: Iterable[Tensor]) -> list[Tensor]:
    """Return the tensors that outputs are made of, and these, each after its inputs."""
    order: list[Tensor] = []
    done: set[Tensor] = set()
    stack = [(one, False) for one in reversed(list(outputs))]
    while stack:
        tensor, inputs_done = stack.pop()
        if inputs_done:
            order.append(tensor)
        elif tensor not in done:
            done.add(tensor)
            stack.append((tensor, True))
            stack += [(one, False) for one in reversed(tensor.inputs)]
    return order


def gradients(target: Tensor, sources: Sequence[Tensor], gradient: Any = None) -> list[Tensor | None]:
    """Return the gradient of a target in each source, None where it does not depend on it.

    Args:
        target: of floating-point numbers.
        sources: tensors that it was made of.
        gradient: of something in the target, of its shape; ones by default, which differentiates the target's sum.

    Raises:
        ConfigError: the target is no floating-point tensor, or an op on the way has no gradient.
    """
    if target.dtype.kind not in "fV":
        raise ConfigError(f"{target} has no gradient: expected floating-point numbers")
    order = topological([target])
    depends = set(sources)
    for tensor in order:
        if tensor.dtype.kind in "fV" and any(one in depends for one in tensor.inputs):  # whole numbers are steps
            depends.add(tensor)
    seed = OPERATORS["fill"](shape=target.shape, value=1.0, dtype=target.dtype.name) if gradient is None else gradient
    found: dict[Tensor, Tensor] = {target: constant(seed, target.dtype)}
    for tensor in reversed(order):
        dy = found.get(tensor)
        if dy is None or tensor.op is None or tensor not in depends:
            continue
        if tensor.op.gradient_rule is None:
            raise ConfigError(f"op {tensor.op.name!r} has no gradient")
        parts = tensor.op.gradient_rule(tensor, dy, *tensor.inputs)
        for one, part in zip(tensor.inputs, parts if isinstance(parts, tuple) else (parts,), strict=True):
            if part is not None and one in depends:
                before = found.get(one)
                found[one] = part if before is None else before + part
    weights = {one: one.variable for one in sources if one.variable is not None and one.variable.trainable}
    note_of_weights({found[one]: variable for one, variable in weights.items() if one in found})
    return [found.get(one) for one in sources]


def backward(target: Tensor, gradient: Any = None) -> None:
    """Add the gradient of a target to `grad` of the trainable variables that it was made of; see `gradients`."""
    leaves = [one for one in topological([target]) if one.variable is not None and one.variable.trainable]
    for leaf, found in zip(leaves, gradients(target, leaves, gradient), strict=True):
        variable = leaf.variable
        if found is not None and isinstance(variable, Variable):
            before = variable.grad
            variable.grad = found if before is None else before + found


METHODS["backward"] = backward
