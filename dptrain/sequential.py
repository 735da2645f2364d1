"""The public face in Keras' words: a model that can be compiled, trained, evaluated and asked."""

import inspect
import json
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from dptrain import comm as comms
from dptrain import losses, optimizers
from dptrain.backend.base import Backend, flat_features
from dptrain.comm import Communicator
from dptrain.data.loading import Split
from dptrain.data.sampling import GlobalSampler, LocalSampler, Sampler
from dptrain.devices import open_backend
from dptrain.errors import AgreedError, ConfigError, DeviceError, DeviceMemoryError
from dptrain.failure import end_job, phase
from dptrain.inputs import (
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
    evaluation_sampler,
    is_array,
    refuse_split,
    rows_of_batch,
    source_of,
    split_off,
    stream_batches,
    unpack,
    weights_of_classes,
)
from dptrain.launcher import detect_launch
from dptrain.layers import Layer
from dptrain.losses import Loss
from dptrain.metrics import Metric
from dptrain.metrics import resolve as resolve_metrics
from dptrain.model import Architecture
from dptrain.optimizers import Optimizer
from dptrain.saving import keras_config, keras_zip
from dptrain.saving.snapshot import Loaded, OptimizerState, Snapshot, share
from dptrain.saving.weights import read_weights, require_ending, weights_encoder, write
from dptrain.train.allreduce import DEFAULT_BUCKET_MB
from dptrain.train.batches import ArrayBatches, Batches, warn_of_the_end
from dptrain.train.callbacks import Callback, CallbackList, History, ProgbarLogger
from dptrain.train.callbacks.base import flatten
from dptrain.train.custom import Steps
from dptrain.train.explicit import ExplicitReplica, NoLoss
from dptrain.train.replica import Replica
from dptrain.train.sources import BatchSource, short
from dptrain.train.stream import StreamBatches, What
from dptrain.train.trainer import EVALUATION_ROWS, Trainer, Turns, finish
from dptrain.utils import check_seed, default_seed

T = TypeVar("T")
Array = npt.NDArray[Any]


