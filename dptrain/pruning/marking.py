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

T = TypeVar("T", bound=Layer | list[Any])
# Words in the names of weights that hold no connections, though some have several axes.
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
        """Check the arguments.

        Raises:
            ConfigError: one is out of range, or some do not go together.
        """
        if not isinstance(self.schedule, PruningSchedule):
            raise ConfigError(f"pruning_schedule: expected a PruningSchedule, found {type(self.schedule).__name__}")
        if len(self.block_size) != 2 or not all(isinstance(one, int) and one >= 1 for one in self.block_size):
            raise ConfigError(f"block_size = {self.block_size}: expected rows and columns, such as (4, 4)")
        if self.block_pooling_type not in ("AVG", "MAX"):
            raise ConfigError(f"block_pooling_type = {self.block_pooling_type!r}: expected 'AVG' or 'MAX'")
        if self.regrowth is not None and not 0 < self.regrowth < 1:
            raise ConfigError(f"regrowth = {self.regrowth}: expected a part above 0 and below 1, such as 0.3")
        if self.sparsity_m_by_n is not None:
            m, n = self.sparsity_m_by_n
            if not 0 < m < n:
                raise ConfigError(f"sparsity_m_by_n = {self.sparsity_m_by_n}: expected m zeros of n, such as (2, 4)")
            if self.global_unstructured or self.block_size != (1, 1) or self.regrowth is not None:
                raise ConfigError(
                    f"pruning {m}:{n} says itself which weights stay; leave out blocks, global pruning and regrowth"
                )

    @property
    def regrows(self) -> bool:
        """Whether an optimizer keeps the gradients of all weights, by which some are regrown."""
        return self.regrowth is not None

    def takes(self, variable: Variable) -> bool:
        """Whether a weight of a layer is pruned: it is trained, has two axes or more, and is no bias or scale."""
        return variable.trainable and is_prunable(variable)

    def mark(self, variable: Variable, label: str) -> None:
        """Let a weight be pruned.

        Args:
            variable: the weight.
            label: of its layer, for messages.

        Raises:
            ConfigError: m:n does not fit its shape.
        """
        if self.sparsity_m_by_n is not None:
            m, n = self.sparsity_m_by_n
            if variable.shape[-2] % n:
                raise ConfigError(
                    f"pruning {m}:{n} of layer {label!r}: its {variable.name} of shape {variable.shape} has "
                    f"{variable.shape[-2]} inputs, no multiple of {n}; name the other layers: layers=[...] or "
                    "--prune-layers"
                )
        variable.pruning = self

    def masks(
        self,
        weights: Sequence[masks.Array],
        known: Sequence[masks.Array],
        gradients: Sequence[masks.Array],
        step: int,
    ) -> list[masks.Mask]:
        """Return the new masks of all weights that are pruned together.

        Args:
            weights: their values.
            known: their masks so far, 0 or 1; with regrowth only, as the one that follows.
            gradients: of all elements.
            step: updates that the optimizer has made.
        """
        sparsity, block = self.schedule.sparsity(step), self.block_size
        if self.sparsity_m_by_n is not None:
            m, n = self.sparsity_m_by_n
            return [masks.m_by_n(one, m, n) for one in weights]
        scores = [masks.pooled(one, block, self.block_pooling_type) for one in weights]
        stayed = [masks.pooled(one, block, "MAX") > 0 for one in known] if self.regrows else []
        growth = [masks.pooled(one, block, self.block_pooling_type) for one in gradients]
        ends = np.cumsum([one.size for one in scores])[:-1]
        if self.global_unstructured:
            scores, stayed, growth = ([np.concatenate(one)] if one else [] for one in (scores, stayed, growth))
        fraction = self._fraction(step)
        found = (
            [
                masks.regrown(one, sparsity, mask, grown, fraction)
                for one, mask, grown in zip(scores, stayed, growth, strict=True)
            ]
            if self.regrows
            else [masks.kept(one, sparsity) for one in scores]
        )
        if self.global_unstructured:
            found = np.split(found[0], ends)
        return [masks.spread(one, weight.shape, block) for one, weight in zip(found, weights, strict=True)]

    def _fraction(self, step: int) -> float:
        """Return which part of the weights is regrown: a cosine from `regrowth` to 0, or constant without an end."""
        begin, end = self.schedule.begin_step, self.schedule.end_step
        if end == -1 or self.regrowth is None:
            return self.regrowth or 0.0
        t = min(max((step - begin) / max(end - begin, 1), 0.0), 1.0)
        return self.regrowth / 2 * (1 + math.cos(math.pi * t))

    def describe(self) -> dict[str, Any]:
        """Return it as JSON can carry it: what must be the same on all ranks, and for a training to go on."""
        own = {name: value for name, value in vars(self).items() if name != "schedule"}
        return own | {"schedule": [type(self.schedule).__name__, self.schedule.get_config()]}


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
    """Let the kernels and embeddings of a model or of layers become sparse while they are trained.

    Those of smallest magnitude become zero, and stay zero: the optimizer has a mask for each, and applies it to
    gradients before its update and to values after it. Biases and weights of normalization are not pruned. The model is
    marked in place; `fit` updates the masks (`UpdatePruningStep`).

    Source: S. Han et al., "Learning both weights and connections for efficient neural networks", NeurIPS 2015; the
    interface is that of TensorFlow Model Optimization, `global_unstructured` PyTorch's.

    Args:
        to_prune: a model, a layer, built or not, or a list of layers.
        pruning_schedule: how sparse and when; `ConstantSparsity(0.5, 0)` by default.
        block_size: prune whole blocks of (inputs, outputs) of the weights as matrices.
        block_pooling_type: "AVG" or "MAX" of the magnitudes is a block's.
        sparsity_m_by_n: (2, 4): two of every four elements along the inputs become zero, from the first update of the
            schedule on, whose sparsity is then not read.
        global_unstructured: compare magnitudes over all weights that are pruned, not within each.
        regrowth: the part of the connections that is replaced at each update of the masks by those whose gradients are
            largest (RigL); to the schedule's end it falls to 0 along a cosine.
        layers: names of the layers to prune; all by default.

    Returns:
        `to_prune`.

    Raises:
        ConfigError: an argument is out of range, a layer is unknown, or there is nothing to prune.
    """
    schedule = ConstantSparsity(0.5, 0) if pruning_schedule is None else pruning_schedule
    pruning = Pruning(schedule, block_size, block_pooling_type, sparsity_m_by_n, global_unstructured, regrowth)
    known = list(_flat(to_prune))
    if layers is not None:
        names = {str(one.name): one for one in known if one is not to_prune}
        if missing := [one for one in layers if one not in names]:
            raise ConfigError(f"pruning: unknown layer {missing[0]!r}{suggestion(missing[0], names)}")
        known = [part for name in layers for part in names[name]._flatten_layers()]
    found = 0
    for layer in known:
        own = [one for one in layer._own if pruning.takes(one)]
        found += len(own) or not layer.built
        for one in own:
            pruning.mark(one, layer._display_name)
        layer._pruning, layer._changes = pruning, layer._changes + 1
    if not found:
        raise ConfigError("pruning: no layer has a trainable kernel or embeddings")
    return to_prune


