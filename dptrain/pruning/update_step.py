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
    """Updates the masks of weights that are pruned, as their schedules say, and adds "sparsity" to the logs.

    `fit` adds it where the model has such weights. Masks are functions of weights, which all ranks have, or gather
    where they are sharded; so all ranks have the same ones. Steps run together up to the next update. "sparsity" is
    the part of zeros among the weights that are pruned.

    In a loop of one's own over `train_on_batch`: `set_model` first, `on_epoch_begin(0)` before the first batch, and
    `on_train_batch_end(0)` after each.
    """

    _same_on_all_ranks = ()

    def __init__(self) -> None:
        super().__init__()
        self._begun = False
        self._next: int | None = 0  # steps of the trainer after which to look; None for never
        self._looked: dict[tuple[Optimizer, Pruning], int] = {}
        self._zeros: dict[Variable, int] = {}

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Start anew."""
        self._begun, self._next = False, 0
        self._looked, self._zeros = {}, {}

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Before the first epoch, when state has been restored, see whether the schedule has begun. Collective."""
        if not self._begun:
            if not self.model._has_own_steps:
                self.model._compiled_optimizer.build(self.model.trainable_weights)
            self._look()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Update the masks if it is time to. Collective."""
        if "_trainer" not in vars(self) or (self._next is not None and self._trainer.steps_done >= self._next):
            self._look()

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Add the sparsity to the logs."""
        if logs is not None and self._zeros:
            logs["sparsity"] = sum(self._zeros.values()) / sum(math.prod(one.shape) for one in self._zeros)

    def _most_steps(self, steps: int) -> int:
        """See `Callback`."""
        return steps if self._next is None else min(steps, max(self._next - self._trainer.steps_done, 1))

    def _look(self) -> None:
        """Update what is due, and find out when something will be."""
        ahead: list[int] = []
        for optimizer in self.model._all_optimizers:
            made, every = int(optimizer.iterations), optimizer.gradient_accumulation_steps or 1
            groups: dict[Pruning, list[Variable]] = {}
            for one in optimizer._masks:
                groups.setdefault(one.pruning, []).append(one)
            for pruning, variables in groups.items():
                if self._looked.get((optimizer, pruning)) != made:
                    self._update(optimizer, pruning, variables, made)
                following = pruning.schedule.next_step(made)
                ahead += [] if following is None else [(following - made - 1) * every + 1]
        self._begun = bool(self._looked)
        if not self._begun:  # a step of the user's own makes slots when it is first traced
            ahead = [1]
        if "_trainer" in vars(self):
            self._next = self._trainer.steps_done + min(ahead) if ahead else None

    def _update(self, optimizer: Optimizer, pruning: Pruning, variables: list[Variable], made: int) -> None:
        """Update the masks of weights that are pruned together, if it is time to.

        The first look of a training comes after an interrupted one was restored, with its masks. Masks of ones alone
        have never been updated: the training begins, or its weights come from a file.
        """
        key, schedule = (optimizer, pruning), pruning.schedule
        begins, self._looked[key] = key not in self._looked, made
        if begins:
            for one in variables:
                self._count(one, optimizer._masks[one].numpy())
        never = begins and made >= schedule.begin_step and not any(self._zeros[one] for one in variables)
        if not never and (begins or not schedule(made)[0]):
            return
        with self._trainer.changing() if "_trainer" in vars(self) else nullcontext():
            # One by one where they may be: sharded weights are gathered, and may not fit into memory together.
            for own in [variables] if pruning.global_unstructured else [[one] for one in variables]:
                known = [optimizer._masks[one].numpy() for one in own] if pruning.regrows else []
                gradients = [optimizer._dense_gradient(one) for one in own] if pruning.regrows else []
                found = pruning.masks([one.numpy() for one in own], known, gradients, made)
                for one, mask in zip(own, found, strict=True):
                    optimizer._prune(one, mask)
                    self._count(one, mask)

    def _count(self, variable: Variable, mask: npt.NDArray[Any]) -> None:
        self._zeros[variable] = mask.size - int(np.count_nonzero(mask))
