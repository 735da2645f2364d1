"""How masks, attached to tensors (`mask_of`), travel between layers, as in Keras' `Layer.__call__`."""

import inspect
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dptrain.errors import ConfigError
from dptrain.program.shapes import differ, is_one, without_rows
from dptrain.program.tensor import Tensor, as_tensors, mask_of
from dptrain.program.tree import leaves, map_leaves

if TYPE_CHECKING:
    from dptrain.layers.base import Layer


def fill_masks(bound: inspect.BoundArguments, first: Any) -> Any:
    """Fill the mask arguments of `call` that were not passed from its tensors; return the first argument's mask.

    A single tensor's mask becomes `mask`; with several, `x`'s becomes `x_mask`.
    """
    arguments, accepted = bound.arguments, bound.signature.parameters
    holders = [name for name, value in arguments.items() if _holds_only_tensors(value)]
    if len(holders) == 1:
        if "mask" in accepted and arguments.get("mask") is None:
            arguments["mask"] = _masks_of(arguments[holders[0]])
    else:
        for name in holders:
            if f"{name}_mask" in accepted and arguments.get(f"{name}_mask") is None:
                arguments[f"{name}_mask"] = _masks_of(arguments[name])
    mask = arguments.get("mask")
    return _masks_of(first) if mask is None else mask


def attach_masks(layer: "Layer", first: Any, outputs: Any, previous_mask: Any) -> None:
    """Attach masks to a layer's outputs; warn if the layer drops a mask."""
    if not layer.supports_masking:
        if leaves(previous_mask):
            warnings.warn(
                f"Layer '{layer._display_name}' (of type {type(layer).__name__}) was passed an input with a mask "
                "attached to it. However, this layer does not support masking and will therefore destroy the mask "
                "information. Downstream layers will not see the mask.",
                stacklevel=2,
            )
        return
    tensors = list(_leaves_with_none(outputs))
    if all(mask_of(tensor) is not None for tensor in tensors):
        return
    for tensor, mask in zip(tensors, _leaves_with_none(layer.compute_mask(first, previous_mask)), strict=False):
        if isinstance(tensor, Tensor) and mask is not None and mask_of(tensor) is None:
            tensor._keras_mask = mask


def require_mask(layer: "Layer", mask: Any, lengths: Sequence[Any], name: str = "mask") -> None:
    """Refuse a mask whose lengths are neither these nor 1; None is no mask.

    Raises:
        ConfigError: names the layer, and both shapes.
    """
    if mask is None:
        return
    shape = as_tensors([mask])[0].shape
    if len(shape) != len(lengths) or any(differ(a, b) and not is_one(a) for a, b in zip(shape, lengths, strict=True)):
        raise ConfigError(
            f"{name} of layer {layer._display_name!r} ({type(layer).__name__}): shape {without_rows(shape)}, expected "
            f"{without_rows(lengths)}, as its input has"
        )


def _holds_only_tensors(value: Any) -> bool:
    inner = leaves(value)
    return bool(inner) and all(isinstance(leaf, Tensor) for leaf in inner)


def _masks_of(value: Any) -> Any:
    return map_leaves(lambda _, leaf: mask_of(leaf), value)


def _leaves_with_none(nested: Any) -> Iterator[Any]:
    if isinstance(nested, Mapping):
        nested = list(nested.values())
    if isinstance(nested, list | tuple):
        for inner in nested:
            yield from _leaves_with_none(inner)
    else:
        yield nested
