"""The public face in Keras' words: a model that can be compiled, trained, evaluated and asked.

Layers, `compile` and the device are in `network`, weights and files in `stored`, steps of a user's own in
`train.custom`.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy.typing as npt

from dptrain import comm as comms
from dptrain.backend.base import flat_features
from dptrain.batches.adapters import BatchSource
from dptrain.batches.base import ArrayBatches, Batches
from dptrain.batches.inputs import (
    Samples,
    Stream,
    as_array,
    check_features,
    check_frequency,
    check_given,
    check_numbers,
    check_samples,
    check_unspecified,
    evaluation_batches,
    is_array,
    refuse_split,
    rows_of_batch,
    source_of,
    split_off,
    stream_batches,
    unpack,
    weights_of_classes,
)
from dptrain.batches.sampling import GlobalSampler, Sampler
from dptrain.batches.stream import StreamBatches, What
from dptrain.callbacks import Callback, CallbackList, History, ProgbarLogger
from dptrain.callbacks.base import flatten
from dptrain.comm import Communicator
from dptrain.data.loading import Split
from dptrain.errors import ConfigError
from dptrain.layers import Layer
from dptrain.runtime.failure import phase, warn
from dptrain.stored import StoredNetwork
from dptrain.train.trainer import StepIterator, run_to_end

Array = npt.NDArray[Any]


class Sequential(StoredNetwork):
    """Layers in a row, with training.

    The same script trains on one device when started by `python`, and on N when started by `mpirun -n N python`: every
    rank calls the same methods with the same arguments, and all methods that compute are collective.

    Args:
        layers: the layers; more can be added with `add`.
        trainable: False leaves all weights as they are, whatever the layers say.
        name: for summaries; "sequential" by default (which Keras numbers).
        seed: of initial weights, shuffling and dropout, the same on all ranks; by default that of
            `dptrain.utils.set_random_seed`, or 0.

    Raises:
        ConfigError: the seed is out of range, or something else than a layer.
    """

    def __init__(
        self,
        layers: Sequence[Layer] | None = None,
        trainable: bool = True,
        name: str | None = None,
        *,
        seed: int | None = None,
    ) -> None:
        super().__init__(layers, trainable=trainable, name="sequential" if name is None else name, seed=seed)
        self.history: History | None = None
        self.stop_training = self.stop_evaluating = self.stop_predicting = False

    # Training

    def fit(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: str | int = "auto",
        callbacks: Sequence[Callback] | None = None,
        validation_split: float = 0.0,
        validation_data: Any = None,
        shuffle: bool | Literal["batch"] = True,
        class_weight: Mapping[int, float] | None = None,
        sample_weight: Any = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: int | Sequence[int] = 1,
        *,
        drop_last: bool = False,
    ) -> History:
        """Train. Collective.

        Args:
            x: (rows, *input_shape), any real dtype, the same on all ranks; uint8 stays uint8 in memory, a memory map on
                disk. Or what makes batches (x, y) or (x, y, sample_weight): a generator, a `dptrain.utils.PyDataset`,
                a loader; see `dptrain.batches.inputs.source_of` for what they are and what ranks draw.
            y: (rows,) or (rows, 1) integer labels, or (rows, *output_shape) values, as the loss takes them.
            batch_size: samples of a global batch, over all ranks together; if not given 32, or, as in Keras, such that
                `steps_per_epoch` batches hold all samples. Not used where x makes batches.
            epochs: number of the last epoch.
            verbose: 0 silent, 1 live line, 2 one line an epoch, "auto" for 1 where a terminal shows it, mpirun's
                as well, else 2; DPTRAIN_PROGRESS (live, lines, none) overrides "auto".
            callbacks: called on every rank.
            validation_split: this fraction of the samples, the last ones, is evaluated instead of trained on.
            validation_data: (x, y) or (x, y, sample_weight) to evaluate after epochs, or what makes batches.
            shuffle: a new order every epoch, f(seed, epoch); "batch" changes the order within batches only. Of a
                PyDataset it is the order of its batches; others that make batches keep theirs.
            class_weight: weights of samples by their label, 1 where it is not named; of those trained on, not of the
                validation's.
            sample_weight: (rows,) weights of the samples in the loss.
            initial_epoch: number of epochs that are done already.
            steps_per_epoch: end epochs after that many steps; the next goes on in the data where the last has ended.
            validation_steps: evaluate that many batches of the validation data.
            validation_batch_size: of these batches, over all ranks together.
            validation_freq: evaluate after every so many epochs, or after those whose numbers, from 1, are given.
            drop_last: leave out a last batch that is not full (not in Keras).

        Returns:
            The history of losses and metrics, global values, the same on every rank; also `model.history`.

        Raises:
            ConfigError: `compile` was not called, or an argument is out of range (a ValueError, as in Keras).
            DataError: data that does not fit the model.
            AgreedError: either of these, on all ranks, under mpirun.
        """
        arguments = {name: value for name, value in locals().items() if name != "self"}
        run_to_end(self._fit_steps(**arguments))
        assert self.history is not None
        return self.history

    def fit_steps(self, *arguments: Any, **named: Any) -> StepIterator[None]:
        """Train as `fit`, and yield after every step, for whoever interleaves several trainings; `history` fills.

        Args:
            arguments: of `fit`.
            named: of `fit`.
        """
        bound = inspect.signature(self.fit).bind(*arguments, **named)
        bound.apply_defaults()
        return self._fit_steps(**bound.arguments)

    def _fit_steps(
        self,
        x: Any,
        y: Any,
        batch_size: int | None,
        epochs: int,
        verbose: str | int,
        callbacks: Sequence[Callback] | None,
        validation_split: float,
        validation_data: Any,
        shuffle: bool | Literal["batch"],
        class_weight: Mapping[int, float] | None,
        sample_weight: Any,
        initial_epoch: int,
        steps_per_epoch: int | None,
        validation_steps: int | None,
        validation_batch_size: int | None,
        validation_freq: int | Sequence[int],
        drop_last: bool,
    ) -> StepIterator[None]:
        comm = self._start("fit", x)

        def prepare() -> tuple[Samples | Stream, Samples | Stream | None, Sampler | None]:
            check_numbers(0, epochs=epochs, initial_epoch=initial_epoch)
            check_given(batch_size=batch_size, steps_per_epoch=steps_per_epoch)
            check_given(validation_batch_size=validation_batch_size, validation_steps=validation_steps)
            check_frequency(validation_freq)
            if validation_split and validation_data is None:
                refuse_split(x, y, sample_weight)
            train = self._data(comm, x, y, sample_weight, class_weight, shuffle=shuffle)
            validation = None
            if validation_data is not None:
                validation = self._data(comm, *unpack(validation_data, "validation_data"), looks=False)
            elif validation_split and isinstance(train, Samples):
                train, validation = split_off(train, validation_split)
                if class_weight is not None:  # which is for training alone, and all the weights that there are
                    validation = replace(validation, weights=None)
            if isinstance(train, Stream):
                return train, validation, None
            size = rows_of_batch(batch_size, len(train), steps_per_epoch)
            sampler = GlobalSampler(
                len(train), size, comm.rank, comm.size, seed=self.seed, shuffle=shuffle, drop_last=drop_last
            )
            return train, validation, sampler

        train, validation, sampler = self._agreed(comm, "fit", prepare)
        steps = train.source.num_batches if isinstance(train, Stream) else sampler.steps if sampler else None
        hooks = self._hooks(callbacks, verbose, epochs=epochs, steps=steps_per_epoch or steps)
        if comm.size > 1:
            # A rank with another number of steps would leave the others waiting; with other data or another batch size
            # each would compute the gradient of something else.
            facts = {
                "the training sets (shapes, dtypes, checksum) differ": train.facts,
                "arguments": [batch_size, epochs, shuffle, initial_epoch, steps_per_epoch, drop_last],
                "validation": [
                    None if validation is None else validation.facts,
                    validation_steps,
                    validation_batch_size,
                    list(validation_freq) if isinstance(validation_freq, Sequence) else validation_freq,
                ],
                "seed": self.seed,
                "layers": [[type(layer).__name__, layer.config()] for layer in self.layers],
                "trainable": self.trainable,
                "compiled": self._describe_compiled(),
            }
            comm.require_same("the ranks call fit differently", facts)
        watched = _watched(comm, hooks, "test")
        store = self._trainer(comm).replica.as_stored

        def batches() -> tuple[Batches, Batches | None]:
            own: Batches
            if isinstance(train, Stream):
                own = self._stream(train, comm, steps_per_epoch)
            else:
                assert sampler is not None
                own = ArrayBatches(train.stored(store), sampler, steps_per_epoch)
            if validation is None:
                return own, None
            if isinstance(validation, Stream):
                return own, self._stream(validation, comm, validation_steps, "evaluation")
            return own, evaluation_batches(
                validation.stored(store),
                comm,
                batch_size=validation_batch_size,
                otherwise=batch_size,
                steps=validation_steps,
                watched=watched,
                whole=self._whole(),
            )

        own, evaluated = self._agreed(comm, "fit", batches)
        if isinstance(own, StreamBatches):
            with self._collective(comm):
                own.reset()
        yield from self._train(
            own,
            evaluated,
            hooks,
            comm,
            epochs=epochs,
            initial_epoch=initial_epoch,
            validation_freq=validation_freq,
        )

    def fit_splits_steps(
        self,
        train: Split,
        validation: Split | None,
        sampler: Sampler,
        *,
        epochs: int,
        verbose: str | int = "auto",
        callbacks: Sequence[Callback] = (),
    ) -> StepIterator[None]:
        """Train on data that is already shared out among the ranks, in the order of a sampler. Collective.

        As `fit_steps`, it yields after every step.
        """
        comm = self._start("fit", train.x)
        hooks = self._hooks(callbacks, verbose, epochs=epochs, steps=sampler.steps)
        store = self._trainer(comm).replica.as_stored

        def batches() -> tuple[Batches, Batches | None]:
            own = ArrayBatches(store(train.x, train.y), sampler)
            if validation is None:
                return own, None
            return own, evaluation_batches(store(validation.x, validation.y), comm, mine=validation.mine)

        own, evaluated = self._agreed(comm, "fit", batches)
        yield from self._train(own, evaluated, hooks, comm, epochs=epochs)

    def _train(
        self, train: Batches, validation: Batches | None, hooks: CallbackList, comm: Communicator, **arguments: Any
    ) -> StepIterator[None]:
        """What all ways into a training have in common."""
        self.history = next(callback for callback in hooks.callbacks if isinstance(callback, History))
        trainer = self._trainer(comm)
        self._warn_of_nothing_to_train()
        for part in self.parts():
            part._share_parameters(comm)
        try:
            with self._collective(comm):
                yield from trainer.training(train, hooks, validation=validation, **arguments)
        finally:
            hooks.release()

    # Using

    def evaluate(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        verbose: str | int = "auto",
        sample_weight: Any = None,
        steps: int | None = None,
        callbacks: Sequence[Callback] | None = None,
        return_dict: bool = False,
    ) -> list[float] | float | dict[str, float]:
        """Return the mean loss and metrics over x. Collective.

        Args:
            x: as in `fit`.
            y: as in `fit`.
            batch_size: samples of a batch, over all ranks together; if not given, whatever is fastest.
            verbose: 0 prints nothing, anything else one line.
            sample_weight: as in `fit`.
            steps: end after that many batches; if no batch_size is given they hold all samples.
            callbacks: called on every rank.
            return_dict: return a dictionary by log key.

        Returns:
            [loss, metric, ...], or the loss alone where there is no metric, or a dictionary. Of no samples it is empty.

        Raises:
            ConfigError: `compile` was not called.
            DataError: data that does not fit the model.
        """
        comm = self._start("evaluate", x)

        def check() -> Samples | Stream:
            check_given(batch_size=batch_size, steps=steps)
            return self._data(comm, x, y, sample_weight)

        data = self._agreed(comm, "evaluate", check)
        hooks = self._hooks(callbacks, verbose, epochs=1, steps=None, keeps_history=False)
        watched = _watched(comm, hooks, "test")
        trainer = self._trainer(comm)

        def prepare() -> Batches:
            if isinstance(data, Stream):
                return self._stream(data, comm, steps, "evaluation")
            arrays = data.stored(trainer.replica.as_stored)
            options: dict[str, Any] = {"batch_size": batch_size, "steps": steps, "watched": watched}
            return evaluation_batches(arrays, comm, **options, whole=self._whole())

        batches = self._agreed(comm, "evaluate", prepare)
        hooks.params["steps"] = batches.steps
        with self._collective(comm):
            logs = trainer.evaluate(batches, hooks)
        return _in_order(logs, return_dict)

    def predict(
        self,
        x: Any,
        batch_size: int | None = None,
        verbose: str | int = "auto",
        steps: int | None = None,
        callbacks: Sequence[Callback] | None = None,
    ) -> Array:
        """Return the model's outputs, (rows, *output_shape), on every rank. Collective.

        Args:
            x: as in `fit`.
            batch_size: samples of a batch, over all ranks together; if not given, whatever is fastest.
            verbose: 0 prints nothing, anything else one line.
            steps: end after that many batches; if no batch_size is given they hold all samples.
            callbacks: called on every rank.

        Raises:
            DataError: data that does not fit the model.
        """
        comm = self._start(None, x)
        hooks = self._hooks(callbacks, verbose, epochs=1, steps=None, keeps_history=False)
        watched = _watched(comm, hooks, "predict")

        def prepare() -> tuple[Batches, int | None]:
            check_given(batch_size=batch_size, steps=steps)
            source = source_of(x, comm=comm)
            if source is not None:
                if self._architecture is None:
                    self._look(source)
                    source.on_epoch_end()
                batches = stream_batches(source, None, self.architecture, None, comm, steps, what="prediction")
                return batches, None
            samples = check_features(x, self.architecture)
            flat = samples.reshape(len(samples), flat_features(samples.shape[1:]))
            options: dict[str, Any] = {"batch_size": batch_size, "steps": steps, "watched": watched}
            return evaluation_batches([flat], comm, **options), len(samples)

        batches, rows = self._agreed(comm, "predict", prepare)
        hooks.params["steps"] = steps or batches.steps
        with self._collective(comm):
            return self._trainer(comm).predict(batches, rows, hooks)

    # One batch at a time

    def train_on_batch(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        class_weight: Mapping[int, float] | None = None,
        return_dict: bool = False,
    ) -> list[float] | float | dict[str, float]:
        """Make one update from one global batch, which every rank has and takes its part of. Collective.

        Returns:
            The loss and metrics of the batch, in the form of `evaluate`.

        Raises:
            ConfigError: `compile` was not called.
            DataError: data that does not fit the model.
        """
        comm = self._start("train_on_batch", x)
        samples = self._agreed(comm, "train_on_batch", lambda: self._samples(x, y, sample_weight, class_weight))
        batches = self._one_batch("train_on_batch", samples, comm)
        self._warn_of_nothing_to_train()
        with self._collective(comm):
            logs = self._trainer(comm).train_on_batch(batches)
        return _in_order(logs, return_dict)

    def test_on_batch(
        self, x: Any, y: Any = None, sample_weight: Any = None, return_dict: bool = False
    ) -> list[float] | float | dict[str, float]:
        """Return the loss and metrics of one global batch. Collective.

        Raises:
            ConfigError: `compile` was not called.
            DataError: data that does not fit the model.
        """
        comm = self._start("test_on_batch", x)
        samples = self._agreed(comm, "test_on_batch", lambda: self._samples(x, y, sample_weight))
        batches = self._one_batch("test_on_batch", samples, comm)
        with self._collective(comm):
            logs = self._trainer(comm).test_on_batch(batches)
        return _in_order(logs, return_dict)

    def predict_on_batch(self, x: Any) -> Array:
        """Return the model's outputs for one batch, on every rank. Collective.

        Raises:
            DataError: data that does not fit the model.
        """
        return self.predict(x, batch_size=max(len(x), comms.current().size), verbose=0)

    def reset_metrics(self) -> None:
        """Start new means of loss and metrics; `fit`, `evaluate` and the methods for one batch do so themselves."""
        if self._replica is not None and self._compiled is not None:
            self._replica.reset_totals()

    def _one_batch(self, where: str, samples: Samples, comm: Communicator) -> Batches:
        store = self._trainer(comm).replica.as_stored
        size = max(len(samples), comm.size)

        def action() -> Batches:
            sampler = GlobalSampler(len(samples), size, comm.rank, comm.size, shuffle=False)
            return ArrayBatches(samples.stored(store), sampler)

        return self._agreed(comm, where, action)

    # Data

    def _data(
        self,
        comm: Communicator,
        x: Any,
        y: Any,
        sample_weight: Any = None,
        class_weight: Mapping[int, float] | None = None,
        *,
        shuffle: bool | str = False,
        looks: bool = True,
    ) -> "Samples | Stream":
        """Return a user's arrays after checking them, or where batches come from, which are checked as they come.

        As Keras, a model that has seen no targets since it was compiled looks at the first batch, if `looks`.
        """
        source = source_of(x, y, sample_weight, class_weight=class_weight, shuffle=shuffle, seed=self.seed, comm=comm)
        if source is None:
            return self._samples(x, y, sample_weight, class_weight)
        return Stream(source, self._look(source) if looks and not self._seen else 0)

    def _look(self, source: BatchSource) -> int:
        """Take the model's input shape, if it is not known, from the first batch; return its rows."""
        x = as_array(source.look()[0], "x")
        self._seen = self._compiled is not None
        if self._awaits_shape():
            self._build_for(x.shape[1:])
        return len(x) if x.ndim else 0

    def _stream(self, data: Stream, comm: Communicator, steps: int | None, what: What = "training") -> StreamBatches:
        assert self._compiled is not None
        store = self._trainer(comm).replica.as_stored
        loss = self._compiled[0]
        if what == "evaluation" and comm.size > 1 and loss.depends_on_batches:
            raise ConfigError(
                f"not supported on several ranks: evaluating loss {loss.name!r}, which depends on how samples are cut "
                "into batches, on anything but arrays"
            )
        return stream_batches(
            data.source,
            store,
            self.architecture,
            None if self._without_loss() else loss,
            comm,
            steps,
            rows=data.rows,
            what=what,
            own_steps=self.has_own_steps,
        )

    def _samples(
        self, x: Any, y: Any, sample_weight: Any = None, class_weight: Mapping[int, float] | None = None
    ) -> Samples:
        """Return a user's arrays after checking them against the model and the loss."""
        assert self._compiled is not None
        if class_weight is not None:
            if sample_weight is not None:
                raise ConfigError("You cannot `class_weight` and `sample_weight` at the same time.")
            sample_weight = weights_of_classes(y, class_weight)
        self._seen = True
        if self._targets_unspecified(y):
            return check_unspecified(x, y, sample_weight, self.architecture)
        return check_samples(x, y, sample_weight, self.architecture, self._compiled[0])

    def _targets_unspecified(self, y: Any) -> bool:
        """Whether the model's own steps alone know what the targets are."""
        return self._without_loss() or (y is None and self.has_own_steps)

    def _whole(self) -> bool:
        """Return whether the loss of an evaluation depends on how samples are cut into batches."""
        assert self._compiled is not None
        return self._compiled[0].depends_on_batches

    # Helpers

    def _start(self, method: str | None, x: Array) -> Communicator:
        if method is not None and self._compiled is None:
            raise ConfigError(f"You must call `compile()` before calling `{method}()`.")
        if method is not None and self._compiled is not None and self._without_loss() and not self.has_own_steps:
            raise ConfigError("No loss to compute. Provide a `loss` argument in `compile()`.")
        phase.enter(method or "predict")
        if self._awaits_shape() and is_array(x):
            self._build_for(as_array(x, "x").shape[1:])
        if method in ("fit", "train_on_batch"):
            self._follow_trainable()
        return comms.current()

    def _warn_of_nothing_to_train(self) -> None:
        if not self.architecture.layout.trained and not self.has_own_steps:
            warn("The model does not have any trainable weights.")

    def _hooks(
        self,
        callbacks: Sequence[Callback] | None,
        verbose: str | int,
        *,
        keeps_history: bool = True,
        **params: Any,
    ) -> CallbackList:
        """Return the user's callbacks, and after them, as in Keras, those that are always there."""
        chosen = list(flatten(callbacks))
        if keeps_history and not any(isinstance(callback, History) for callback in chosen):
            chosen.append(History())
        if verbose != 0 and not any(isinstance(callback, ProgbarLogger) for callback in chosen):
            chosen.append(ProgbarLogger())
        return CallbackList(chosen, self, verbose=verbose, **params)


def _watched(comm: Communicator, hooks: CallbackList, mode: str) -> bool:
    """Return whether on any rank a callback wants to hear of batches, which then must be those of all. Collective.

    Raises:
        AgreedError: callbacks differ that ranks must have in common.
    """
    if comm.size > 1:
        comm.require_same("the ranks have different callbacks", {"callbacks": hooks.decisive()})
    return any(comm.allgather(hooks.has_batch_hooks(mode)))


def _in_order(logs: dict[str, float], return_dict: bool) -> list[float] | float | dict[str, float]:
    """Return logs in the form that Keras' methods have."""
    if return_dict:
        return logs
    values = list(logs.values())
    return values[0] if len(values) == 1 else values