class Sequential(Steps):
    """Layers in a row, with training.

    The same script trains on one device when started by `python`, and on N when started by `mpirun -n N python`: every
    rank calls the same methods with the same arguments, and all methods that compute are collective.

    Args:
        layers: the layers; more can be added with `add`.
        name: for summaries.
        seed: of initial weights, shuffling and dropout, the same on all ranks; by default that of
            `dptrain.utils.set_random_seed`, or 0.

    Raises:
        ConfigError: the seed is out of range, or something else than a layer.
    """

    def __init__(
        self, layers: Sequence[Layer] | None = None, *, name: str = "sequential", seed: int | None = None
    ) -> None:
        super().__init__()
        self.layers: list[Layer] = [_checked(layer) for layer in layers or []]
        self.name = name
        self.seed = default_seed() if seed is None else check_seed(seed)
        self._architecture: Architecture | None = None
        self._backend: Backend | None = None  # where it is to live; None for one that it opens itself
        self._replica: Replica | None = None
        self._weights: Array | None = None
        self.history: History | None = None
        self.stop_training = False
        self._optimizer_state: OptimizerState | None = None  # of a file, until there is a replica to have it
        self._trainer_kept: Trainer | None = None
        self._steps_called = False
        self._seen = False  # whether targets have come since `compile`
        self._ways: tuple[bool, float, float | None] = (False, DEFAULT_BUCKET_MB, None)
        self._compiled: tuple[Loss, Optimizer, tuple[Any, Any, list[str]], dict[str, Any]] | None = None

    # Setting up

    def add(self, layer: Layer) -> None:
        """Append a layer.

        Raises:
            ConfigError: the model's weights exist already, or it is no layer.
        """
        if self._architecture is not None:
            raise ConfigError("layers can be added only before the model is first used")
        self.layers.append(_checked(layer))

    def compile(
        self,
        optimizer: str | Optimizer = "rmsprop",
        loss: str | Loss | None = None,
        loss_weights: None = None,
        metrics: Sequence[str | Metric] | None = None,
        weighted_metrics: Sequence[str | Metric] | None = None,
        run_eagerly: bool = False,
        steps_per_execution: int = 1,
        jit_compile: str | bool = "auto",
        auto_scale_loss: bool = True,
        *,
        device: str = "auto",
        dtype: str = "float32",
        loops: str = "auto",
        share_gpu: bool = False,
        comm: str = "host",
        bucket_mb: float = DEFAULT_BUCKET_MB,
        device_mb: float | None = None,
        gpu_select: str = "mask",
        precision: str = "float32",
        gemm: str = "dptrain",
    ) -> None:
        """Say how to train; the optimizer starts afresh, the weights stay.

        Args:
            optimizer: name or optimizer.
            loss: name or loss; None for a model whose own steps (see `Steps`) need none.
            loss_weights: None: a model here has one output.
            metrics: names or metrics; they count every sample as one.
            weighted_metrics: names or metrics that get the sample weights.
            run_eagerly: has no effect: nothing is traced or compiled from Python.
            steps_per_execution: 1.
            jit_compile: has no effect, as run_eagerly.
            auto_scale_loss: has no effect: there is no mixed precision.
            device: "auto", "cpu" or "cuda" (not in Keras).
            dtype: "float32" or "float64" (not in Keras).
            loops: the CPU's inner loops: "numpy", "numba", or "auto" for Numba's where it is installed (not in Keras).
            share_gpu: several ranks may use one GPU (not in Keras).
            comm: "host", or "cuda-aware" to hand the GPU's memory to an MPI that knows GPUs (not in Keras).
            bucket_mb: 10^6 bytes of gradients that travel as one message (not in Keras).
            device_mb: 10^6 bytes of a GPU's memory for samples, larger sets are streamed; None for what is free (not
                in Keras).
            precision: of a GPU's matrix products: "float32", or "tf32" on tensor cores (not in Keras).
            gemm: who computes a GPU's matrix products: "dptrain" or "cublaslt" (not in Keras).
            gpu_select: "mask" shows a rank its own GPU only, "index" leaves CUDA_VISIBLE_DEVICES alone (not in Keras).

        Raises:
            ConfigError: an unknown name, a size that is not above 0, or what is not supported.
        """
        for name, value, default in (
            ("loss_weights", loss_weights, None),
            ("steps_per_execution", steps_per_execution, 1),
        ):
            if value != default:
                hint = "; metrics is the fourth argument, as in Keras" if isinstance(value, list | tuple) else ""
                raise ConfigError(f"not supported: {name} = {value!r}{hint}")
        if comm not in ("host", "cuda-aware"):
            raise ConfigError(f"comm = {comm!r}: expected 'host' or 'cuda-aware'")
        for name, size in (("bucket_mb", bucket_mb), ("device_mb", device_mb)):
            if size is not None and not 0 < size < math.inf:
                raise ConfigError(f"{name} = {size}: expected a number above 0")
        chosen = NoLoss() if loss is None else losses.get(loss)
        shape = None if self._architecture is None else self._architecture.output_shape
        measured = [one.key for one in resolve_metrics(metrics, weighted_metrics, chosen.takes_labels, shape)]
        self._keep_weights()
        self._replica = self._trainer_kept = self._optimizer_state = None
        self._seen = False
        self._ways = (comm == "cuda-aware", bucket_mb, device_mb)
        options = {
            "device": device,
            "dtype": dtype,
            "loops": loops,
            "share_gpu": share_gpu,
            "gpu_select": gpu_select,
            "precision": precision,
            "gemm": gemm,
        }
        self._compiled = (chosen, optimizers.get(optimizer), (metrics, weighted_metrics, measured), options)

    def _keep_weights(self) -> None:
        """Hold the weights outside of the replica, laid out by what the layers' `trainable` says now."""
        if self._architecture is None:
            self._weights = None
            return
        flat, before = self._flat_weights(), self._architecture
        self._architecture = before.as_trainable_now()
        if self._architecture is not before:
            flat = self._architecture.layout.rearranged(flat, before.layout)
        self._weights = flat

    def build(self, input_shape: tuple[int, ...]) -> None:
        """Fix the shapes of all layers.

        Args:
            input_shape: shape of one sample.

        Raises:
            ConfigError: a layer cannot take its input.
        """
        if self._architecture is None:
            self._architecture = Architecture(self.layers, input_shape)

    @property
    def architecture(self) -> Architecture:
        """The model's shapes and parameter layout.

        Raises:
            ConfigError: the first layer has no input_shape and the model has not seen data.
        """
        if self._architecture is None:
            self._architecture = Architecture(self.layers)
        return self._architecture

    # Training and using

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
                a loader; see `dptrain.inputs.source_of` for what they are and what ranks draw.
            y: (rows,) or (rows, 1) integer labels, or (rows, *output_shape) values, as the loss takes them.
            batch_size: samples of a global batch, over all ranks together; if not given 32, or, as in Keras, such that
                `steps_per_epoch` batches hold all samples. Not used where x makes batches.
            epochs: number of the last epoch.
            verbose: 0 silent, 1 live line, 2 one line an epoch, "auto" for 1 on a terminal and else 2.
            callbacks: called on every rank.
            validation_split: this fraction of the samples, the last ones, is evaluated instead of trained on.
            validation_data: (x, y) or (x, y, sample_weight) to evaluate after epochs, or what makes batches.
            shuffle: a new order every epoch, f(seed, epoch); "batch" changes the order within batches only. Of a
                PyDataset it is the order of its batches; others that make batches keep theirs.
            class_weight: weights of samples by their label, 1 where it is not named.
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
        finish(self._fit_steps(**arguments))
        assert self.history is not None
        return self.history

    def fit_steps(self, *arguments: Any, **named: Any) -> Turns[None]:
        """Train as `fit`, and yield after every step, for who trains several models in turn; `history` fills.

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
    ) -> Turns[None]:
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
                "compiled": self._describe_compiled(),
            }
            comm.require_same("the ranks call fit differently", facts)
        watched = _watched(comm, hooks, "test")
        store = self._trainer(comm).replica.as_stored
        whole = self._whole()

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
            size = validation_batch_size
            if validation_steps or watched:
                size = rows_of_batch(validation_batch_size or batch_size, len(validation), validation_steps)
            elif whole:
                size = validation_batch_size or batch_size
            return own, evaluation_batches(validation, store, comm, size, validation_steps, whole=whole)

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
    ) -> Turns[None]:
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
            mine = LocalSampler(*validation.mine, EVALUATION_ROWS)
            return own, ArrayBatches(store(validation.x, validation.y), mine)

        own, evaluated = self._agreed(comm, "fit", batches)
        yield from self._train(own, evaluated, hooks, comm, epochs=epochs)

    def _train(
        self, train: Batches, validation: Batches | None, hooks: CallbackList, comm: Communicator, **arguments: Any
    ) -> Turns[None]:
        """What all ways into a training have in common."""
        self.history = next(callback for callback in hooks.callbacks if isinstance(callback, History))
        trainer = self._trainer(comm)
        for part in self.parts():
            part._share_parameters(comm)
        try:
            with self._collective(comm):
                yield from trainer.training(train, hooks, validation=validation, **arguments)
        finally:
            hooks.release()

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
            size = rows_of_batch(batch_size, len(data), steps) if steps or watched else batch_size
            return evaluation_batches(data, trainer.replica.as_stored, comm, size, steps, whole=self._whole())

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
            samples, size = check_features(x, self.architecture), batch_size
            if steps or watched:
                size = rows_of_batch(batch_size, len(samples), steps)
                if steps is not None:
                    samples = samples[: steps * size]
                    if (steps - 1) * size >= len(samples):
                        warn_of_the_end()
            sampler = evaluation_sampler(len(samples), comm, size)
            flat = samples.reshape(len(samples), flat_features(samples.shape[1:]))
            return ArrayBatches([flat], sampler), len(samples)

        batches, rows = self._agreed(comm, "predict", prepare)
        hooks.params["steps"] = steps or batches.steps
        with self._collective(comm):
            return self._trainer(comm).predict(batches, rows, hooks)

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

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer that the model was compiled with.

        Raises:
            ConfigError: `compile` was not called.
        """
        if self._compiled is None:
            raise ConfigError("You must call `compile()` before using the optimizer.")
        return self._compiled[1]

    # Weights

    def get_weights(self) -> list[Array]:
        """Return copies of the weights in Keras' order: [kernel, bias, ...], kernels as (inputs, outputs)."""
        flat = self._flat_weights()
        return [entry.view(flat).copy() for entry in self.architecture.layout.entries]

    def set_weights(self, weights: Sequence[Array]) -> None:
        """Set all weights, in the order of `get_weights`.

        Raises:
            ConfigError: their number or a shape differs from the model's (a ValueError, as in Keras).
        """
        entries = self.architecture.layout.entries
        if len(weights) != len(entries):
            raise ConfigError(
                f"You called `set_weights(weights)` on model {self.name!r} with a weight list of length "
                f"{len(weights)}, "
                f"but the model was expecting {len(entries)} weights."
            )
        flat = self._flat_weights()
        for entry, weight in zip(entries, weights, strict=True):
            array = np.asarray(weight)
            if array.shape != entry.shape:
                raise ConfigError(f"weight {entry.name!r}: expected shape {entry.shape}, found {array.shape}")
            entry.view(flat)[...] = array
        if self._replica is not None:
            self._replica.backend.write(self._replica.params, flat)
        self._weights = flat

    def named_weights(self) -> dict[str, Array]:
        """Return copies of the weights by name ("dense/kernel")."""
        names = [entry.name for entry in self.architecture.layout.entries]
        return dict(zip(names, self.get_weights(), strict=True))

    def count_params(self) -> int:
        """Return the number of weights."""
        return self.architecture.layout.count

    def summary(self) -> None:
        """Print the layers, their output shapes and numbers of weights, on rank 0."""
        launch = detect_launch()  # not the communicator: looking at a model need not start MPI
        if launch is None or launch.rank == 0:
            print(f'Model: "{self.name}"\n{self.architecture.summary()}')

    # Files (formats: dptrain.saving)

    def save(self, filepath: str | Path, overwrite: bool = True) -> None:
        """Write the whole model to a `.keras` file, which Keras 3 reads as well. Collective; rank 0 writes.

        It holds layers, weights and, if the model is compiled, optimizer with its state, loss and metrics.

        Args:
            filepath: ends in `.keras`.
            overwrite: whether an existing file may be replaced; Keras would ask.

        Raises:
            ConfigError: another ending, the model has no input shape yet, or h5py is not installed.
            OutputError: the file exists, or the disk is full or denied; an existing file stays as it was.
            AgreedError: either of these, on all ranks, under mpirun.
        """
        require_ending(filepath, ".keras")
        self._write_file(Path(filepath), keras_zip.encode, overwrite)

    def save_weights(self, filepath: str | Path, overwrite: bool = True) -> None:
        """Write the weights to a `.weights.h5` (with the optimizer's state, as Keras) or `.safetensors` file.

        Collective; rank 0 writes.

        Args:
            filepath: its ending says the format.
            overwrite: whether an existing file may be replaced; Keras would ask.

        Raises:
            ConfigError: as `save`.
            OutputError: as `save`.
            AgreedError: either of these, on all ranks, under mpirun.
        """
        self._write_file(Path(filepath), weights_encoder(Path(filepath)), overwrite)

    def load_weights(self, filepath: str | Path, skip_mismatch: bool = False) -> None:
        """Read weights from a `.weights.h5`, `.safetensors` or `.keras` file. Collective; rank 0 reads.

        As in Keras, the optimizer's state in a Keras file is taken over where this model's has been in use already.
        NaN in weights are loaded as they are.

        Args:
            filepath: its ending says the format.
            skip_mismatch: leave layers that do not fit as they are, with a warning.

        Raises:
            ConfigError: another ending, the model has no input shape yet, or h5py is not installed.
            DataError: the file is missing or damaged, or names or shapes differ: lists every difference.
            AgreedError: either of these, on all ranks, under mpirun.
        """
        comm = comms.current()
        phase.enter("loading")

        def read() -> Loaded | None:
            if comm.rank != 0:
                return None
            snapshot = self._snapshot()
            used = snapshot.state.iterations > 0
            return read_weights(Path(filepath), snapshot, with_optimizer=used, skip_mismatch=skip_mismatch)

        found = self._agreed(comm, "loading", read)
        loaded = share(comm, found, self.architecture.layout)
        self.take_loaded(loaded)
        phase.enter("user code")
        if comm.rank == 0:
            for line in loaded.warnings:
                warnings.warn(line, stacklevel=2)

    def take_loaded(self, loaded: Loaded) -> None:
        """Take over weights, and the optimizer's state if there is one, from a file; the same on all ranks."""
        self._weights = loaded.weights
        if self._replica is not None:
            self._replica.backend.write(self._replica.params, loaded.weights.astype(self._replica.backend.dtype))
        if loaded.state is None or self._compiled is None:
            return
        if loaded.state.learning_rate is not None:
            self._compiled[1].learning_rate = loaded.state.learning_rate
        self._optimizer_state = loaded.state
        if self._replica is not None:
            loaded.state.restore(self._replica)

    def get_config(self) -> dict[str, Any]:
        """Return name, layers and input shape as Keras' `Sequential.get_config` does."""
        if self._architecture is None and not (self.layers and self.layers[0].input_shape is not None):
            return keras_config.sequential_config(self.name, self.layers, None, self._dtype())
        return keras_config.sequential_config(self.name, self.architecture.layers, self.architecture, self._dtype())

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Sequential":
        """Return a new model of a `get_config`, of dptrain's or Keras'.

        Raises:
            ConfigError: it has what dptrain does not have; names it.
        """
        name, layers, _ = keras_config.layers_of(config)
        return cls(layers, name=name)

    def to_json(self, **kwargs: Any) -> str:
        """Return the model without weights as JSON, the same as config.json in a `.keras` file.

        Args:
            kwargs: of `json.dumps`.
        """
        # Without a loss, as if it were not compiled: such steps are not in files either.
        compiled = None if self._compiled is None or self._without_loss() else self._compiled[:3]
        return json.dumps(keras_config.model_config(self.get_config(), compiled), **kwargs)

    def _write_file(self, path: Path, encode: Callable[[Snapshot], bytes], overwrite: bool) -> None:
        comm = comms.current()
        phase.enter("saving")

        def action() -> None:
            if comm.rank == 0:
                write(path, encode, self._snapshot(), overwrite=overwrite)

        self._agreed(comm, "saving", action)
        phase.enter("user code")

    def _snapshot(self) -> Snapshot:
        """Return a copy of everything that goes into a file."""
        state = self._optimizer_state or OptimizerState()
        if self._replica is not None and self._compiled is not None:
            state = OptimizerState.of(self._replica)
        # Without a loss, as if it were not compiled: such steps are not in files either.
        compiled = None if self._compiled is None or self._without_loss() else self._compiled[:3]
        return Snapshot(self.name, self.seed, self._dtype(), self.architecture, self._flat_weights(), compiled, state)

    def _dtype(self) -> str:
        return "float32" if self._compiled is None else str(self._compiled[3]["dtype"])

    # Helpers

    @property
    def is_compiled(self) -> bool:
        """Whether `compile` has been called."""
        return self._compiled is not None

    @property
    def device_options(self) -> dict[str, Any]:
        """What `compile` was told about the device: keywords of `dptrain.devices.open_backend`."""
        return dict(self._compiled[3]) if self._compiled else {}

    def put_on(self, backend: Backend) -> None:
        """Let the model live on a backend that is open already; its weights come along."""
        self._keep_weights()
        self._backend, self._replica, self._trainer_kept = backend, None, None

    def take_off(self) -> None:
        """Give the device's memory back at once; weights and the optimizer's state are lost."""
        if self._replica is not None:
            self._replica.release()
        self._replica = self._trainer_kept = None

    def describe_device(self, comm: Communicator) -> str:
        """Return the device in words; allocates the model on it. Collective.

        Raises:
            DeviceError: it cannot be used, or too little memory is left on it.
            AgreedError: the same on any rank, under mpirun, or the ranks do not go together.
        """
        return self._on_device(comm).backend.description

    def on_device(self, comm: Communicator) -> Replica:
        """Return the model on its device, which the ranks choose together at the first call. Collective.

        Raises:
            DptrainError: as `describe_device`.
        """
        return self._on_device(comm)

    def _start(self, method: str | None, x: Array) -> Communicator:
        if method is not None and self._compiled is None:
            raise ConfigError(f"You must call `compile()` before calling `{method}()`.")
        if method is not None and self._compiled is not None and self._without_loss() and not self.has_own_steps:
            raise ConfigError("No loss to compute. Provide a `loss` argument in `compile()`.")
        phase.enter(method or "predict")
        if self._architecture is None and self.layers and self.layers[0].input_shape is None and is_array(x):
            self.build(as_array(x, "x").shape[1:])
        return comms.current()

    def _agreed(self, comm: Communicator, where: str, action: Callable[[], T]) -> T:
        """Run what may find the user's arguments wrong: alone it raises as in Keras, on N ranks it raises on all."""
        return action() if comm.size == 1 else comm.agree(where, action)

    @contextmanager
    def _collective(self, comm: Communicator) -> Iterator[None]:
        """What the other ranks are in as well: an error of this rank alone would leave them waiting for ever."""
        try:
            try:
                yield
            except DeviceMemoryError as error:  # an op's scratch; the model's own buffers say for themselves what fits
                advice = "" if self._replica is None else f"; {self._replica.what_fits(error)}"
                raise DeviceError(f"{error}{advice}") from error
            phase.enter("user code")
        except AgreedError:
            raise
        except BaseException as error:
            if comm.size > 1:
                end_job(error)
            raise

    def _on_device(self, comm: Communicator) -> Replica:
        """Return the model on its device, which the ranks choose together. Collective."""
        if self._replica is None:
            backend = self._backend or open_backend(comm, **self.device_options)
            self._replica = self._agreed(comm, "device", lambda: self._make_replica(backend))
        return self._replica

    def _without_loss(self) -> bool:
        return self._compiled is not None and isinstance(self._compiled[0], NoLoss)

    def _targets_unspecified(self, y: Any) -> bool:
        """Whether the model's own steps alone know what the targets are."""
        return self._without_loss() or (y is None and self.has_own_steps)

    def _make_replica(self, backend: Backend) -> Replica:
        make = ExplicitReplica if self.has_own_steps or self._steps_called else Replica
        replica = make(backend, self.architecture, self.seed)
        if self._weights is not None:
            backend.write(replica.params, self._weights)
        if self._compiled:
            loss, optimizer, measured, _ = self._compiled
            replica.compile(loss, optimizer, measured[0], measured[1])
            if self._optimizer_state is not None:
                self._optimizer_state.restore(replica)
        return replica

    def _describe_compiled(self) -> list[Any]:
        """Return loss, optimizer and metrics as JSON can carry them."""
        assert self._compiled is not None
        loss, optimizer, measured, _ = self._compiled
        about = [[type(loss).__name__, loss.config()], [type(optimizer).__name__, optimizer.describe()]]
        return [*about, measured[2]]

    def _trainer(self, comm: Communicator) -> Trainer:
        replica = self._on_device(comm)
        if isinstance(replica, ExplicitReplica):
            self._join(replica, comm)
        if self._trainer_kept is not None:
            return self._trainer_kept
        direct, bucket_mb, device_mb = self._ways
        comm.require_same("the ranks exchange gradients differently", {"comm and bucket_mb": [direct, bucket_mb]})
        if direct:
            comm.agree("communicator", lambda: _require_cuda_aware(replica.backend, comm))
        data_bytes = None if device_mb is None else int(device_mb * 1e6)
        self._trainer_kept = Trainer(replica, comm, bucket_mb=bucket_mb, direct=direct, data_bytes=data_bytes)
        return self._trainer_kept

    # Steps of a user's own

    def _explicit(self) -> ExplicitReplica:
        """Return the replica whose forward and backward passes can be called. Collective at the first call."""
        replica = self._replica
        if isinstance(replica, ExplicitReplica):
            return replica
        comm = comms.current()
        self._make_explicit(comm, None)
        self._trainer(comm)
        self._share_parameters(comm)
        return self._explicit()

    def _make_explicit(self, comm: Communicator, backend: Backend | None) -> None:
        """Put the model on a backend (None: its own) with passes that can be called; its state comes along."""
        if self._replica is not None and self._compiled is not None:
            self._optimizer_state = OptimizerState.of(self._replica)
        self._weights = self._flat_weights()
        self._steps_called, self._replica, self._trainer_kept = True, None, None
        if backend is None:
            self._replica = self._on_device(comm)
        else:
            self._replica = self._agreed(comm, "device", lambda: self._make_replica(backend))

    def _join(self, replica: ExplicitReplica, comm: Communicator) -> list[ExplicitReplica]:
        """Join the ranks, and bring the models that are parts of this one to the same device; return their replicas."""
        direct, bucket_mb, _ = self._ways
        replica.join(comm, bucket_mb, direct)
        partners: list[ExplicitReplica] = []
        for part in self.parts():
            assert isinstance(part, Sequential)
            partner = part._replica
            if not isinstance(partner, ExplicitReplica) or partner.backend is not replica.backend:
                part._make_explicit(comm, replica.backend)
            assert isinstance(part._replica, ExplicitReplica)
            partners += [part._replica, *part._join(part._replica, comm)]
        if hasattr(replica, "loss"):
            replica.drive(self, self._trackers(), partners)
        return partners

    def _share_parameters(self, comm: Communicator) -> None:
        """Give every rank rank 0's parameters, those of the model's parts as well. Collective."""
        self._trainer(comm).share_parameters()
        for part in self.parts():
            part._share_parameters(comm)

    def _flat_weights(self) -> Array:
        if self._replica is not None:
            return self._replica.backend.download(self._replica.params)
        if self._weights is None:
            self._weights = self.architecture.layout.initial(self.seed, np.float64)
        return self._weights.copy()

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
        if self._architecture is None and self.layers and self.layers[0].input_shape is None:
            self.build(x.shape[1:])
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

    def _whole(self) -> bool:
        """Return whether the loss of an evaluation depends on how samples are cut into batches."""
        assert self._compiled is not None
        return self._compiled[0].depends_on_batches

    def _one_batch(self, where: str, samples: Samples, comm: Communicator) -> Batches:
        store = self._trainer(comm).replica.as_stored
        size = max(len(samples), comm.size)

        def action() -> Batches:
            sampler = GlobalSampler(len(samples), size, comm.rank, comm.size, shuffle=False)
            return ArrayBatches(samples.stored(store), sampler)

        return self._agreed(comm, where, action)

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


def _checked(layer: Any) -> Layer:
    """Return a layer.

    Raises:
        ConfigError: it is something else.
    """
    if isinstance(layer, Layer):
        return layer
    raise ConfigError(
        f"Only instances of `dptrain.layers.Layer` can be added to a Sequential model. Received: {short(layer)} (of "
        f"type {type(layer)})"
    )


def _require_cuda_aware(backend: Backend, comm: Communicator) -> None:
    """Refuse to hand device memory to an MPI that cannot take it.

    Raises:
        ConfigError: there is no device memory.
        DeviceError: MPI does not know GPUs.
    """
    if backend.name != "cuda":
        raise ConfigError(f"--comm cuda-aware needs --device cuda: this rank computes on {backend.description}")
    if reason := comm.why_not_cuda_aware():
        raise DeviceError(f"--comm cuda-aware: {reason}; use --comm host")


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
