"""Which weights are pruned, and how: marks on layers, from which optimizers make masks."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from dptrain.errors import ConfigError
from dptrain.layers import Layer
from dptrain.program.tensor import Variable
from dptrain.pruning import masks
from dptrain.pruning.schedules import ConstantSparsity, PruningSchedule
from dptrain.registry.names import suggestion
from dptrain.runtime.types import is_floating

T = TypeVar("T", bound=Layer | list[Any])
# Words in the names of weights without connections, though some have several axes.
_NOT_PRUNED = ("bias", "gamma", "beta", "alpha", "scale")


@dataclass(frozen=True, eq=False)
class Pruning:
    """How weights are pruned together; the arguments are those of `prune_low_magnitude`."""

    schedule: PruningSchedule
    block_size: tuple[int, int] = (1, 1)
    block_pooling_type: masks.Pooling = "AVG"
    sparsity_m_by_n: tuple[int, int] | None = None
    global_unstructured: bool = False
    regrowth: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.schedule, PruningSchedule):
            raise ConfigError(f"pruning_schedule: expected a PruningSchedule, found {type(self.schedule).__name__}")
        if len(self.block_size) != 2 or not all(isinstance(length, int) and length >= 1 for length in self.block_size):
            raise ConfigError(f"block_size = {self.block_size}: expected rows and columns, such as (4, 4)")
        if self.block_pooling_type not in ("AVG", "MAX"):
            raise ConfigError(f"block_pooling_type = {self.block_pooling_type!r}: expected 'AVG' or 'MAX'")
        if self.regrowth is not None and not 0 < self.regrowth < 1:
            raise ConfigError(f"regrowth = {self.regrowth}: expected a fraction above 0 and below 1, such as 0.3")
        if self.sparsity_m_by_n is not None:
            m, n = self.sparsity_m_by_n
            if not 0 < m < n:
                raise ConfigError(f"sparsity_m_by_n = {self.sparsity_m_by_n}: expected m zeros of n, such as (2, 4)")
            if self.global_unstructured or self.block_size != (1, 1) or self.regrowth is not None:
                raise ConfigError(
                    f"pruning {m}:{n} determines the remaining weights; leave out blocks, global pruning and regrowth"
                )

    @property
    def regrows(self) -> bool:
        """Whether the optimizer keeps dense gradients, by which connections are regrown."""
        return self.regrowth is not None

    def takes(self, variable: Variable) -> bool:
        """Return whether a weight is pruned: trained, at least two axes, no bias or scale."""
        return variable.trainable and is_prunable(variable)

    def mark(self, variable: Variable, label: str) -> None:
        """Mark a weight as pruned; `label` names its layer in messages."""
        if self.sparsity_m_by_n is not None:
            m, n = self.sparsity_m_by_n
            if variable.shape[-2] % n:
                raise ConfigError(
                    f"pruning {m}:{n} of layer {label!r}: its {variable.name} of shape {variable.shape} has "
                    f"{variable.shape[-2]} inputs, not a multiple of {n}; name the other layers: layers=[...] or "
                    "--prune-layers"
                )
        variable.pruning = self

    def masks(
        self,
        weights: Sequence[masks.Array],
        old_masks: Sequence[masks.Array],
        gradients: Sequence[masks.Array],
        step: int,
    ) -> list[masks.Mask]:
        """Return the new masks after `step` updates; with regrowth from `old_masks` (0 or 1) and dense gradients."""
        sparsity, block = self.schedule.sparsity(step), self.block_size
        if self.sparsity_m_by_n is not None:
            m, n = self.sparsity_m_by_n
            return [masks.m_by_n(weight, m, n) for weight in weights]
        scores = [masks.pooled(weight, block, self.block_pooling_type) for weight in weights]
        stayed = [masks.pooled(mask, block, "MAX") > 0 for mask in old_masks] if self.regrows else []
        growth = [masks.pooled(gradient, block, self.block_pooling_type) for gradient in gradients]
        ends = np.cumsum([score.size for score in scores])[:-1]
        if self.global_unstructured:
            scores, stayed, growth = ([np.concatenate(parts)] if parts else [] for parts in (scores, stayed, growth))
        fraction = self._fraction(step)
        new_masks = (
            [
                masks.regrown(score, sparsity, mask, grown, fraction)
                for score, mask, grown in zip(scores, stayed, growth, strict=True)
            ]
            if self.regrows
            else [masks.magnitude_mask(score, sparsity) for score in scores]
        )
        if self.global_unstructured:
            new_masks = np.split(new_masks[0], ends)
        return [masks.spread(mask, weight.shape, block) for mask, weight in zip(new_masks, weights, strict=True)]

    def _fraction(self, step: int) -> float:
        """Return the share of weights to regrow: a cosine from `regrowth` to 0, or constant without an end."""
        begin, end = self.schedule.begin_step, self.schedule.end_step
        if end == -1 or self.regrowth is None:
            return self.regrowth or 0.0
        t = min(max((step - begin) / max(end - begin, 1), 0.0), 1.0)
        return self.regrowth / 2 * (1 + math.cos(math.pi * t))

    def describe(self) -> dict[str, Any]:
        """Return the settings as JSON: what must be the same on all ranks, and on resume."""
        settings = {name: value for name, value in vars(self).items() if name != "schedule"}
        return settings | {"schedule": [type(self.schedule).__name__, self.schedule.get_config()]}


def prune_low_magnitude(
    to_prune: T,
    pruning_schedule: PruningSchedule | None = None,
    block_size: tuple[int, int] = (1, 1),
    block_pooling_type: masks.Pooling = "AVG",
    *,
    sparsity_m_by_n: tuple[int, int] | None = None,
    global_unstructured: bool = False,
    regrowth: float | None = None,
    layers: Sequence[str] | None = None,
) -> T:
    """Make the kernels and embeddings of a model or of layers sparse during training.

    Weights of smallest magnitude become zero, and stay zero: the optimizer has a mask for each, and applies it to
    gradients before its update and to values after it. Biases and weights of normalization are not pruned. The model is
    marked in place; `fit` updates the masks (`UpdatePruningStep`).

    Source: S. Han et al., "Learning both weights and connections for efficient neural networks", NeurIPS 2015; the
    interface is that of TensorFlow Model Optimization, `global_unstructured` PyTorch's.

    Args:
        to_prune: a model, a layer, built or not, or a list of layers.
        pruning_schedule: how sparse and when; `ConstantSparsity(0.5, 0)` by default.
        block_size: prune whole blocks of (inputs, outputs) of the weights as matrices.
        block_pooling_type: a block's magnitude is the "AVG" or "MAX" of its elements'.
        sparsity_m_by_n: (2, 4): two of every four elements along the inputs become zero, from the schedule's first
            update on; its sparsity is ignored.
        global_unstructured: compare magnitudes over all pruned weights, not within each.
        regrowth: the part of the connections that each update of the masks replaces by those with the largest gradients
            (RigL); it falls to 0 along a cosine until the schedule's end.
        layers: names of the layers to prune; all by default.

    Returns:
        `to_prune`.

    Raises:
        ConfigError: an argument is out of range, a layer is unknown, or there is nothing to prune.
    """
    schedule = ConstantSparsity(0.5, 0) if pruning_schedule is None else pruning_schedule
    pruning = Pruning(schedule, block_size, block_pooling_type, sparsity_m_by_n, global_unstructured, regrowth)
    chosen = list(_flat(to_prune))
    if layers is not None:
        names = {str(layer.name): layer for layer in chosen if layer is not to_prune}
        if missing := [name for name in layers if name not in names]:
            raise ConfigError(f"pruning: unknown layer {missing[0]!r}{suggestion(missing[0], names)}")
        chosen = [part for name in layers for part in names[name]._flatten_layers()]
    count = 0
    for layer in chosen:
        weights = [weight for weight in layer._own_weights if pruning.takes(weight)]
        count += len(weights) or not layer.built
        for weight in weights:
            pruning.mark(weight, layer._display_name)
        layer._pruning, layer._changes = pruning, layer._changes + 1
    if not count:
        raise ConfigError("pruning: no layer has a trainable kernel or embeddings")
    return to_prune


def strip_pruning(model: T) -> T:
    """Stop pruning a model; its zeros stay, but may be trained. Files have the zeros with or without.

    Args:
        model: a model, a layer or a list of layers, as for `prune_low_magnitude`.
    """
    for layer in _flat(model):
        layer._pruning, layer._changes = None, layer._changes + 1
        for weight in layer._own_weights:
            weight.pruning = None
    return model


def is_prunable(variable: Variable) -> bool:
    """Return whether a weight is a kernel or embeddings, and no factor of LoRA, whose zeros are not its matrix's."""
    named = any(part in variable.name for part in _NOT_PRUNED) or variable.if_missing != "refuse"
    return len(variable.shape) >= 2 and is_floating(variable.dtype) and not named


def sparsity(model: Layer) -> float:
    """Return the part of zeros in all kernels and embeddings of a model, 0 if it has none; collective if sharded."""
    weights = [weight.numpy() for weight in model.weights if is_prunable(weight)]
    zeros = sum(weight.size - int(np.count_nonzero(weight)) for weight in weights)
    return zeros / max(sum(weight.size for weight in weights), 1)


def described(model: Layer) -> dict[str, Any]:
    """Return, as JSON by path, how weights of a model are pruned."""
    return {weight._path: weight.pruning.describe() for weight in model.trainable_weights if weight.pruning is not None}


def _flat(layers: Any) -> Iterator[Layer]:
    if isinstance(layers, list | tuple):
        for layer in layers:
            yield from _flat(layer)
    elif isinstance(layers, Layer):
        yield from layers._flatten_layers()
    else:
        raise ConfigError(f"pruning: expected a model, a layer or a list of layers, found {type(layers).__name__}")
