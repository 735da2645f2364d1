"""Gathers of tensors as they lie in memory."""

from dptrain.program.local import attributes_of_part
from dptrain.program.lowering import axes_of
from dptrain.program.mesh import ALL_GATHER
from dptrain.program.tensor import Tensor


def gathered_in_order(tensor: Tensor) -> Tensor:
    """Return what stands for a tensor: a transpose of a gather for the gather of a transpose.

    So a backward pass gathers weights as the forward pass does. A rank gives its part where it lies, and if that is of
    the first axis, whatever comes lies where it is to lie as well; who reads the transpose reads it in another order.
    """
    if tensor.op is not ALL_GATHER or (axes := axes_of(tensor.inputs[0])) is None:
        return tensor
    shown, (beneath,) = tensor.inputs[0], tensor.inputs[0].inputs
    about = {**tensor.attributes, "axis": axes.index(tensor.attributes["axis"])}
    shape = tuple(tensor.shape[axis] for axis in axes)
    gathered = gathered_in_order(Tensor(ALL_GATHER, (beneath,), about, shape, tensor.dtype, name=beneath.name))
    about = attributes_of_part(shown, [shape], tensor.shape)
    return Tensor(shown.op, (gathered,), about, tensor.shape, tensor.dtype, name=tensor.name)
