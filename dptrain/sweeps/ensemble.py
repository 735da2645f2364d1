"""`dptrain.Ensemble`: models that differ only by their seeds, trained side by side and averaged.

Source: B. Lakshminarayanan, A. Pritzel, C. Blundell, "Simple and scalable predictive uncertainty estimation using deep
ensembles", NeurIPS 2017.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from dptrain import comm as comms
from dptrain.batches.inputs import is_array
from dptrain.callbacks import BackupAndRestore, Callback, History
from dptrain.callbacks.base import flatten
from dptrain.comm import Communicator
from dptrain.errors import ConfigError
from dptrain.models import Model
from dptrain.models.cloning import scorer
from dptrain.models.from_files import load_members
from dptrain.program import tree
from dptrain.runtime.failure import phase
from dptrain.runtime.output.terminal import say, verbosity
from dptrain.saving import ensemble_zip
from dptrain.saving.state import decode, encode, restore
from dptrain.saving.weights import require_ending, write
from dptrain.sweeps.arguments import Builder, facts, require_array
from dptrain.sweeps.members import EpochProgress, Member, Members, train
from dptrain.sweeps.scheduling.round_robin import threads_for
from dptrain.sweeps.space import parse_seeds
from dptrain.train.devices import open_backend

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class EnsembleHistory:
    """Returned by `Ensemble.fit`; `members` holds each member's `History`."""

    members: Sequence[History]

    @property
    def epoch(self) -> list[int]:
        """Epochs that any member was trained for, counted from 0."""
        return sorted({epoch for member in self.members for epoch in member.epoch})

    @property
    def history(self) -> dict[str, list[float]]:
        """Mean over the members by log key, in order of the epochs; over those trained that long."""
        means: dict[str, list[float]] = {}
        for key in dict.fromkeys(key for member in self.members for key in member.history):
            lists = [member.history[key] for member in self.members if key in member.history]
            epochs = range(max(map(len, lists)))
            means[key] = [
                float(np.mean([values[epoch] for values in lists if len(values) > epoch])) for epoch in epochs
            ]
        return means


@dataclass(frozen=True)
class EnsemblePrediction:
    """Returned by `Ensemble.predict`; of several outputs, each is nested as these.

    Attributes:
        mean: (rows, *output_shape) over the members.
        std: (rows, *output_shape) standard deviation over the members (divided by their number).
        members: (number of members, rows, *output_shape), each as the member's own `predict` returns it.
    """

    mean: Any
    std: Any
    members: Any


