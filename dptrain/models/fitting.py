"""`fit`, `evaluate` and `predict`: prepare the user's data for the training loop."""

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar, cast, get_args

import numpy.typing as npt

from dptrain import comm as comms
from dptrain.batches.base import ArrayBatches, Batches
from dptrain.batches.fingerprint import DRAW_THE_SAME
from dptrain.batches.inputs import (
    Samples,
    Stream,
    check_counts,
    check_inputs,
    evaluation_batches,
    rows_of_batch,
    source_of,
    split_off,
    stream_batches,
    training_sampler,
    unpack,
)
from dptrain.batches.sampling import Sampler
from dptrain.batches.stream import StreamBatches
from dptrain.callbacks import Callback, CallbackList, History, ProgbarLogger, TerminateOnNaN
from dptrain.callbacks.base import flatten
from dptrain.callbacks.checkpointing import stored_seed
from dptrain.comm import Communicator
from dptrain.data.loading import Split
from dptrain.errors import ConfigError, PreemptedError
from dptrain.models.compiled import names_in_order
from dptrain.models.feeding import Feeding
from dptrain.models.fit_arguments import FitArguments, within_limit
from dptrain.optimizers.base import check_range
from dptrain.program.turns import TURNS
from dptrain.pruning import UpdatePruningStep
from dptrain.pruning.marking import described
from dptrain.runtime.cores import use_one_blas_thread
from dptrain.runtime.failure import ending_by_signals, leave, warn
from dptrain.runtime.watch import thread_order
from dptrain.train.guard import StepGuard
from dptrain.train.health import OnNonfinite
from dptrain.train.programs import Step
from dptrain.train.trainer import StepIterator, run_to_end

if TYPE_CHECKING:  # imports pydantic, which is slow
    pass

T = TypeVar("T")
P = ParamSpec("P")
Array = npt.NDArray[Any]


