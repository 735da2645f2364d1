"""Control flow under Keras' names. In a traced step loops are nodes with a body."""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from dptrain import tree
from dptrain.errors import ArgumentTypeError, ConfigError
from dptrain.ops.branches import IN_BODY, check_structure, cond, scalar
from dptrain.ops.elementwise import cast, logical_and
from dptrain.ops.manipulation import reshape, stack
from dptrain.ops.open_shapes import for_open_shapes
from dptrain.ops.scan import SCAN
from dptrain.ops.while_node import WHILE
from dptrain.program.body import traced
from dptrain.program.dims import Dim
from dptrain.program.shapes import without_rows
from dptrain.program.tensor import Tensor, as_tensors, is_tracing, mask_of, with_mask

# Greatest number of iterations of a loop over known conditions; each adds ops to the program.
_MOST_UNROLLED = 10_000


class _Caller(NamedTuple):
    """How errors name the function that a user called."""

    function: str
    body: str  # its argument that is a step
    carry: str  # what a step passes to the next one
    structure: str  # all of that


_FORI = _Caller("fori_loop", "body_fun", "value", "value")
_WHILE = _Caller("while_loop", "body", "loop variable", "loop variables")
_MAP = _Caller("map", "f", "carry", "carry")
_VECTORIZED = _Caller("vectorized_map", "function", "carry", "carry")
_SCAN = _Caller("scan", "f", "carry", "carry")


def _require_callable(f: Any, name: str = "f") -> None:
    if not callable(f):
        raise ArgumentTypeError(f"`{name}` should be a callable. Received: {name}={f}")


def fori_loop(lower: Any, upper: Any, body_fun: Callable[[Any, Any], Any], init_val: Any) -> Any:
    """Apply `value = body_fun(i, value)` for i from lower to before upper; see `while_loop` for unknown ones."""
    _require_callable(body_fun, "body_fun")
    bounds = as_tensors([lower, upper])
    if any(bound.value is None for bound in bounds):
        if any(bound.dtype.kind not in "iu" or bound.ndim for bound in bounds):
            kinds = ", ".join(f"{bound.dtype.name} {without_rows(bound.shape)}" for bound in bounds)
            raise ConfigError(f"fori_loop: lower and upper are {kinds}; expected integers")
        count, limit = bounds

        def step(value: Any, number: Tensor) -> tuple[Any, Tensor]:
            return body_fun(number, value), number + 1

        return _while(_FORI, lambda _, number: number < limit, step, (init_val, cast(count, limit.dtype)), None)[0]
    first, end = int(lower), int(upper)
    if is_tracing() and end > first:
        numbers = as_tensors([np.arange(first, end)])[0]
        return _scan(_FORI, lambda value, number: (body_fun(number, value), None), init_val, numbers)[0]
    value = init_val
    for number in range(first, end):
        following = body_fun(number, value)
        _check_structure(_FORI, value, following)
        value = following
    return value


def while_loop(
    cond: Callable[..., Any], body: Callable[..., Any], loop_vars: Any, maximum_iterations: int | None = None
) -> Any:
    """Apply `body` to the variables as long as `cond` of them is true.

    Where a condition is not known, as in a traced step, all `maximum_iterations` are computed; those after the last
    change nothing. Without, the loop ends when the condition is false, and has no gradient.

    Args:
        cond: takes the variables.
        body: takes them and returns new ones, of the same shapes and types in a traced step.
        loop_vars: a tensor, a tuple or a list.
        maximum_iterations: needed for a gradient, and for symbolic tensors, where a condition is not known.

    Raises:
        ConfigError: `maximum_iterations` is needed, or a loop of symbolic tensors does not end.
    """
    _require_callable(cond, "cond")
    _require_callable(body, "body")
    several = isinstance(loop_vars, tuple | list)
    values = _while(_WHILE, cond, body, tuple(loop_vars) if several else (loop_vars,), maximum_iterations)
    return type(loop_vars)(values) if several else values[0]