def strip_pruning(model: T) -> T:
    """Let nothing of a model be pruned any more; its zeros stay, and may be trained to something else.

    A file of a model has its zeros with or without.

    Args:
        model: a model, a layer or a list of layers, as `prune_low_magnitude` took it.
    """
    for layer in _flat(model):
        layer._pruning, layer._changes = None, layer._changes + 1
        for one in layer._own:
            one.pruning = None
    return model


def is_prunable(variable: Variable) -> bool:
    """Whether a weight has connections that can go: a kernel or embeddings."""
    named = any(part in variable.name for part in _NOT_PRUNED)
    return len(variable.shape) >= 2 and variable.dtype.kind in "fV" and not named


def sparsity(model: Layer) -> float:
    """Return the part of zeros in all kernels and embeddings of a model, pruned or not; 0 where it has none.

    Collective where weights are sharded.
    """
    found = [one.numpy() for one in model.weights if is_prunable(one)]
    zeros = sum(one.size - int(np.count_nonzero(one)) for one in found)
    return zeros / max(sum(one.size for one in found), 1)


def described(model: Layer) -> dict[str, Any]:
    """Return how weights of a model are pruned, by path, as JSON can carry it."""
    return {one.path: one.pruning.describe() for one in model.trainable_weights if one.pruning is not None}


def _flat(found: Any) -> Iterator[Layer]:
    if isinstance(found, list | tuple):
        for one in found:
            yield from _flat(one)
    elif isinstance(found, Layer):
        yield from found._flatten_layers()
    else:
        raise ConfigError(f"pruning: expected a model, a layer or a list of layers, found {type(found).__name__}")
