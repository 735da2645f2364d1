"""Control flow under Keras' names. In a traced step loops are nodes with a body."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

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


def _require_callable(f: Any) -> None:
    if not callable(f):
        raise ArgumentTypeError(f"`f` should be a callable. Received: f={f}")


def fori_loop(lower: Any, upper: Any, body_fun: Callable[[Any, Any], Any], init_val: Any) -> Any:
    """Apply `value = body_fun(i, value)` for i from lower to before upper; see `while_loop` for unknown ones."""
    bounds = as_tensors([lower, upper])
    if any(bound.value is None for bound in bounds):
        if any(bound.dtype.kind not in "iu" or bound.ndim for bound in bounds):
            kinds = ", ".join(f"{bound.dtype.name} {without_rows(bound.shape)}" for bound in bounds)
            raise ConfigError(f"fori_loop: lower and upper are {kinds}; expected integers")
        count, limit = bounds

        def step(number: Tensor, value: Any) -> tuple[Tensor, Any]:
            return number + 1, body_fun(number, value)

        return while_loop(lambda number, _: number < limit, step, (cast(count, limit.dtype), init_val))[1]
    first, end = int(lower), int(upper)
    if is_tracing() and end > first:
        return scan(lambda value, number: (body_fun(number, value), None), init_val, np.arange(first, end))[0]
    value = init_val
    for number in range(first, end):
        value = body_fun(number, value)
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
    several = isinstance(loop_vars, tuple | list)
    values, number = tuple(loop_vars) if several else (loop_vars,), 0

    def following(values: tuple[Any, ...]) -> tuple[Any, ...]:
        result = body(*values)
        new = tuple(result) if isinstance(result, tuple | list) else (result,)
        if len(new) != len(values):
            raise ConfigError(f"while_loop: body returned {len(new)} value(s) for {len(values)} loop variable(s)")
        return new

    while maximum_iterations is None or number < maximum_iterations:
        goes_on = as_tensors([cond(*values)])[0]
        if goes_on.value is None:
            if maximum_iterations is not None:
                values = _bounded_while(cond, following, values, maximum_iterations - number)
            elif is_tracing():
                values = _while_node(cond, goes_on, following, values)
            else:
                raise ConfigError(
                    "while_loop: pass maximum_iterations, as the condition on symbolic tensors is not known, or call "
                    "it in a layer's call()"
                )
            break
        if not bool(goes_on):
            break
        symbolic = number == _MOST_UNROLLED and [x for x in tree.flatten(values) if isinstance(x, Tensor)]
        if symbolic and any(x.value is None for x in symbolic):
            raise ConfigError(
                f"while_loop: the condition is still true after {number} iterations on symbolic tensors, where each "
                "adds its ops to the model; pass maximum_iterations, or use a condition that becomes false"
            )
        values, number = following(values), number + 1
    return type(loop_vars)(values) if several else values[0]


def _condition(result: Any) -> Tensor:
    """Return what the condition of a loop returns as a boolean of shape ()."""
    tensor = scalar(result, "while_loop: cond returns", "boolean: reduce it with ops.any or ops.all")
    return cast(reshape(tensor, ()), np.dtype(np.bool_))


def _while_node(
    goes_on: Callable[..., Any], first: Tensor, following: Callable[..., Any], values: tuple[Any, ...]
) -> tuple[Any, ...]:
    """Compute a loop of unknown length as one node of the traced program; `first` is its first condition."""
    leaves = [as_tensors([leaf])[0] for leaf in tree.flatten(values) if leaf is not None]

    def step(carries: list[Tensor], _: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        token = IN_BODY.set(True)
        try:
            new = following(_fill_structure(values, carries[1:]))
            check_structure("while_loop: body must keep the structure of the loop variables", values, new)
            tensors = [leaf for leaf in tree.flatten(new) if leaf is not None]
            tensors = [as_tensors(pair)[0] for pair in zip(tensors, carries[1:], strict=True)]
            _check_kinds(carries[1:], tensors)
            condition = _condition(goes_on(*_fill_structure(values, tensors)))
        finally:
            IN_BODY.reset(token)
        return [condition, *tensors], []

    body, inputs, written = traced(step, [_condition(first), *leaves], [])
    results = WHILE.values(*inputs, body=body)[1:]
    for variable, value in zip(written, results[len(leaves) :], strict=True):
        variable.assign(value)
    return tuple(_fill_structure(values, results[: len(leaves)]))


def _check_kinds(carries: Sequence[Tensor], new: Sequence[Tensor], types: bool = True) -> None:
    for number, (before, after) in enumerate(zip(carries, new, strict=True)):
        if before.shape != after.shape:
            shapes = f"from {without_rows(before.shape)} to {without_rows(after.shape)}"
            raise ConfigError(f"while_loop: body changes the shape of loop variable {number} {shapes}")
        if types and before.dtype != after.dtype:
            names = f"from {before.dtype.name} to {after.dtype.name}"
            raise ConfigError(f"while_loop: body changes the type of loop variable {number} {names}")


def _bounded_while(
    goes_on: Callable[..., Any], following: Callable[..., Any], values: tuple[Any, ...], times: int
) -> tuple[Any, ...]:
    def checked(values: tuple[Any, ...]) -> tuple[Any, ...]:
        new = tuple(as_tensors(following(values)))
        _check_kinds(values, new, types=False)
        return new

    def step(carry: tuple[Tensor, tuple[Any, ...]], _: None) -> tuple[Any, None]:
        runs, values = carry
        runs = logical_and(runs, goes_on(*values))
        return (runs, cond(runs, lambda: checked(values), lambda: values)), None

    initial = tuple(as_tensors([value])[0] for value in values)
    final: tuple[Any, ...] = scan(step, (np.array(True), initial), length=times)[0][1]
    return final


@for_open_shapes
def map(f: Callable[[Any], Any], xs: Any) -> Any:
    """Return `f` of each part along the first axis, stacked.

    Args:
        f: takes a part of each of `xs`, and returns tensors, nested in any way.
        xs: tensors or arrays, nested; of one first length above 0, which must not count the rows of the batch.
    """
    return scan(lambda carry, part: (carry, f(part)), None, xs)[1]


@for_open_shapes
def vectorized_map(function: Callable[[Any], Any], elements: Any) -> Any:
    """Return `function` of each part along the first axis, stacked; like `map`."""
    return map(function, elements)


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
        xs: see `map`; None passes None `length` times.
        length: number of parts, needed without `xs`.
        reverse: start at the last part.
        unroll: True writes all steps down; otherwise a traced program has a loop.
    """
    _require_callable(f)
    if xs is None and length is None:
        raise ConfigError("Got no `xs` to scan over and `length` not provided.")
    steps = (length or 0) if xs is None else _length(xs)
    if length is not None and length != steps:
        raise ConfigError(f"scan: length={length}, but xs has length {steps} along its first axis")
    if is_tracing() and steps != 1 and unroll is not True and not _counts_rows(xs):
        return _scan_node(f, init, xs, steps, reverse)
    parts = [None] * steps if xs is None else _parts(xs)
    carry, outputs = init, []
    for part in parts[::-1] if reverse else parts:
        carry, y = _carry_and_output(f(carry, part))
        outputs.append(y)
    return carry, _stack_outputs(outputs[::-1] if reverse else outputs)


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
        stacked = _scan_node(step, None, single, 1, False)[1]
        results, own_masks = tree.map_structure(
            lambda tensor: None if tensor is None else reshape(tensor, tensor.shape[1:]), stacked
        )
        return tree.map_structure(
            lambda tensor, mask: None if tensor is None else with_mask(tensor, mask), results, own_masks
        )

    return function


