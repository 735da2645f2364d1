"""Branches: in a traced step nodes of which only the chosen one is executed, and selects of their results."""

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from dptrain import tree
from dptrain.errors import ArgumentTypeError, ConfigError
from dptrain.ops.elementwise import logical_not, where
from dptrain.ops.manipulation import reshape, zeros
from dptrain.ops.scan import SCAN
from dptrain.program.body import closed
from dptrain.program.context import TRACE
from dptrain.program.shapes import is_one, without_rows
from dptrain.program.tensor import SERIALS, Tensor, Variable, as_tensors, tracing

# Whether a step of a loop or a branch is being traced, whose tensors do not exist outside it.
IN_BODY: ContextVar[bool] = ContextVar("in_body", default=False)


def cond(pred: Any, true_fn: Callable[[], Any], false_fn: Callable[[], Any]) -> Any:
    """Return what one of two functions returns, which must have equal structures.

    Where the condition is not known, as in a traced step, both are traced and one is executed, with its assignments
    and gradients. On a GPU, and between symbolic tensors, both are, and one result is selected.
    """
    if not (callable(true_fn) and callable(false_fn)):
        kinds = f"{type(true_fn).__name__} and {type(false_fn).__name__}"
        raise ArgumentTypeError(f"cond: true_fn and false_fn must be callable, found {kinds}")
    condition = scalar(
        pred, "cond: pred has", "boolean: reduce it with ops.any or ops.all, or select elements with ops.where"
    )
    if condition.value is not None:
        return true_fn() if bool(condition) else false_fn()
    holds = reshape(condition if condition.dtype.kind == "b" else condition != 0, ())
    return _chosen("cond", [holds, logical_not(holds)], [true_fn, false_fn])


def switch(index: Any, branches: Sequence[Callable[..., Any]], *operands: Any) -> Any:
    """Return what the function at this index returns for the operands; the index is clamped.

    Where the index is not known, all are traced; see `cond`.
    """
    if not isinstance(branches, Sequence) or not all(map(callable, branches)):
        raise ArgumentTypeError("switch: branches must be a list of callables")
    if not branches:
        raise ConfigError("switch: expected at least one branch")
    number = scalar(index, "switch: index has", "integer")
    last = len(branches) - 1
    if number.value is not None or not last:
        return branches[min(max(int(number), 0), last) if last else 0](*operands)
    number = reshape(number, ())
    guards = [number <= 0, *(number == place for place in range(1, last)), number >= last]
    return _chosen("switch", guards, [lambda branch=branch: branch(*operands) for branch in branches])  # type: ignore[misc]


@dataclass(eq=False)
class _Branch:
    result: Any
    written: Mapping[Variable, Tensor]
    gradients: Mapping[Variable, Tensor]


def _chosen(name: str, guards: Sequence[Tensor], branches: Sequence[Callable[[], Any]]) -> Any:
    # The first guard that holds chooses results, assignments and gradients.
    trace = TRACE.get()
    if trace is None:
        results = [branch() for branch in branches]
    else:
        traced = [_traced(guard, branch) for guard, branch in zip(guards, branches, strict=True)]
        results = [branch.result for branch in traced]
    for result in results[1:]:
        check_structure(f"{name}: the branches must return equal structures", results[0], result)

    def select(*values: Any) -> Any:
        chosen = values[-1]
        for guard, value in reversed(list(zip(guards[:-1], values[:-1], strict=True))):
            is_same = value is chosen and (value is None or isinstance(value, Tensor))
            try:
                chosen = chosen if is_same else where(guard, value, chosen)
            except ConfigError:
                shapes = " and ".join(dict.fromkeys(str(without_rows(leaf.shape)) for leaf in as_tensors(list(values))))
                raise ConfigError(f"{name}: the branches must return equal shapes, found {shapes}") from None
        return chosen

    if trace is not None:
        for variable in dict.fromkeys(variable for branch in traced for variable in branch.written):
            old = trace.value_of(variable)
            variable.assign(select(*(branch.written.get(variable, old) for branch in traced)))
        for variable in dict.fromkeys(variable for branch in traced for variable in branch.gradients):
            none = zeros(variable.shape, variable.dtype)
            trace.gradients[variable] = select(*(branch.gradients.get(variable, none) for branch in traced))
    return tree.map_structure(select, *results)


def _traced(guard: Tensor, branch: Callable[[], Any]) -> _Branch:
    # Within a trace. What the branch computes becomes values of a node; what it only passes on stays as it is.
    outer = TRACE.get()
    assert outer is not None
    first, token = next(SERIALS), IN_BODY.set(True)
    try:
        with tracing() as inner:
            inner.gradients |= outer.gradients
            result = tree.map_structure(_as_tensor, branch())
    finally:
        IN_BODY.reset(token)
    written = {variable: leaf.inputs[0] for variable, leaf in inner.written.items()}
    tensors = [leaf for leaf in tree.flatten(result) if isinstance(leaf, Tensor)]
    tensors += [*written.values(), *inner.gradients.values(), *inner.applied, *inner.weight_gradients]

    new = {leaf: outer.value_of(variable) for variable, leaf in inner.read.items()}
    computed = [tensor for tensor in dict.fromkeys(tensors) if tensor.serial > first]
    if computed:
        body, inputs, _ = closed([], [], [], computed, new, guard=guard, since=first)
        values = SCAN.values(*inputs, body=body, length=1, reverse=False)
        new |= {tensor: reshape(value, tensor.shape) for tensor, value in zip(computed, values, strict=True)}
    outer.applied += [new.get(tensor, tensor) for tensor in inner.applied]
    outer.weight_gradients |= {new.get(tensor, tensor): to for tensor, to in inner.weight_gradients.items()}
    return _Branch(
        tree.map_structure(lambda leaf: new.get(leaf, leaf) if isinstance(leaf, Tensor) else leaf, result),
        {variable: new.get(tensor, tensor) for variable, tensor in written.items()},
        {variable: new.get(tensor, tensor) for variable, tensor in inner.gradients.items()},
    )


def _as_tensor(leaf: Any) -> Any:
    return as_tensors([leaf])[0] if isinstance(leaf, Variable) else leaf


def check_structure(rule: str, first: Any, second: Any) -> None:
    """Raise a ConfigError, which begins with a rule, if two structures differ."""
    try:
        tree.assert_same_structure(first, second)
    except ConfigError as error:
        raise ConfigError(f"{rule}. {error}") from None
    for expected, leaf in zip(tree.flatten(first), tree.flatten(second), strict=True):
        if (expected is None) != (leaf is None):
            raise ConfigError(f"{rule}. Expected {expected}, found {leaf}")


def scalar(value: Any, subject: str, expected: str) -> Tensor:
    """Return a tensor of one element; the ConfigError for another shape begins with the subject."""
    tensor = as_tensors([value])[0]
    if not all(is_one(length) for length in tensor.shape):
        raise ConfigError(f"{subject} shape {without_rows(tensor.shape)}; expected a single {expected}")
    return tensor