def in_turn(*, changes: bool) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator that serializes a model's methods; see `Fitting._turn`."""

    def decorate(method: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(method)
        def in_turn(*arguments: P.args, **named: P.kwargs) -> T:
            model = cast("Fitting", arguments[0])
            turn = model._turn(method.__name__) if changes else TURNS.of({("model", id(model))})
            with comms.meeting(method.__name__), turn:
                return method(*arguments, **named)

        return in_turn

    return decorate


class Fitting(Feeding):
    """Adds fit, evaluate and predict.

    Several threads may call them. Predictions run side by side, each with its own memory. Evaluations and single steps,
    which reset the metrics, take turns, and do not run beside another thread's `fit`.
    """

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
        on_nonfinite: OnNonfinite = "stop",
        skip_outliers: float | None = None,
        digest_every: int | None = None,
    ) -> History:
        """Train. Collective. Arguments from `drop_last` on are not in Keras.

        Args:
            x: (rows, *input_shape), any real dtype, the same on all ranks; uint8 stays uint8 in memory, a memory map on
                disk. Or an object that yields batches (x, y) or (x, y, sample_weight): a generator, a
                `dptrain.utils.PyDataset`, a loader; see `dptrain.batches.inputs.source_of` for these and what ranks
                draw. Or a `dptrain.data.loading.Split`, some rows of a data set or those that a rank holds.
            y: (rows,) or (rows, 1) integer labels, or (rows, *output_shape) values, as the loss takes them.
            batch_size: samples of a global batch, over all ranks; by default 32, or, as in Keras, such that
                `steps_per_epoch` batches hold all samples. Not used where x makes batches.
            epochs: number of the last epoch.
            verbose: 0 silent, 1 live line, 2 one line per epoch, "auto" for 1 on a terminal, mpirun's included, else 2;
                DPTRAIN_PROGRESS (live, lines, none) overrides "auto".
            callbacks: called on every rank.
            validation_split: evaluate this last fraction of the samples instead of training on it; for (nested) arrays
                only.
            validation_data: (x, y) or (x, y, sample_weight) to evaluate after epochs, or an object that yields batches.
            shuffle: a new order every epoch, f(seed, epoch); "batch" changes the order within batches only. For a
                PyDataset it is the order of its batches; other batch sources keep theirs.
            class_weight: training weights of samples by label, 1 for labels not named; the validation ignores them.
            sample_weight: (rows,) weights of the samples in the loss; or of their parts, (rows, steps) of outputs
                (rows, steps, n), (rows, height, width) of maps; for several outputs one for all, or nested like them.
            initial_epoch: number of epochs already done.
            steps_per_epoch: end epochs after this many steps; the next continues in the data where the last ended. With
                a `Split` every epoch is a pass in a new order.
            validation_steps: evaluate this many batches of the validation data.
            validation_batch_size: of these batches, over all ranks.
            validation_freq: evaluate after every this many epochs, or after the listed ones, counted from 1.
            drop_last: leave out a last batch that is not full.
            on_nonfinite: "stop" ends the training when the loss or a weight is NaN or infinite, and names the samples,
                or the op and its layer, that caused it. "skip" drops steps with such gradients: they change nothing,
                and the epoch's logs count them as "skipped_steps". "ignore" continues, like Keras; so does "stop"
                beside TerminateOnNaN.
            skip_outliers: also drop steps whose gradients' norm exceeds the running mean by more than this many of its
                standard deviations.
            digest_every: steps between comparisons of the ranks' weights, slots and learning rates; 0 for none, by
                default DPTRAIN_DIGEST_EVERY, or 100.

        Returns:
            The history of losses and metrics, global values, the same on every rank; also `model.history`.

        Raises:
            ConfigError: `compile` was not called, or an argument is out of range (a ValueError, as in Keras).
            DataError: data that does not match the model.
            DivergenceError: the loss or a weight is not finite (an ArithmeticError and RuntimeError).
            AgreedError: any of these, on all ranks, under mpirun; or, with exit code 76, the ranks' weights, slots or
                learning rates have diverged.
        """
        arguments = FitArguments(
            x,
            y,
            batch_size,
            epochs,
            verbose,
            callbacks,
            validation_split,
            validation_data,
            shuffle,
            class_weight,
            sample_weight,
            initial_epoch,
            steps_per_epoch,
            validation_steps,
            validation_batch_size,
            validation_freq,
            drop_last=drop_last,
            on_nonfinite=on_nonfinite,
            skip_outliers=skip_outliers,
            digest_every=digest_every,
        )
        try:
            with ending_by_signals():
                run_to_end(self._fit_steps(arguments, interleaved=False))
        except PreemptedError as error:
            leave(error)
        assert self.history is not None
        return self.history

    def _fit_in_steps(self, *arguments: Any, **named: Any) -> StepIterator[None]:
        """Train like `fit`, and yield after every step, to interleave several trainings."""
        return self._fit_steps(FitArguments(*arguments, **named), interleaved=True)

    def _fit_steps(self, arguments: FitArguments, *, interleaved: bool) -> StepIterator[None]:
        """Train, and yield after every step; without `interleaved` no other thread gets a turn between steps."""
        with self._turn("fit"):  # waits for other threads' evaluations
            outer, self._fits_in = (self._fits_in, self._guard), threading.current_thread()
        try:
            with comms.meeting("fit"), closing(self._fit_prepared(arguments)) as steps:
                for _ in steps:
                    if interleaved:
                        self._fits_in = None
                    yield
                    self._fits_in = threading.current_thread()  # another thread may resume it
        finally:
            self._fits_in, self._guard = outer

    def _fit_prepared(self, arguments: FitArguments) -> StepIterator[None]:
        comm = self._start("fit", arguments.x)
        self._take_seed(comm.broadcast_fact(stored_seed(flatten(arguments.callbacks))))
        shards = self._agreed(comm, "fit", self._fixed_shards)
        arguments, data = self._agreed(comm, "fit", partial(self._fit_data, comm, arguments, shards))
        if shards is not None:
            use_one_blas_thread()
        steps = arguments.steps_per_epoch or data.steps
        hooks = self._hooks(arguments.callbacks, arguments.verbose, epochs=arguments.epochs, steps=steps)
        hooks.facts = partial(self._fit_facts, arguments, data, self._describe_compiled())
        self._open_trainer(comm)  # first, as it reports differing dtypes by themselves
        if comm.size > 1:
            self._require_same_fit(comm, arguments, data)
        watched = _watched(comm, hooks, "test")
        make_batches = partial(self._fit_batches, comm, arguments, data, watched)
        training, validation = self._agreed(comm, "fit", make_batches)
        if isinstance(training, StreamBatches):
            with self._collective(comm):
                training.reset()
        yield from self._train(training, validation, hooks, comm, arguments)

    def _fit_data(
        self, comm: Communicator, arguments: FitArguments, shards: int | None
    ) -> "tuple[FitArguments, _FitData]":
        """Check the arguments of `fit`; return them, within the limits of `config`, and the data."""
        arguments.check()
        self._guard_steps(arguments.on_nonfinite, arguments.skip_outliers)
        x, y, weights, classes = arguments.x, arguments.y, arguments.sample_weight, arguments.class_weight
        train = self._data(comm, x, y, weights, classes, shuffle=arguments.shuffle, trains=True)
        validation: Samples | Stream | None = None
        if isinstance(arguments.validation_data, Split):
            validation = self._data(comm, arguments.validation_data, None)
        elif arguments.validation_data is not None:
            validation = self._data(comm, *unpack(arguments.validation_data, "validation_data"), looks=False)
        elif arguments.validation_split and isinstance(train, Samples):
            train, validation = split_off(train, arguments.validation_split)
            if classes is not None:  # for training only; these are then the only weights
                validation = replace(validation, weights=None)
        total = None if isinstance(train, Stream) else train.total
        arguments = arguments.within_limits(arguments.batch_size or self._fixed_batch_size, total)
        batch_size = arguments.batch_size
        if isinstance(train, Stream):
            return arguments, _FitData(train, validation, None, batch_size, None, shards)
        rows = rows_of_batch(batch_size, train.total, arguments.steps_per_epoch)
        sampler = training_sampler(
            train,
            rows,
            comm,
            seed=self._model_seed,
            shuffle=arguments.shuffle,
            drop_last=arguments.drop_last,
            shards=shards,
        )
        return arguments, _FitData(train, validation, sampler, batch_size, rows, shards)

    def _fit_facts(self, arguments: FitArguments, data: "_FitData", compiled: list[Any]) -> dict[str, Any]:
        """Return the facts of a training for callbacks that record or restore it."""
        return {
            "data": data.train.facts,
            "batch_size": data.rows_of_batch,
            "shuffle": arguments.shuffle,
            "drop_last": arguments.drop_last,
            "steps_per_epoch": arguments.steps_per_epoch,
            "initial_epoch": arguments.initial_epoch,
            **({} if data.validation is None else {"validation": self._validation_facts(arguments, data)}),
            **({} if arguments.on_nonfinite == "stop" else {"on_nonfinite": arguments.on_nonfinite}),
            **({} if arguments.skip_outliers is None else {"skip_outliers": arguments.skip_outliers}),
            **({} if data.shards is None else {"shards_per_batch": data.shards}),
            "layers": self._describe_layers(),
            **({"pruning": described(self)} if self._is_pruned else {}),
            "optimizer": {"class": compiled[0][0], **compiled[0][1]},
            **dict(zip(("loss", "loss_weights", "metrics", "weighted_metrics"), compiled[1:], strict=True)),
        }

    def _fit_batches(
        self, comm: Communicator, arguments: FitArguments, data: "_FitData", watched: bool
    ) -> tuple[Batches, Batches | None]:
        """Return the batches of training and validation; `watched` validation takes the same batches on all ranks."""
        training: Batches
        if isinstance(data.train, Stream):
            training = self._stream(data.train, comm, arguments.steps_per_epoch)
        else:
            assert data.sampler is not None
            restarts = data.train.split is not None
            training = ArrayBatches(*data.train.stored(), data.sampler, arguments.steps_per_epoch, restarts=restarts)
            self._trace_training(training, data.sampler)
        if data.validation is None:
            return training, None
        if isinstance(data.validation, Stream):
            return training, self._stream(data.validation, comm, arguments.validation_steps, "evaluation")
        return training, evaluation_batches(
            data.validation,
            comm,
            batch_size=arguments.validation_batch_size or self._fixed_batch_size,
            otherwise=data.batch_size,
            steps=arguments.validation_steps,
            shards=data.shards,
            together=watched or self._depends_on_batches(comm, data.validation),
        )

    def _require_same_fit(self, comm: Communicator, arguments: FitArguments, data: "_FitData") -> None:
        """Refuse ranks that train with other numbers of steps or other data. Collective."""
        differing_data = "the training sets (shapes, dtypes, checksum) differ"
        # Files that are read on demand may be damaged.
        facts = self._agreed(comm, "fit", partial(self._call_facts, differing_data, arguments, data))
        comm.require_same("the ranks call fit differently", facts, {differing_data: DRAW_THE_SAME})

    def _validation_facts(self, arguments: FitArguments, data: "_FitData") -> list[Any]:
        frequency = arguments.validation_freq
        return [
            None if data.validation is None else data.validation.facts,
            arguments.validation_steps,
            arguments.validation_batch_size,
            list(frequency) if isinstance(frequency, Sequence) else frequency,
        ]

    def _call_facts(self, differing_data: str, arguments: FitArguments, data: "_FitData") -> dict[str, Any]:
        """Return what ranks must have in common; reads all data once."""
        return {
            differing_data: data.train.facts,
            "arguments": [
                arguments.batch_size,
                arguments.epochs,
                arguments.shuffle,
                arguments.initial_epoch,
                arguments.steps_per_epoch,
                arguments.drop_last,
            ],
            "skip_outliers": arguments.skip_outliers,
            "shards of a batch": self._fixed_shards(),
            "validation": self._validation_facts(arguments, data),
            "seed": self._model_seed,
            "layers": self._describe_layers(),
            "pruning": described(self),
            "trainable": self.trainable,
            "compiled": self._describe_compiled(),
            "run_eagerly": self.run_eagerly,
            "thread": thread_order.name_among_several(),
        }

    def _train(
        self,
        train: Batches,
        validation: Batches | None,
        hooks: CallbackList,
        comm: Communicator,
        arguments: FitArguments,
    ) -> StepIterator[None]:
        on_nonfinite = arguments.on_nonfinite
        if on_nonfinite == "stop" and any(isinstance(callback, TerminateOnNaN) for callback in hooks.callbacks):
            on_nonfinite = "ignore"  # the callback decides
        self.history = next(callback for callback in hooks.callbacks if isinstance(callback, History))
        trainer = self._open_trainer(comm)
        self._warn_of_nothing_to_train()
        try:
            with self._collective(comm):
                yield from trainer.training(
                    train,
                    hooks,
                    epochs=arguments.epochs,
                    initial_epoch=arguments.initial_epoch,
                    validation=validation,
                    validation_freq=arguments.validation_freq,
                    on_nonfinite=on_nonfinite,
                    compare_every=arguments.digest_every,
                )
        finally:
            hooks._release()

    def _guard_steps(self, on_nonfinite: OnNonfinite, skip_outliers: float | None) -> None:
        """Set up skipping of steps, until the training's end."""
        self._guard = None
        if on_nonfinite not in get_args(OnNonfinite):
            words = ", ".join(map(repr, get_args(OnNonfinite)))
            raise ConfigError(f"on_nonfinite = {on_nonfinite!r}: expected one of {words}")
        if skip_outliers is not None:
            check_range("skip_outliers", skip_outliers, above=0)
        if on_nonfinite != "skip" and skip_outliers is None:
            return
        if self.run_eagerly:
            raise ConfigError("not supported: skipping steps with run_eagerly, which stops at the first NaN")
        self._guard = self._guards.setdefault(skip_outliers, StepGuard(skip_outliers))
        self._guard.reset()

    # Using

    @ending_by_signals()
    @in_turn(changes=True)
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
            x, y, sample_weight: see `fit`; y of a data frame is by default the model's target column.
            batch_size: samples of a batch, over all ranks; by default whatever is fastest.
            verbose: 0 prints nothing, anything else one line.
            steps: end after this many batches; without batch_size they hold all samples.
            callbacks: called on every rank.
            return_dict: return a dictionary by log key.

        Returns:
            [loss, metric, ...], or the loss alone without metrics, or a dictionary; empty for no samples.

        Raises:
            ConfigError: `compile` was not called.
            DataError: data that does not match the model.
        """
        x, y = self._encoded(x, y)
        comm = self._start("evaluate", x)

        def check() -> Samples | Stream:
            check_counts(batch_size=batch_size, steps=steps)
            return self._data(comm, x, y, sample_weight)

        same = self._same_call("evaluate", lambda data: data.facts, arguments=[batch_size, steps])
        data: Samples | Stream = self._agreed(comm, "evaluate", check, same)
        hooks = self._hooks(callbacks, verbose, epochs=1, steps=None, keeps_history=False)
        watched = _watched(comm, hooks, "test")
        trainer = self._open_trainer(comm)

        def prepare() -> Batches:
            if isinstance(data, Stream):
                return self._stream(data, comm, within_limit(None, steps, None)[1], "evaluation")
            together = watched or self._depends_on_batches(comm, data)
            shards = self._fixed_shards()
            if shards is not None:
                use_one_blas_thread()
            size, most = within_limit(batch_size or self._fixed_batch_size, steps, data.total)
            return evaluation_batches(data, comm, batch_size=size, steps=most, together=together, shards=shards)

        batches = self._agreed(comm, "evaluate", prepare)
        hooks.params["steps"] = batches.steps
        with self._collective(comm):
            logs = trainer.evaluate(batches, hooks)
        return _in_order(logs, return_dict, names_in_order(self.metrics))

    @ending_by_signals()
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
            x: see `fit`; or a data frame of raw columns if the model has a `preprocessing`.
            batch_size, verbose, steps, callbacks: see `evaluate`.

        Raises:
            DataError: data that does not match the model.
        """
        return self._predict_as("predict", x, batch_size, verbose, steps, callbacks)

    @in_turn(changes=False)
    def _predict_as(
        self,
        method: str,
        x: Any,
        batch_size: int | None,
        verbose: str | int,
        steps: int | None = None,
        callbacks: Sequence[Callback] | None = None,
    ) -> Array:
        """Return predictions under a method's name. Collective."""
        x, _ = self._encoded(x, None, takes_targets=False)
        comm = self._start(None, x)
        hooks = self._hooks(callbacks, verbose, epochs=1, steps=None, keeps_history=False)
        watched = _watched(comm, hooks, "predict")

        def prepare() -> tuple[Batches, Step | None, Samples | Stream]:
            check_counts(batch_size=batch_size, steps=steps)
            source = source_of(x, comm=comm)
            if source is not None:
                if not self.built:
                    self._look(source)
                    source.on_epoch_end()
                most = within_limit(None, steps, None)[1]
                drawn = stream_batches(source, self._expected_batches, comm, most, mode="prediction")
                return drawn, None, Stream(source)
            samples = Samples(check_inputs(x, self._expected_data), dtype=self._data_dtype)
            step = self._make_step("predict")
            together = watched or self._mixes_rows(comm, samples, step)
            size, most = within_limit(batch_size or self._fixed_batch_size, steps, samples.total)
            cut = evaluation_batches(samples, comm, batch_size=size, steps=most, together=together)
            return cut, step, samples

        self._open_trainer(comm)
        same = self._same_call(method, lambda prepared: prepared[2].facts, arguments=[batch_size, steps])
        batches, step, _ = self._agreed(comm, "predict", prepare, same)
        hooks.params["steps"] = steps or batches.steps
        with self._collective(comm):
            outputs: Array = self._as_outputs(self._open_trainer(comm).predict(batches, hooks, step))
        return outputs

    # One batch at a time

    @in_turn(changes=True)
    def train_on_batch(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        class_weight: Mapping[int, float] | None = None,
        return_dict: bool = False,
    ) -> list[float] | float | dict[str, float]:
        """Update the weights from a global batch, which every rank passes and takes its part of. Collective.

        Returns and raises what `evaluate` does, for this batch.
        """
        comm = self._start("train_on_batch", x)
        batches = self._single_batch("train_on_batch", lambda: self._samples(x, y, sample_weight, class_weight), comm)
        self._warn_of_nothing_to_train()
        with self._collective(comm):
            logs = self._open_trainer(comm).train_on_batch(batches)
        return _in_order(logs, return_dict, names_in_order(self.metrics))

    @in_turn(changes=True)
    def test_on_batch(
        self, x: Any, y: Any = None, sample_weight: Any = None, return_dict: bool = False
    ) -> list[float] | float | dict[str, float]:
        """Return the loss and metrics of a global batch; see `train_on_batch`. Collective."""
        comm = self._start("test_on_batch", x)
        batches = self._single_batch("test_on_batch", lambda: self._samples(x, y, sample_weight), comm)
        with self._collective(comm):
            logs = self._open_trainer(comm).test_on_batch(batches)
        return _in_order(logs, return_dict, names_in_order(self.metrics))

    @ending_by_signals()
    def predict_on_batch(self, x: Any) -> Array:
        """Return the model's outputs for a batch, on every rank; see `predict`. Collective."""
        return self._predict_as("predict_on_batch", x, max(len(x), self._ranks().replicas), verbose=0)

    # Helpers

    @property
    def _is_pruned(self) -> bool:
        return any(weight.pruning is not None for weight in self.trainable_weights)

    @contextmanager
    def _turn(self, method: str) -> Iterator[None]:
        """Change metrics or weights within this context: beside predictions, but no other such change."""
        key = id(self)
        with TURNS.of({("model", key)}, {("metrics", key)}):
            self._refuse_beside_fit(method)
            yield

    def _warn_of_nothing_to_train(self) -> None:
        if not self.trainable_weights and not self._has_custom_steps:
            warn("The model does not have any trainable weights.")

    def _hooks(
        self,
        callbacks: Sequence[Callback] | None,
        verbose: str | int,
        *,
        keeps_history: bool = True,
        **params: Any,
    ) -> CallbackList:
        """Return the user's callbacks, followed by those that Keras always adds."""
        chosen = list(flatten(callbacks))
        if (
            keeps_history
            and self._is_pruned
            and not any(isinstance(callback, UpdatePruningStep) for callback in chosen)
        ):
            chosen.insert(0, UpdatePruningStep())  # first, so that others see the sparsity in the logs
        if keeps_history and not any(isinstance(callback, History) for callback in chosen):
            chosen.append(History())
        if verbose != 0 and not any(isinstance(callback, ProgbarLogger) for callback in chosen):
            chosen.append(ProgbarLogger())
        return CallbackList(chosen, self, verbose=verbose, **params)


