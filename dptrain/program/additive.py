"""Whether totals are sums over samples, and so independent of how samples are batched.

The mean loss of a batch times its rows is such a sum; the sum of the losses times its rows is not. A tensor's degree
tells them apart: the power of the number of rows among its factors.
"""

from collections.abc import Iterable

from dptrain.program.lowering import is_same
from dptrain.program.operand import OPERATORS
from dptrain.program.program import Program
from dptrain.program.tensor import Tensor, Variable


def sums_over_samples(program: Program, totals: Iterable[Variable]) -> bool:
    """Whether a traced step adds only sums over its samples to these variables, if anything."""
    degrees: dict[Tensor, int | None] = {}  # None if there is no degree
    data = set(program.inputs.values())
    for tensor in program.tensors:
        inputs = [degrees[operand] for operand in tensor.inputs]
        degrees[tensor] = int(tensor.counts_rows) if tensor.op is None else _degree(tensor, inputs)
        if any(operand in data for operand in tensor.inputs):
            data.add(tensor)

    def is_sum(variable: Variable, new: Tensor) -> bool:
        if new is program.state[variable]:
            return True
        if is_same(new):
            return is_sum(variable, new.inputs[0])
        if new.op is not OPERATORS["+"]:
            return False
        old, added = new.inputs
        of_samples = degrees[added] == (0 if added in data else 1)
        return of_samples and is_sum(variable, old)

    return all(is_sum(total, program.updates[total]) for total in totals if total in program.updates)


def _degree(tensor: Tensor, inputs: list[int | None]) -> int | None:
    op = tensor.op
    if not any(inputs) and None not in inputs:
        return 0
    if op is None or op.linear is None or None in inputs:
        return None
    degrees = [degree for degree in inputs if degree is not None]
    if op.quotient is not None:
        return degrees[0] - degrees[1]
    if op.linear == "each" and op.linear_in is None:
        return sum(degrees)
    linear_in = range(len(degrees)) if op.linear_in is None else op.linear_in
    others_vary = any(degree for number, degree in enumerate(degrees) if number not in linear_in)
    degrees_in_linear = {degrees[number] for number in linear_in}
    return None if others_vary or len(degrees_in_linear) > 1 else degrees_in_linear.pop()
