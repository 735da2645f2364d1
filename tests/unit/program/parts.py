"""An op that is computed in parts, as ranks do that divide it along a letter."""

import numpy as np

from dptrain.program.shapes import row_axis
from dptrain.program.sharding.local import attributes_of_part
from dptrain.program.tensor import Tensor


def computed(made, arrays, out, first_row=0, rows=None):
    """Return what a tensor's op makes of parts of its operands, of the shape `out`."""
    part = Tensor(made.op, made.inputs, attributes_of_part(made, [one.shape for one in arrays], out), out, made.dtype)
    attributes = made.op.local_attributes(part, rows, 0)
    if made.op.is_view:
        found = np.asarray(made.op.compute(*arrays, **attributes))
        assert found.shape == tuple(out)
        return found
    array = np.empty(out, made.dtype)
    with np.errstate(all="ignore"):
        rows_of = {"first_row": first_row if rows is None or row_axis(made.shape) == 0 else 0} if made.op.by_row else {}
        written = array
        if made.op.has_values:
            written = [array if number == made.index else None for number in range(len(made.node.values))]
        made.op.compute(*arrays, **attributes | rows_of, out=written)
    return array
