"""An op that is computed in parts, as ranks do that divide it along a letter."""

import numpy as np


def attributes_of_part(made, shapes, out):
    """Return the attributes of a tensor's op as they are for operands of these shapes and an output of that one."""
    found = dict(made.attributes)
    if "key" in found:  # of what is taken from the operand, or put into zeros
        old, new = (made.shape, out) if "shape" in found else (made.inputs[0].shape, shapes[0])
        found["key"] = tuple(
            (0, n, 1) if one == (0, before, 1) else one for one, before, n in zip(found["key"], old, new, strict=True)
        )
    return found | ({"shape": tuple(out)} if "shape" in found else {})


def computed(made, arrays, out, first_row=0):
    """Return what a tensor's op makes of parts of its operands, of the shape `out`."""
    attributes = attributes_of_part(made, [one.shape for one in arrays], out)
    if made.op.is_view:
        found = np.asarray(made.op.compute(*arrays, **attributes))
        assert found.shape == tuple(out)
        return found
    array = np.empty(out, made.dtype)
    made.op.compute(*arrays, **attributes, **({"first_row": first_row} if made.op.by_row else {}), out=array)
    return array
