"""An op that is computed in parts, as ranks do that divide it along a letter."""

import numpy as np

from dptrain.program.shapes import row_axis


def attributes_of_part(made, shapes, out, rows=None):
    """Return the attributes of a tensor's op for operands of these shapes and an output of that one.

    Args:
        made: the tensor.
        shapes: of parts of its operands.
        out: of its part.
        rows: of the batch that the rank has; None for all.
    """
    found = dict(made.op.local_attributes(made, rows, 0))
    if "key" in found:  # of what is taken from the operand, or put into zeros
        old, new = (made.shape, out) if "shape" in found else (made.inputs[0].shape, shapes[0])
        found["key"] = tuple(
            (0, n, 1) if one == (0, before, 1) else own
            for one, own, before, n in zip(made.attributes["key"], found["key"], old, new, strict=True)
        )
    return found | ({"shape": tuple(out)} if "shape" in found else {})


def computed(made, arrays, out, first_row=0, rows=None):
    """Return what a tensor's op makes of parts of its operands, of the shape `out`."""
    attributes = attributes_of_part(made, [one.shape for one in arrays], out, rows)
    if made.op.is_view:
        found = np.asarray(made.op.compute(*arrays, **attributes))
        assert found.shape == tuple(out)
        return found
    array = np.empty(out, made.dtype)
    with np.errstate(all="ignore"):
        rows_of = {"first_row": first_row if row_axis(made.shape) == 0 else 0} if made.op.by_row else {}
        made.op.compute(*arrays, **attributes | rows_of, out=array)
    return array