def _while(
    caller: _Caller,
    goes_on: Callable[..., Any],
    body: Callable[..., Any],
    values: tuple[Any, ...],
    maximum_iterations: int | None,
) -> tuple[Any, ...]:
    def following(values: tuple[Any, ...]) -> tuple[Any, ...]:
        result = body(*values)
        new = tuple(result) if isinstance(result, tuple | list) else (result,)
        if len(new) != len(values):
            raise ConfigError(f"while_loop: body returned {len(new)} value(s) for {len(values)} loop variable(s)")
        _check_structure(caller, values, new)
        return new

    number = 0
    while maximum_iterations is None or number < maximum_iterations:
        condition = _single_condition(goes_on(*values))
        if condition.value is None:
            if maximum_iterations is not None:
                return _bounded_while(goes_on, following, values, maximum_iterations - number)
            if is_tracing():
                return _while_node(caller, goes_on, condition, following, values)
            raise ConfigError(
                f"{caller.function}: pass maximum_iterations, as the condition on symbolic tensors is not known, or "
                "call it in a layer's call()"
            )
        if not bool(condition):
            break
        symbolic = number == _MOST_UNROLLED and [x for x in tree.flatten(values) if isinstance(x, Tensor)]
        if symbolic and any(x.value is None for x in symbolic):
            raise ConfigError(
                f"while_loop: the condition is still true after {number} iterations on symbolic tensors, where each "
                "adds its ops to the model; pass maximum_iterations, or use a condition that becomes false"
            )
        values, number = following(values), number + 1
    return values


def _single_condition(result: Any) -> Tensor:
    """Return what the condition of a loop returns, which must have one element."""
    return scalar(result, "while_loop: cond returns", "boolean: reduce it with ops.any or ops.all")


def _condition(result: Any) -> Tensor:
    """Return what the condition of a loop returns as a boolean of shape ()."""
    return cast(reshape(_single_condition(result), ()), np.dtype(np.bool_))


