"""BackupAndRestore: resumes an interrupted training to the bit."""

import os
from typing import Any

from dptrain.callbacks.checkpointing import Checkpointing
from dptrain.errors import ConfigError


class BackupAndRestore(Checkpointing):
    """Keeps checkpoints of the training in a directory; the next `fit` continues from the newest good one.

    A checkpoint holds epoch and step; all variables: weights, optimizer slots, number of updates, learning rate,
    numbers of random draws, and the sums of loss and metrics in the current epoch; the history; and the other
    callbacks' states (`Callback.state_dict`). The order of the samples is a function of seed and epoch. So with the
    same arguments of `compile` and `fit` the result has the bits of an uninterrupted training, on the same number of
    ranks. Keras saves weights and optimizer alone. Other arguments are refused, unless `resume_anyway` names them.

    SIGTERM, SIGUSR1 and Ctrl-C end the training after a step that all ranks agree on, with a checkpoint. The process
    then exits with code 75; alone, Ctrl-C is a KeyboardInterrupt. A second signal ends it at once.

    Args:
        backup_dir: a directory for nothing else; two trainings cannot share it.
        save_freq: "epoch", or a number of steps between saves, counted across epochs. With a number the training
            continues in the middle of an epoch, where Keras restarts the epoch with newer weights.
        double_checkpoint: also keep the checkpoint before the last, in case that is damaged.
        delete_checkpoint: delete the checkpoints when the training is complete.

    Raises:
        ConfigError: no directory, or another `save_freq` (a ValueError, as in Keras).

    Source: keras/src/callbacks/backup_and_restore.py, Keras 3.15.
    """

    def __init__(
        self,
        backup_dir: Any,
        save_freq: str | int = "epoch",
        double_checkpoint: bool = False,
        delete_checkpoint: bool = True,
    ) -> None:
        if not backup_dir:
            raise ConfigError("Empty `backup_dir` argument passed")
        if save_freq is False:
            raise ConfigError("not supported: save_freq=False of BackupAndRestore")
        if save_freq != "epoch" and (not isinstance(save_freq, int) or save_freq < 1):
            raise ConfigError(
                f"Invalid value for argument `save_freq`. Received: save_freq={save_freq}. "
                "Expected either 'epoch' or an integer value."
            )
        self.backup_dir = os.fspath(backup_dir)
        self.save_freq = save_freq
        self.double_checkpoint = double_checkpoint
        self.delete_checkpoint = delete_checkpoint
        super().__init__(
            self.backup_dir,
            epochs=save_freq == "epoch",
            steps=None if save_freq == "epoch" else int(save_freq),
            keep=2 if double_checkpoint else 1,
            keeps_best=False,
            delete=delete_checkpoint,
            advice="choose another `backup_dir` of BackupAndRestore",
        )
