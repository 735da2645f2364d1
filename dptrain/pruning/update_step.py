"""UpdatePruningStep: updates masks between steps."""

import math
from contextlib import nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt

from dptrain.callbacks.base import Callback, Logs
from dptrain.optimizers import Optimizer
from dptrain.program.tensor import Variable
from dptrain.pruning.marking import Pruning


class UpdatePruningStep(Callback):
    """Updates the masks of pruned weights, as their schedules say, and adds "sparsity" to the logs.

    `fit` adds it to models with such weights. Masks are functions of weights, which all ranks have, or gather if
    sharded, so all ranks have the same masks. Steps run together up to the next update. "sparsity" is the part of zeros
    among the pruned weights.

    In a loop of your own over `train_on_batch`: `set_model` first, `on_epoch_begin(0)` before the first batch, and
    `on_train_batch_end(0)` after each.
    """

    _same_on_all_ranks = ()

    def __init__(self) -> None:
        super().__init__()
        self._begun = False
        self._next: int | None = 0  # the trainer's steps until the next check; None for never
        self._checked_at: dict[tuple[Optimizer, Pruning], int] = {}
        self._zeros: dict[Variable, int] = {}

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Reset."""
        self._begun, self._next = False, 0
        self._checked_at, self._zeros = {}, {}

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Update masks that are due, before the first epoch and after a resume. Collective."""
        if not self._begun:
            if not self.model._has_custom_steps:
                self.model._compiled_optimizer.build(self.model.trainable_weights)
            self._check()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Update masks that are due. Collective."""
        if "_trainer" not in vars(self) or (self._next is not None and self._trainer.steps_done >= self._next):
            self._check()

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Add the sparsity to the logs."""
        if logs is not None and self._zeros:
            logs["sparsity"] = sum(self._zeros.values()) / sum(math.prod(weight.shape) for weight in self._zeros)

    def _most_steps(self, steps: int) -> int:
        return steps if self._next is None else min(steps, max(self._next - self._trainer.steps_done, 1))

    def _check(self) -> None:
        """Update masks that are due, and compute the step of the next update."""
        ahead: list[int] = []
        for optimizer in self.model._all_optimizers:
            updates, every = int(optimizer.iterations), optimizer.gradient_accumulation_steps or 1
            groups: dict[Pruning, list[Variable]] = {}
            for weight in optimizer._masks:
                groups.setdefault(weight.pruning, []).append(weight)
            for pruning, variables in groups.items():
                if self._checked_at.get((optimizer, pruning)) != updates:
                    self._update(optimizer, pruning, variables, updates)
                following = pruning.schedule.next_step(updates)
                ahead += [] if following is None else [(following - updates - 1) * every + 1]
        self._begun = bool(self._checked_at)
        if not self._begun:  # a user's own step creates slots when it is first traced
            ahead = [1]
        if "_trainer" in vars(self):
            self._next = self._trainer.steps_done + min(ahead) if ahead else None

    def _update(self, optimizer: Optimizer, pruning: Pruning, variables: list[Variable], updates: int) -> None:
        """Update the masks of weights that are pruned together, if due.

        The first check of a training follows the restoring of its masks. Masks without zeros have never been updated:
        the training begins, or its weights come from a file.
        """
        key, schedule = (optimizer, pruning), pruning.schedule
        begins, self._checked_at[key] = key not in self._checked_at, updates
        if begins:
            for weight in variables:
                self._count(weight, optimizer._masks[weight].numpy())
        never = begins and updates >= schedule.begin_step and not any(self._zeros[weight] for weight in variables)
        if not never and (begins or not schedule(updates)[0]):
            return
        with self._trainer.changing() if "_trainer" in vars(self) else nullcontext():
            # One by one if possible: sharded weights are gathered, and may not fit into memory together.
            for group in [variables] if pruning.global_unstructured else [[weight] for weight in variables]:
                old_masks = [optimizer._masks[weight].numpy() for weight in group] if pruning.regrows else []
                gradients = [optimizer._dense_gradient(weight) for weight in group] if pruning.regrows else []
                new_masks = pruning.masks([weight.numpy() for weight in group], old_masks, gradients, updates)
                for weight, mask in zip(group, new_masks, strict=True):
                    optimizer._prune(weight, mask)
                    self._count(weight, mask)

    def _count(self, variable: Variable, mask: npt.NDArray[Any]) -> None:
        self._zeros[variable] = mask.size - int(np.count_nonzero(mask))