@dataclass(frozen=True)
class _FitData:
    """The checked data of a `fit`, and how they are cut into batches."""

    train: Samples | Stream
    validation: Samples | Stream | None
    sampler: Sampler | None  # None for a stream
    batch_size: int | None  # chosen by the user or fixed by the model
    rows_of_batch: int | None  # of training; None for a stream
    shards: int | None  # fixed number of shards of a global batch; None for one per rank

    @property
    def steps(self) -> int | None:
        """Steps of a pass; None if unknown before its end."""
        if isinstance(self.train, Stream):
            return self.train.source.num_batches
        return None if self.sampler is None else self.sampler.steps


def _watched(comm: Communicator, hooks: CallbackList, mode: str) -> bool:
    """Return whether a callback on any rank needs batches, which all ranks must then take together. Collective."""
    if comm.size > 1:
        comm.require_same("the ranks have different callbacks", {"callbacks": hooks._decisive()})
    return any(comm.allgather(hooks._has_batch_hooks(mode)))


def _in_order(
    logs: dict[str, float], return_dict: bool, names: Iterable[str]
) -> list[float] | float | dict[str, float]:
    """Return logs in Keras' order: values in the order of metrics, the others sorted by key."""
    if return_dict:
        return logs
    first = [name for name in dict.fromkeys(names) if name in logs]
    values = [logs[key] for key in [*first, *sorted(logs.keys() - set(first))]]
    return values[0] if len(values) == 1 else values
