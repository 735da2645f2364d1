"""Custom gradients, and derivatives along a direction."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dptrain import tree
from dptrain.errors import ConfigError
from dptrain.ops.elementwise import alias, cast, multiply, where
from dptrain.ops.loops import vectorized_map
from dptrain.ops.manipulation import broadcast_to, reshape, zeros_like
from dptrain.ops.reduction import sum
from dptrain.program.context import SCOPE
from dptrain.program.gradient import gradients
from dptrain.program.operand import OPERATORS
from dptrain.program.shapes import broadcast
from dptrain.program.tensor import NOT_TRACKED, TRAINABLE, Tensor, as_tensors, differentiable
from dptrain.runtime.types import is_floating


def custom_gradient(f: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function with a custom gradient.

    Args:
        f: takes tensors; returns its result and a function `grad(*upstream, upstream=None)` of the gradient in the
            result, which returns the gradients in the tensors: None for none, a tuple for several.

    Raises:
        ConfigError: `grad` returns another number of gradients than there are tensors.
    """

    def function(*args: Any, **kwargs: Any) -> Any:
        sources = [arg for arg in tree.flatten(args) if _is_number(arg)]
        tensors = as_tensors(sources)
        replaced = iter(tensors)
        result, grad = f(*tree.map_structure(lambda arg: next(replaced) if _is_number(arg) else arg, args), **kwargs)
        leaves = as_tensors(tree.flatten(result))
        attached = [_attached(leaf, tensors, leaves, number, grad) for number, leaf in enumerate(leaves)]
        return tree.pack_sequence_as(result, attached)

    return function


def _is_number(x: Any) -> bool:
    return not isinstance(x, str | bytes | bool | type(None)) and not callable(x)


def _attached(
    value: Tensor, sources: Sequence[Tensor], leaves: Sequence[Tensor], number: int, grad: Callable[..., Any]
) -> Tensor:
    """Return an output with `grad` as its gradient in the sources."""

    def rule(dy: Tensor) -> tuple[Tensor | None, ...]:
        grads = grad(*(dy if at == number else zeros_like(leaf) for at, leaf in enumerate(leaves)))
        parts = tuple(grads) if isinstance(grads, tuple | list) else (grads,)
        if len(parts) != len(sources):
            raise ConfigError(f"custom_gradient: {len(parts)} gradients for {len(sources)} tensors; expected one each")
        return tuple(None if part is None else as_tensors([part])[0] for part in parts)

    tracking = max(tensor.tracking for tensor in (value, *sources))
    if not is_floating(value.dtype) or (value.value is not None and tracking == NOT_TRACKED):
        return value
    output = Tensor(alias, (value,), {}, value.shape, value.dtype, value.value, SCOPE.get())
    output.tracking = tracking
    output.own_gradient = sources, rule
    return output


def jvp(fun: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any], has_aux: bool = False) -> Any:
    """Return a function's value and its derivative along a direction, a Jacobian-vector product.

    The product with the transposed Jacobian is linear in its vector; its gradient is the derivative.

    Args:
        fun: takes tensors, returns tensors; with `has_aux` a pair, whose second part is passed through as a third
            result.
        primals: where to differentiate.
        tangents: the direction, a tensor for each primal, of its shape.
        has_aux: see `fun`.
    """
    points = [  # copies, as a primal may depend on another
        OPERATORS["identity"](primal)
        if primal.value is None or primal.tracking == TRAINABLE
        else differentiable(primal)
        for primal in as_tensors(primals)
    ]
    directions = as_tensors(tangents)
    if [tensor.shape for tensor in points] != [tensor.shape for tensor in directions]:
        raise ConfigError(
            f"jvp: primals of shapes {[tensor.shape for tensor in points]}, tangents of shapes "
            f"{[tensor.shape for tensor in directions]}; expected equal shapes"
        )
    returned = fun(*points)
    value, auxiliary = returned if has_aux else (returned, None)
    derivatives = [_derivative(leaf, points, directions) for leaf in as_tensors(tree.flatten(value))]
    result = value, tree.pack_sequence_as(value, derivatives)
    return (*result, auxiliary) if has_aux else result


def _derivative(value: Tensor, points: Sequence[Tensor], directions: Sequence[Tensor]) -> Tensor:
    if not is_floating(value.dtype):
        return zeros_like(value)
    if value.value is None:  # gradients of a constant would be constants
        seed = cast(where(value == value, 1.0, 1.0), value.dtype)
    else:
        seed = differentiable(np.ones(value.shape, value.dtype))
    total: Tensor | None = None
    for grad, direction in zip(gradients(value, points, seed), directions, strict=True):
        if grad is not None:
            part = sum(multiply(grad, cast(direction, grad.dtype)))
            total = part if total is None else total + part
    derivative = None if total is None else gradients(total, [seed])[0]
    return zeros_like(value) if derivative is None else derivative


def vectorize(
    pyfunc: Callable[..., Any], *, excluded: set[int] | None = None, signature: str | None = None
) -> Callable[..., Any]:
    """Return a function of arrays that calls one of single numbers, or of the parts in a signature.

    Args:
        pyfunc: takes tensors.
        excluded: positions of arguments that it gets whole.
        signature: such as "(m,n),(n)->(m)": the core axes of each argument and result.
    """
    if not callable(pyfunc):
        raise ConfigError(f"Expected argument `pyfunc` to be a callable. Received: pyfunc={pyfunc}")
    left_out = excluded or set()

    def function(*args: Any) -> Any:
        numbers = [at for at in range(len(args)) if at not in left_out]
        tensors = as_tensors([args[at] for at in numbers])
        ranks = _core_ranks(signature, len(numbers))
        batches = [tensor.shape[: tensor.ndim - rank] for tensor, rank in zip(tensors, ranks, strict=True)]
        batch = broadcast(*batches)
        count = int(np.prod([int(n) for n in batch], dtype=np.int64))
        flat = []
        for tensor, rank in zip(tensors, ranks, strict=True):
            core = tensor.shape[tensor.ndim - rank :]
            flat.append(reshape(broadcast_to(tensor, (*batch, *core)), (count, *core)))

        def single(parts: Any) -> Any:
            arguments = list(args)
            for at, part in zip(numbers, parts, strict=True):
                arguments[at] = part
            return pyfunc(*arguments)

        results = vectorized_map(single, tuple(flat))
        return tree.map_structure(lambda result: reshape(result, (*batch, *result.shape[1:])), results)

    return function


def _core_ranks(signature: str | None, count: int) -> list[int]:
    if signature is None:
        return [0] * count
    inputs = re.findall(r"\(([^)]*)\)", signature.partition("->")[0])
    if len(inputs) != count:
        raise ConfigError(f"vectorize: signature={signature!r} describes {len(inputs)} inputs, called with {count}")
    return [len([name for name in group.split(",") if name.strip()]) for group in inputs]
