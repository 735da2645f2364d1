"""`fit`, `evaluate` and `predict`: from what a user hands over to the one training loop."""

import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from dptrain import comm as comms
from dptrain.batches.adapters import BatchSource
from dptrain.batches.base import ArrayBatches, Batches
from dptrain.batches.inputs import (
    Expected,
    Samples,
    Stream,
    check_frequency,
    check_given,
    check_inputs,
    check_numbers,
    check_samples,
    evaluation_batches,
    refuse_split,
    rows_of_batch,
    source_of,
    split_off,
    stream_batches,
    unpack,
    weights_of_classes,
)
from dptrain.batches.sampling import EVALUATION_ROWS, GlobalSampler, Sampler
from dptrain.batches.stream import StreamBatches, What
from dptrain.callbacks import Callback, CallbackList, History, ProgbarLogger
from dptrain.callbacks.base import flatten
from dptrain.comm import Communicator
from dptrain.data.loading import Split
from dptrain.errors import ConfigError
from dptrain.layers import Layer
from dptrain.metrics import Metric
from dptrain.models.compiled import Compiled
from dptrain.program import tree
from dptrain.runtime.failure import phase, warn
from dptrain.train.programs import Programs, Step
from dptrain.train.trainer import StepIterator, Trainer, run_to_end

if TYPE_CHECKING:
    pass

T = TypeVar("T")
Array = npt.NDArray[Any]


