"""An op that is computed in parts, as ranks do that divide it along a letter."""

import numpy as np

from dptrain.program.shapes import row_axis
from dptrain.program.sharding.local import attributes_of_part
from dptrain.program.tensor import Tensor


def computed(tensor, arrays, out, first_row=0, rows=None):
    """Return what a tensor's op makes of parts of its operands, of the shape `out`."""
    part = Tensor(
        tensor.op,
        tensor.inputs,
        attributes_of_part(tensor, [operand.shape for operand in arrays], out),
        out,
        tensor.dtype,
    )
    attributes = tensor.op.local_attributes(part, rows, 0)
    if tensor.op.is_view:
        view = np.asarray(tensor.op.compute(*arrays, **attributes))
        assert view.shape == tuple(out)
        return view
    array = np.empty(out, tensor.dtype)
    with np.errstate(all="ignore"):
        scale = tensor.shape[0].scale if rows is not None and row_axis(tensor.shape) == 0 else int(rows is None)
        rows_of = {"first_row": first_row * scale} if tensor.op.by_row else {}
        written = array
        if tensor.op.has_values:
            written = [array if number == tensor.index else None for number in range(len(tensor.node.values))]
        tensor.op.compute(*arrays, **attributes | rows_of, out=written)
    return array