class Ensemble:
    """Models of one function that differ by their seeds: a deep ensemble.

    Members are trained concurrently: on a CPU one on each core, if steps are compiled, on a GPU in packs that share
    launches. Under mpirun the ranks share them (rank 0 of P ranks trains members 0, P, 2P, ...) without collectives
    during training, and in the end every rank has all. A member has the bits of the model that `build_model` returns
    after `dptrain.utils.set_random_seed(seed)`, trained alone on one process.

    Args:
        build_model: returns a new compiled model, with the member's seed unless it sets another; it gets the seed as an
            argument if it has a parameter `seed`.
        seeds: how many members (with the seeds 0, 1, ...), or their seeds, such as range(8) or "0-7".

    Attributes:
        members: ordinary models, in the order of the seeds.

    Raises:
        ConfigError: invalid seeds, two equal members, or no compiled model returned.
    """

    def __init__(self, build_model: Callable[..., Model], seeds: int | str | Iterable[int | str] = 8) -> None:
        number = isinstance(seeds, int | np.integer) and not isinstance(seeds, bool)
        if number and seeds < 1:  # type: ignore[operator]
            raise ConfigError(
                f"Ensemble: seeds = {seeds}: expected the number of members, 1 or more, or a list of their seeds"
            )
        chosen = tuple(range(int(seeds))) if number else parse_seeds(seeds)  # type: ignore[arg-type]
        builder = Builder(build_model)
        self._set_members([builder.build(seed) for seed in chosen])

    def _set_members(self, members: Sequence[Model]) -> None:
        seeds = [member.seed for member in members]
        twice = [seed for seed in seeds if seeds.count(seed) > 1]
        if twice:
            raise ConfigError(
                f"Ensemble: two members have the seed {twice[0]} and would be identical; do not set the model's seed "
                "in build_model, or give it a parameter 'seed'"
            )
        self.members = list(members)

    @property
    def seeds(self) -> tuple[int, ...]:
        """Seeds of the members."""
        return tuple(member.seed for member in self.members)

    def __len__(self) -> int:
        return len(self.members)

    def fit(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: str | int = "auto",
        callbacks: Callable[[], Any] | Sequence[Sequence[Callback]] | None = None,
        validation_split: float = 0.0,
        validation_data: Any = None,
        **options: Any,
    ) -> EnsembleHistory:
        """Train all members, each in its seed's order of the samples. Collective.

        Args:
            x: as `Model.fit`; an array, or a `PyDataset`, which every member reads anew.
            y, batch_size, validation_split, options: as `Model.fit`, for each member; validation_data: arrays.
            epochs: number of the last epoch.
            verbose: 0 prints nothing, anything else a line an epoch with the means over the members.
            callbacks: a function that returns new ones for a member, or a list of callbacks for each member. A callback
                has one member as its model, and its logs; under mpirun it is called on the rank that trains it.

        Returns:
            The history of every member, on every rank.

        Raises:
            ConfigError: as `Model.fit`, or callbacks that are not those of single members.
            Exception: of `Model.fit`, of the first member that fails, named; no member goes on.
            AgreedError: any of these, on all ranks, under mpirun.
        """
        ranks, first = comms.current(), self.members[0]
        phase.enter("fit")
        arguments = {"x": x, "y": y, "batch_size": batch_size, "epochs": epochs, "validation_split": validation_split}
        arguments |= {"validation_data": validation_data, **options}

        def check() -> list[list[Callback]]:
            require_array("fit", x)
            if verbose not in ("auto", 0, 1, 2):
                raise ConfigError(f"verbose = {verbose!r}: expected 'auto', 0, 1 or 2")
            return self._callbacks_by_member(callbacks)

        hooks = first._agreed(ranks, "fit", check)
        if ranks.size > 1:
            decides = {"seeds": list(self.seeds)} | {name: facts(value) for name, value in arguments.items()}
            ranks.require_same("the ranks call fit differently", decides)
        mine = range(ranks.rank, len(self), ranks.size)
        with closing(open_backend(ranks, **first._device_options)) as backend:
            threads = threads_for(backend, max(1, len(mine)))
        progress = EpochProgress(len(self), int(epochs), shown=ranks.rank == 0 and verbosity(verbose) > 0)
        ranks.received()  # drop messages of an interrupted training of this process
        with first._collective(ranks), comms.independent():
            members = [
                Member(number, self.members[number], {**arguments, "callbacks": hooks[number]}, ranks)
                for number in mine
            ]
            with closing(Members(members, threads)) as group:
                error = train(ranks, group, progress)

        def end() -> None:
            if error is not None:
                raise error

        first._agreed(ranks, "fit", end)
        self._share(ranks)
        phase.enter("user code")
        return EnsembleHistory([_history_of(member) for member in self.members])

    def _callbacks_by_member(self, callbacks: Any) -> list[list[Callback]]:
        if callbacks is None:
            return [[] for _ in self.members]
        if callable(callbacks):
            callbacks = [[callbacks()] for _ in self.members]
        listed = isinstance(callbacks, list | tuple) and all(isinstance(hooks, list | tuple) for hooks in callbacks)
        if not listed or len(callbacks) != len(self):
            raise ConfigError(
                "callbacks: expected a function that returns new callbacks for a member, or a list of lists, one for "
                f"each of the {len(self)} members"
            )
        by_member = [list(flatten(hooks)) for hooks in callbacks]
        all_ids = [id(hook) for each in by_member for hook in each]
        if len(set(all_ids)) < len(all_ids):
            raise ConfigError("callbacks: two members share a callback; expected a new one for each member")
        if any(isinstance(hook, BackupAndRestore) for each in by_member for hook in each):
            raise ConfigError("not supported: BackupAndRestore for members; save the ensemble between two calls of fit")
        return by_member

    def _share(self, ranks: Communicator) -> None:
        """Send every member to all ranks from the one that trained it. Collective."""
        if ranks.size == 1:
            return
        for begin in range(0, len(self), ranks.size):
            number = begin + ranks.rank
            contents = ranks.allgather_bytes(_state(self.members[number]) if number < len(self) else b"")
            for other, content in zip(range(begin, len(self)), contents, strict=False):
                if other != number:
                    _restore(self.members[other], content)

    def evaluate(
        self,
        x: Any,
        y: Any = None,
        batch_size: int | None = None,
        verbose: str | int = "auto",
        sample_weight: Any = None,
        return_dict: bool = False,
    ) -> list[float] | float | dict[str, float]:
        """Return loss and metrics of the members' mean prediction, as `Model.evaluate`. Collective.

        Penalties on weights and activities are not part of this loss.

        Args:
            x, y, sample_weight: as `Model.fit`, arrays.
            batch_size: samples of a batch; by default whatever is fastest.
            verbose: 0 prints nothing, anything else one line.
            return_dict: return a dictionary by log key.

        Raises:
            ConfigError: members are not compiled or built, or override `test_step`, `compute_loss` or
                `compute_metrics`.
            DataError: data that does not fit the model.
        """
        ranks, first = comms.current(), self.members[0]

        def check() -> None:
            if not all(map(is_array, tree.leaves(x))):
                raise ConfigError(f"evaluate: x is a {type(x).__name__}: expected arrays")

        first._agreed(ranks, "evaluate", check)
        mean = self.predict(x, batch_size, verbose=0).mean
        scoring = first._agreed(ranks, "evaluate", lambda: scorer(first))
        result = scoring.evaluate(mean, y, batch_size, verbose, sample_weight, return_dict=return_dict)
        scoring._put_on(None)  # the metrics may be the first member's
        return result

    def predict(
        self, x: Any, batch_size: int | None = None, verbose: str | int = "auto", steps: int | None = None
    ) -> EnsemblePrediction:
        """Return the members' predictions with mean and spread, on every rank. Collective.

        The mean is taken over outputs: with a final softmax, over probabilities.

        Args:
            x: as `Model.fit`; arrays, or a `PyDataset`, which every member reads anew.
            batch_size: samples of a batch, over all ranks together; by default whatever is fastest.
            verbose: 0 prints nothing, anything else one line.
            steps: end after that many batches.

        Raises:
            ConfigError: x can be read only once.
            DataError: data that does not fit the model.
        """
        ranks, begun = comms.current(), time.perf_counter()

        def check() -> None:
            if not all(map(is_array, tree.leaves(x))):
                require_array("predict", x)

        self.members[0]._agreed(ranks, "predict", check)
        outputs = [member.predict(x, batch_size, verbose=0, steps=steps) for member in self.members]
        flat = [np.stack(each) for each in zip(*map(tree.leaves, outputs), strict=True)]
        means = [output.mean(0, np.float64).astype(output.dtype) for output in flat]
        stds = [output.std(0, np.float64).astype(output.dtype) for output in flat]
        if ranks.rank == 0 and verbosity(verbose):
            say(f"{len(self)} members - {time.perf_counter() - begun:.1f} s")
        nested = [tree.refilled(outputs[0], iter(each)) for each in (means, stds, flat)]
        return EnsemblePrediction(*nested)

    def save(self, filepath: str | Path, overwrite: bool = True) -> None:
        """Write all members to one `.zip` file, each as the `.keras` file of `Model.save`. Collective; rank 0 writes.

        Args:
            filepath: ends in `.zip`.
            overwrite: whether an existing file may be replaced.

        Raises:
            ConfigError: another ending, a member has no input shape yet, or h5py is not installed.
            OutputError: the file exists, or the disk is full or denied; an existing file stays as it was.
            AgreedError: either of these, on all ranks, under mpirun.
        """
        require_ending(filepath, ".zip")
        ranks = comms.current()

        def action() -> None:
            for member in self.members:
                member._require_weights()
            if ranks.rank == 0:
                write(Path(filepath), lambda: ensemble_zip.encode(self.members), overwrite=overwrite)

        with phase.during("saving"):
            self.members[0]._agreed(ranks, "saving", action)

    @classmethod
    def load(
        cls,
        filepath: str | Path,
        custom_objects: Mapping[str, Any] | None = None,
        compile: bool = True,
        **options: Any,
    ) -> Self:
        """Return the ensemble in a file of `save`; training goes on exactly where it stopped. Collective.

        Args:
            filepath: ends in `.zip`.
            custom_objects, compile, options: as `dptrain.models.load_model`.

        Raises:
            ConfigError: an argument is not supported, or h5py is not installed.
            DataError: the file is missing or damaged, or has what dptrain does not support; names it.
            AgreedError: either of these, on all ranks, under mpirun.
        """
        require_ending(filepath, ".zip")
        ensemble = cls.__new__(cls)
        ensemble._set_members(load_members(Path(filepath), custom_objects, compile, options))
        return ensemble


def _history_of(member: Model) -> History:
    assert member.history is not None
    return member.history


def _state(member: Model) -> bytes:
    """Encode what other ranks need of a trained member."""
    history = _history_of(member).state_dict()
    metadata = {"shape": member._build_shape, "rate": member._compiled_optimizer._resumed_rate, "history": history}
    return encode(member, metadata)


def _restore(member: Model, content: bytes) -> None:
    metadata, arrays = decode(content, f"member with seed {member.seed}")
    if not member.built:
        member.build(metadata["shape"])
    restore(member, arrays)
    member._compiled_optimizer._resume_learning_rate(metadata["rate"])
    member.history = History()
    member.history.load_state_dict(metadata["history"])