class Fitting(Layer):
    """What of a model trains, evaluates and asks it."""

    if TYPE_CHECKING:  # what `Model` supplies
        seed: int
        history: History | None
        _compiled: Compiled | None
        _programs: Programs | None
        _seen: bool

        @property
        def metrics(self) -> list[Metric]: ...  # noqa: D102
        @property
        def has_own_steps(self) -> bool: ...  # noqa: D102
        @property
        def expected(self) -> Expected: ...  # noqa: D102
        def step(self, name: str) -> Step: ...  # noqa: D102
        def agreed(self, comm: Communicator, where: str, action: Callable[[], T]) -> T: ...  # noqa: D102
        def collective(self, comm: Communicator) -> AbstractContextManager[None]: ...  # noqa: D102
        def trainer(self, comm: Communicator) -> Trainer: ...  # noqa: D102
        def describe_compiled(self) -> list[Any]: ...  # noqa: D102
        def as_outputs(self, found: Mapping[str, Array]) -> Any: ...  # noqa: D102
        def _build_like(self, x: Any) -> None: ...

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
            validation: Samples | Stream | None = None
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

        train, validation, sampler = self.agreed(comm, "fit", prepare)
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
                "layers": self._describe_layers(),
                "trainable": self.trainable,
                "compiled": self.describe_compiled(),
            }
            comm.require_same("the ranks call fit differently", facts)
        watched = _watched(comm, hooks, "test")
        self.trainer(comm)

        def batches() -> tuple[Batches, Batches | None]:
            own: Batches
            if isinstance(train, Stream):
                own = self._stream(train, comm, steps_per_epoch)
            else:
                assert sampler is not None
                own = ArrayBatches(*train.stored(), sampler, steps_per_epoch)
                self._trace_training(own, sampler)
            if validation is None:
                return own, None
            if isinstance(validation, Stream):
                return own, self._stream(validation, comm, validation_steps, "evaluation")
            return own, evaluation_batches(
                validation,
                comm,
                batch_size=validation_batch_size,
                otherwise=batch_size,
                steps=validation_steps,
                together=watched or self._depends_on_batches(comm, validation),
            )

        own, evaluated = self.agreed(comm, "fit", batches)
        if isinstance(own, StreamBatches):
            with self.collective(comm):
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
        self.trainer(comm)

        def batches() -> tuple[Batches, Batches | None]:
            own = ArrayBatches(*Samples(train.x, train.y, dtype=self.dtype).stored(), sampler)
            self._trace_training(own, sampler)
            if validation is None:
                return own, None
            samples = Samples(validation.x, validation.y, dtype=self.dtype)
            return own, evaluation_batches(samples, comm, mine=validation.mine)

        own, evaluated = self.agreed(comm, "fit", batches)
        yield from self._train(own, evaluated, hooks, comm, epochs=epochs)

    def _train(
        self, train: Batches, validation: Batches | None, hooks: CallbackList, comm: Communicator, **arguments: Any
    ) -> StepIterator[None]:
        """What all ways into a training have in common."""
        self.history = next(callback for callback in hooks.callbacks if isinstance(callback, History))
        trainer = self.trainer(comm)
        self._warn_of_nothing_to_train()
        try:
            with self.collective(comm):
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

        data = self.agreed(comm, "evaluate", check)
        hooks = self._hooks(callbacks, verbose, epochs=1, steps=None, keeps_history=False)
        watched = _watched(comm, hooks, "test")
        trainer = self.trainer(comm)

        def prepare() -> Batches:
            if isinstance(data, Stream):
                return self._stream(data, comm, steps, "evaluation")
            together = watched or self._depends_on_batches(comm, data)
            return evaluation_batches(data, comm, batch_size=batch_size, steps=steps, together=together)

        batches = self.agreed(comm, "evaluate", prepare)
        hooks.params["steps"] = batches.steps
        with self.collective(comm):
            logs = trainer.evaluate(batches, hooks)
        return _in_order(logs, return_dict, (one.name for one in self.metrics))

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
                if not self.built:
                    self._look(source)
                    source.on_epoch_end()
                return stream_batches(source, self.expected, comm, steps, what="prediction"), None
            samples = Samples(check_inputs(x, self.expected), dtype=self.dtype)
            found = evaluation_batches(samples, comm, batch_size=batch_size, steps=steps, together=watched)
            return found, len(samples)

        batches, rows = self.agreed(comm, "predict", prepare)
        hooks.params["steps"] = steps or batches.steps
        with self.collective(comm):
            found: Array = self.as_outputs(self.trainer(comm).predict(batches, rows, hooks))
        return found

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
        samples = self.agreed(comm, "train_on_batch", lambda: self._samples(x, y, sample_weight, class_weight))
        batches = self._one_batch("train_on_batch", samples, comm)
        self._warn_of_nothing_to_train()
        with self.collective(comm):
            logs = self.trainer(comm).train_on_batch(batches)
        return _in_order(logs, return_dict, (one.name for one in self.metrics))

    def test_on_batch(
        self, x: Any, y: Any = None, sample_weight: Any = None, return_dict: bool = False
    ) -> list[float] | float | dict[str, float]:
        """Return the loss and metrics of one global batch. Collective.

        Raises:
            ConfigError: `compile` was not called.
            DataError: data that does not fit the model.
        """
        comm = self._start("test_on_batch", x)
        samples = self.agreed(comm, "test_on_batch", lambda: self._samples(x, y, sample_weight))
        batches = self._one_batch("test_on_batch", samples, comm)
        with self.collective(comm):
            logs = self.trainer(comm).test_on_batch(batches)
        return _in_order(logs, return_dict, (one.name for one in self.metrics))

    def predict_on_batch(self, x: Any) -> Array:
        """Return the model's outputs for one batch, on every rank. Collective.

        Raises:
            DataError: data that does not fit the model.
        """
        return self.predict(x, batch_size=max(len(x), comms.current().size), verbose=0)

    def _one_batch(self, where: str, samples: Samples, comm: Communicator) -> Batches:
        size = max(len(samples), comm.size)

        def action() -> Batches:
            sampler = GlobalSampler(len(samples), size, comm.rank, comm.size, shuffle=False)
            return ArrayBatches(*samples.stored(), sampler)

        return self.agreed(comm, where, action)

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
        """Make the weights, if they are not there, for samples like the first batch's; return its rows."""
        x = tree.map_leaves(lambda path, one: np.asarray(one), source.look()[0])
        self._seen = self._compiled is not None
        self._build_like(x)
        first = tree.leaves(x)[0]
        return len(first) if first.ndim else 0

    def _stream(self, data: Stream, comm: Communicator, steps: int | None, what: What = "training") -> StreamBatches:
        return stream_batches(data.source, self.expected, comm, steps, rows=data.rows, what=what)

    def _samples(
        self, x: Any, y: Any, sample_weight: Any = None, class_weight: Mapping[int, float] | None = None
    ) -> Samples:
        """Return a user's arrays after checking them against the model and the loss."""
        if class_weight is not None:
            if sample_weight is not None:
                raise ConfigError("You cannot `class_weight` and `sample_weight` at the same time.")
            sample_weight = weights_of_classes(y, class_weight)
        self._seen = True
        return check_samples(x, y, sample_weight, self.expected)

    def _trace_training(self, batches: ArrayBatches, sampler: Sampler) -> None:
        """Trace a step before the training begins: an error in it, a user's own, is one of all ranks."""
        assert self._programs is not None
        step = self.step("train")
        if not step.eager:
            self._programs.placed(step, batches.about, sampler.shards(0)[0].batch_rows)

    def _depends_on_batches(self, comm: Communicator, samples: Samples) -> bool:
        """Whether an evaluation's result depends on how samples are cut into batches, which must then be Keras'."""
        if not len(samples):
            return False
        assert self._programs is not None
        _, about = samples.stored()
        rows = max(1, min(EVALUATION_ROWS, len(samples) // comm.size))
        return self._programs.depends_on_batches(self.step("test"), about, rows)

    # Helpers

    def _start(self, method: str | None, x: Any) -> Communicator:
        if method is not None and self._compiled is None:
            raise ConfigError(f"You must call `compile()` before calling `{method}()`.")
        phase.enter(method or "predict")
        if x is not None and all(hasattr(one, "__array__") for one in tree.leaves(x)):
            self._build_like(x)
        return comms.current()

    def _describe_layers(self) -> list[Any]:
        """Return the layers as JSON can carry them; less of those that a user's own code describes."""
        found: list[Any] = []
        for layer in self.flat_layers()[1:]:
            about = [type(layer).__name__, layer.name, layer.trainable]
            with suppress(ConfigError, NotImplementedError, TypeError, ValueError):
                about += [] if isinstance(layer, Fitting) else [json.loads(json.dumps(layer.config()))]
            found.append(about)
        return found

    def _warn_of_nothing_to_train(self) -> None:
        if not self.trainable_weights and not self.has_own_steps:
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


def _in_order(
    logs: dict[str, float], return_dict: bool, names: Iterable[str]
) -> list[float] | float | dict[str, float]:
    """Return logs in the form that Keras' methods have: values in the order of metrics' names, then sorted by key.

    A key is not the metric's name where it also names the output.
    """
    if return_dict:
        return logs
    first = [name for name in dict.fromkeys(names) if name in logs]
    values = [logs[key] for key in [*first, *sorted(logs.keys() - set(first))]]
    return values[0] if len(values) == 1 else values