def _while_node(
    caller: _Caller,
    goes_on: Callable[..., Any],
    first: Tensor,
    following: Callable[..., Any],
    values: tuple[Any, ...],
) -> tuple[Any, ...]:
    """Compute a loop of unknown length as one node of the traced program; `first` is its first condition."""
    leaves = [as_tensors([leaf])[0] for leaf in _leaves(values)]

    def step(carries: list[Tensor], _: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        token = IN_BODY.set(True)
        try:
            new = following(_fill_structure(values, carries[1:]))
            tensors = [as_tensors(pair)[0] for pair in zip(_leaves(new), carries[1:], strict=True)]
            _check_kinds(caller, carries[1:], tensors)
            condition = _condition(goes_on(*_fill_structure(values, tensors)))
        finally:
            IN_BODY.reset(token)
        return [condition, *tensors], []

    body, inputs, written = traced(step, [_condition(first), *leaves], [])
    results = WHILE.values(*inputs, body=body)[1:]
    for variable, value in zip(written, results[len(leaves) :], strict=True):
        variable.assign(value)
    return tuple(_fill_structure(values, results[: len(leaves)]))


def _check_structure(caller: _Caller, carry: Any, new: Any) -> None:
    check_structure(f"{caller.function}: {caller.body} must keep the structure of the {caller.structure}", carry, new)


def _check_kinds(caller: _Caller, carries: Sequence[Tensor], new: Sequence[Tensor], types: bool = True) -> None:
    for number, (before, after) in enumerate(zip(carries, new, strict=True)):
        what = f"of {caller.carry} {number}"
        if before.shape != after.shape:
            shapes = f"from {without_rows(before.shape)} to {without_rows(after.shape)}"
            raise ConfigError(f"{caller.function}: {caller.body} changes the shape {what} {shapes}")
        if types and before.dtype != after.dtype:
            names = f"from {before.dtype.name} to {after.dtype.name}"
            raise ConfigError(f"{caller.function}: {caller.body} changes the type {what} {names}")


def _bounded_while(
    goes_on: Callable[..., Any], following: Callable[..., Any], values: tuple[Any, ...], times: int
) -> tuple[Any, ...]:
    def next_leaves(leaves: Sequence[Tensor]) -> list[Tensor]:
        new = as_tensors(_leaves(following(_fill_structure(values, leaves))))
        _check_kinds(_WHILE, leaves, new, types=False)
        return list(new)

    def step(carry: tuple[Tensor, list[Tensor]], _: None) -> tuple[Any, None]:
        runs, leaves = carry
        runs = logical_and(runs, _condition(goes_on(*_fill_structure(values, leaves))))
        return (runs, cond(runs, lambda: next_leaves(leaves), lambda: leaves)), None

    initial = [as_tensors([leaf])[0] for leaf in _leaves(values)]
    final = _scan(_WHILE, step, (np.array(True), initial), length=times)[0][1]
    return tuple(_fill_structure(values, final))


@for_open_shapes
def map(f: Callable[[Any], Any], xs: Any) -> Any:
    """Return `f` of each part along the first axis, stacked.

    Args:
        f: takes a part of each of `xs`, and returns tensors, nested in any way.
        xs: tensors or arrays, nested; of one first length above 0, which must not count the rows of the batch.
    """
    return _map(_MAP, f, xs)


@for_open_shapes
def vectorized_map(function: Callable[[Any], Any], elements: Any) -> Any:
    """Return `function` of each part along the first axis, stacked; like `map`."""
    return _map(_VECTORIZED, function, elements)


def _map(caller: _Caller, f: Callable[[Any], Any], xs: Any) -> Any:
    _require_callable(f, caller.body)
    return _scan(caller, lambda carry, part: (carry, f(part)), None, xs)[1]


@for_open_shapes
def scan(
    f: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
) -> tuple[Any, Any]:
    """Return the last carry of `carry, y = f(carry, x)` over the parts x, and all y, stacked.

    Args:
        f: takes the carry and a part, returns the new carry and an output.
        init: the first carry.
        xs: see `map`; where it holds no tensors, as None and () do, f takes it as it is.
        length: number of parts, needed where `xs` holds no tensors.
        reverse: start at the last part.
        unroll: True writes all steps down; otherwise a traced program has a loop.
    """
    _require_callable(f)
    if length is None and not _leaves(xs):
        raise ConfigError("Got no `xs` to scan over and `length` not provided.")
    if length is not None:
        length = _count(length)
    return _scan(_SCAN, f, init, xs, length, reverse, unroll)


def _scan(
    caller: _Caller,
    f: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
) -> tuple[Any, Any]:
    leaves = as_tensors(_leaves(xs))
    steps = length if length is not None and not leaves else _length(caller, leaves)
    if length is not None and length != steps:
        raise ConfigError(f"scan: length={length}, but xs has length {steps} along its first axis")
    counts_rows = any(isinstance(leaf.shape[0], Dim) for leaf in leaves)
    if is_tracing() and steps != 1 and unroll is not True and not counts_rows:
        return _scan_node(caller, f, init, xs, steps, reverse)
    numbers = range(steps)
    carry, outputs = init, []
    for number in reversed(numbers) if reverse else numbers:
        following, y = _carry_and_output(f(carry, _fill_structure(xs, [leaf[number] for leaf in leaves])))
        _check_structure(caller, carry, following)
        carry = following
        outputs.append(y)
    return carry, _stack_outputs(caller, outputs[::-1] if reverse else outputs)


def _carry_and_output(result: Any) -> tuple[Any, Any]:
    if not isinstance(result, tuple | list) or len(result) != 2:
        returned = f"{len(result)} values" if isinstance(result, tuple | list) else type(result).__name__
        raise ConfigError(f"scan: f must return (carry, output), but returned {returned}")
    carry, output = result
    return carry, output


def remat(f: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function whose gradient recomputes it instead of keeping its intermediate results.

    Training then takes less memory and more time: `docs/program.md`. In a traced step the function is a loop of one
    step; outside, it is called directly. The interface is `keras.remat`.

    Args:
        f: takes tensors and other values, nested in any way, and returns tensors, nested. It may assign variables and
            draw random numbers: the same ones both times. Layers in it must not call `add_loss`.

    Source: T. Chen et al., "Training deep nets with sublinear memory cost", 2016.
    """
    _require_callable(f)

    @functools.wraps(f)
    def function(*args: Any, **kwargs: Any) -> Any:
        leaves = tree.flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if not is_tracing() or not tensors:
            return f(*args, **kwargs)

        def step(_: None, parts: tuple[list[Tensor], dict[int, Tensor]]) -> tuple[None, Any]:
            masked = (with_mask(tensor, parts[1].get(number)) for number, tensor in enumerate(parts[0]))
            replaced = [next(masked) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            own_args, own_kwargs = tree.pack_sequence_as((args, kwargs), replaced)
            result = f(*own_args, **own_kwargs)
            return None, (result, tree.map_structure(mask_of, result))

        masks = {number: mask for number, tensor in enumerate(tensors) if (mask := mask_of(tensor)) is not None}
        single = tree.map_structure(lambda tensor: reshape(tensor, (1, *tensor.shape)), (tensors, masks))
        stacked = _scan_node(_SCAN, step, None, single, 1, False)[1]
        results, own_masks = tree.map_structure(
            lambda tensor: None if tensor is None else reshape(tensor, tensor.shape[1:]), stacked
        )
        return tree.map_structure(
            lambda tensor, mask: None if tensor is None else with_mask(tensor, mask), results, own_masks
        )

    return function


def _scan_node(
    caller: _Caller,
    f: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any,
    length: int,
    reverse: bool,
) -> tuple[Any, Any]:
    """Compute `scan` as one node of the traced program."""
    leaves, stacked = _leaves(init), as_tensors(_leaves(xs))
    forms: list[Any] = []

    def step(carries: list[Tensor], slices: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        token = IN_BODY.set(True)
        try:
            carry, output = _carry_and_output(f(_fill_structure(init, carries), _fill_structure(xs, slices)))
        finally:
            IN_BODY.reset(token)
        _check_structure(caller, init, carry)
        forms.append(output)
        following = [as_tensors([value, old])[0] for value, old in zip(_leaves(carry), carries, strict=True)]
        if caller is _FORI:
            _check_kinds(caller, carries, following)
        return following, list(as_tensors(_leaves(output)))

    firsts = [as_tensors([leaf])[0] for leaf in leaves]
    body, inputs, written = traced(step, firsts, stacked)
    values = SCAN.values(*inputs, body=body, length=length, reverse=reverse)
    for variable, value in zip(written, values[len(leaves) :], strict=False):
        variable.assign(value)
    return _fill_structure(init, values[: len(leaves)]), _fill_structure(
        forms[-1], values[len(leaves) + len(written) :]
    )


def _fill_structure(structure: Any, tensors: Sequence[Tensor]) -> Any:
    """Replace the leaves of a structure that are not None by tensors."""
    remaining = iter(tensors)
    return tree.pack_sequence_as(
        structure, [None if leaf is None else next(remaining) for leaf in tree.flatten(structure)]
    )


def _leaves(structure: Any) -> list[Any]:
    """Return the leaves of a structure that are not None."""
    return [leaf for leaf in tree.flatten(structure) if leaf is not None]


def _count(length: Any) -> int:
    try:
        count = operator.index(length)
    except TypeError:
        count = -1
    if count < 0:
        raise ConfigError(f"scan: length={length!r}; expected an integer >= 0")
    return count


def _length(caller: _Caller, leaves: Sequence[Tensor]) -> int:
    if not all(leaf.ndim for leaf in leaves):
        raise ConfigError(f"{caller.function}: a number has no parts; expected tensors with a first axis")
    lengths = {len(leaf) for leaf in leaves}
    if len(lengths) != 1:
        raise ConfigError(f"{caller.function}: expected equal lengths along the first axis, found {sorted(lengths)}")
    return lengths.pop()


def _stack_outputs(caller: _Caller, outputs: list[Any]) -> Any:
    if not outputs:
        raise ConfigError(f"{caller.function}: a loop of 0 steps has no outputs to stack; expected at least one step")
    return tree.map_structure(lambda *leaves: None if leaves[0] is None else stack(leaves), *outputs, none_is_leaf=True)