def _scan_node(
    f: Callable[[Any, Any], tuple[Any, Any]], init: Any, xs: Any, length: int, reverse: bool
) -> tuple[Any, Any]:
    """Compute `scan` as one node of the traced program."""
    leaves = [leaf for leaf in tree.flatten(init) if leaf is not None]
    stacked = [] if xs is None else list(as_tensors(tree.flatten(xs)))
    forms: list[Any] = []

    def step(carries: list[Tensor], slices: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        token = IN_BODY.set(True)
        try:
            part = None if xs is None else tree.pack_sequence_as(xs, slices)
            carry, output = _carry_and_output(f(_fill_structure(init, carries), part))
        finally:
            IN_BODY.reset(token)
        check_structure("scan: f must keep the structure of the carry", init, carry)
        forms.append(output)
        new = [leaf for leaf in tree.flatten(carry) if leaf is not None]
        following = [as_tensors([value, old])[0] for value, old in zip(new, carries, strict=True)]
        return following, list(as_tensors([leaf for leaf in tree.flatten(output) if leaf is not None]))

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


def _length(xs: Any) -> int:
    lengths = {len(tensor) for tensor in as_tensors(tree.flatten(xs))}
    if len(lengths) != 1:
        raise ConfigError(f"xs: expected equal lengths along the first axis, found {sorted(lengths)}")
    return lengths.pop()


def _counts_rows(xs: Any) -> bool:
    return any(isinstance(tensor.shape[0], Dim) for tensor in as_tensors([] if xs is None else tree.flatten(xs)))


def _parts(xs: Any) -> list[Any]:
    tensors = as_tensors(tree.flatten(xs))
    return [tree.pack_sequence_as(xs, [tensor[number] for tensor in tensors]) for number in range(_length(xs))]


def _stack_outputs(outputs: list[Any]) -> Any:
    if not outputs:
        raise ConfigError("a loop over a first axis of length 0 has no outputs to stack; expected at least one step")
    return tree.map_structure(lambda *leaves: None if leaves[0] is None else stack(leaves), *outputs, none_is_leaf=True)
