"""Gathers of tensors as they lie in memory, and in the type in which they are stored."""

from dptrain.program.local import attributes_of_part
from dptrain.program.lowering import Element, axes_of
from dptrain.program.mesh import ALL_GATHER
from dptrain.program.tensor import Tensor


def gathered_in_order(tensor: Tensor) -> Tensor:
    """Return what stands for a tensor: what is made of a gather, for the gather of what is made.

    Of a transpose: a backward pass gathers weights as the forward pass does. A rank gives its part where it lies, and
    if that is of the first axis, whatever comes lies where it is to lie as well; who reads the transpose reads it in
    another order. Of a conversion to a wider type: fewer bytes travel, and products read factors in half precision.
    """
    if tensor.op is not ALL_GATHER or tensor.inputs[0].op is None:
        return tensor
    taken, about, shape = tensor.inputs[0], dict(tensor.attributes), tensor.shape
    if (axes := axes_of(taken)) is not None:
        about["axis"], shape = axes.index(about["axis"]), tuple(shape[axis] for axis in axes)
    elif not _widens(taken):
        return tensor
    (beneath,) = taken.inputs
    gathered = gathered_in_order(Tensor(ALL_GATHER, (beneath,), about, shape, beneath.dtype, name=beneath.name))
    made = attributes_of_part(taken, [shape], tensor.shape)
    return Tensor(taken.op, (gathered,), made, tensor.shape, tensor.dtype, name=tensor.name)


def _widens(tensor: Tensor) -> bool:
    lowering = None if tensor.op is None else tensor.op.lowering
    converts = isinstance(lowering, Element) and lowering.converts
    return converts and tensor.inputs[0].dtype.itemsize < tensor.dtype.itemsize
