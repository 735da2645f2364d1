"""The public face in Keras' words: a model that can be compiled, trained, evaluated and asked."""

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from dptrain import comm as comms
from dptrain import losses, optimizers
from dptrain.backend.base import Backend, flat_features
from dptrain.comm import Communicator
from dptrain.data.checks import check_labels
from dptrain.data.loading import Split, fingerprint
from dptrain.data.sampling import GlobalSampler, Sampler
from dptrain.devices import open_backend
from dptrain.errors import AgreedError, ConfigError, DataError, DeviceError, DeviceMemoryError
from dptrain.failure import end_job, phase
from dptrain.launcher import detect_launch
from dptrain.layers import Layer
from dptrain.losses import Loss
from dptrain.metrics import Metric
from dptrain.metrics import resolve as resolve_metrics
from dptrain.model import Architecture
from dptrain.optimizers import Optimizer
from dptrain.train.allreduce import DEFAULT_BUCKET_MB
from dptrain.train.callbacks import Callback, History
from dptrain.train.callbacks.progress import for_verbosity
from dptrain.train.replica import Replica
from dptrain.train.trainer import Trainer
from dptrain.utils import check_seed, default_seed

T = TypeVar("T")
Array = npt.NDArray[Any]


class Sequential:
    """Layers in a row, with training.

    The same script trains on one device when started by `python`, and on N when started by `mpirun -n N python`: every
    rank calls the same methods with the same arguments, and all methods that compute are collective.

    Args:
        layers: the layers; more can be added with `add`.
        name: for summaries.
        seed: of initial weights, shuffling and dropout, the same on all ranks; by default that of
            `dptrain.utils.set_random_seed`, or 0.

    Raises:
        ConfigError: the seed is out of range.
    """

    def __init__(
        self, layers: Sequence[Layer] | None = None, *, name: str = "sequential", seed: int | None = None
    ) -> None:
        self.layers: list[Layer] = list(layers or [])
        self.name = name
        self.seed = default_seed() if seed is None else check_seed(seed)
        self._architecture: Architecture | None = None
        self._replica: Replica | None = None
        self._weights: Array | None = None
        self._trainer_kept: Trainer | None = None
        self._ways: tuple[bool, float, float | None] = (False, DEFAULT_BUCKET_MB, None)
        self._compiled: tuple[Loss, Optimizer, tuple[Any, Any, list[str]], dict[str, Any]] | None = None

    # Setting up

    def add(self, layer: Layer) -> None:
        """Append a layer.

        Raises:
            ConfigError: the model's weights exist already.
        """
        if self._architecture is not None:
            raise ConfigError("layers can be added only before the model is first used")
        self.layers.append(layer)

    def compile(
        self,
        optimizer: str | Optimizer = "rmsprop",
        loss: str | Loss | None = None,
        metrics: Sequence[str | Metric] | None = None,
        *,
        weighted_metrics: Sequence[str | Metric] | None = None,
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
            loss: name or loss.
            metrics: names or metrics; they count every sample as one.
            weighted_metrics: names or metrics that get the sample weights.
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
            ConfigError: an unknown name, a size that is not above 0, or no loss.
        """
        if comm not in ("host", "cuda-aware"):
            raise ConfigError(f"comm = {comm!r}: expected 'host' or 'cuda-aware'")
        for name, size in (("bucket_mb", bucket_mb), ("device_mb", device_mb)):
            if size is not None and not 0 < size < math.inf:
                raise ConfigError(f"{name} = {size}: expected a number above 0")
        if loss is None:
            raise ConfigError("compile() needs a loss, such as 'sparse_categorical_crossentropy'")
        chosen = losses.get(loss)
        shape = None if self._architecture is None else self._architecture.output_shape
        measured = [one.key for one in resolve_metrics(metrics, weighted_metrics, chosen.takes_labels, shape)]
        self._weights = self._flat_weights() if self._architecture is not None else None
        self._replica = self._trainer_kept = None
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
        x: Array,
        y: Array,
        batch_size: int = 32,
        epochs: int = 1,
        verbose: str | int = "auto",
        callbacks: Sequence[Callback] | None = None,
        *,
        validation_data: tuple[Array, Array] | None = None,
        shuffle: bool = True,
        steps_per_epoch: int | None = None,
        drop_last: bool = False,
    ) -> History:
        """Train. Collective.

        Args:
            x: (rows, *input_shape), any real dtype, the same on all ranks; uint8 stays uint8 in memory.
            y: (rows,) or (rows, 1) integer labels, or (rows, *output_shape) values, as the loss takes them.
            batch_size: samples of a global batch, over all ranks together.
            epochs: how many times through the data.
            verbose: 0 silent, 1 live line, 2 one line an epoch, "auto" for 1 on a terminal and else 2.
            callbacks: called on every rank.
            validation_data: (x, y) to evaluate after every epoch.
            shuffle: a new order every epoch, f(seed, epoch).
            steps_per_epoch: end epochs after that many steps.
            drop_last: leave out a last batch that is not full (not in Keras).

        Returns:
            The history of losses and metrics, global values, the same on every rank.

        Raises:
            ConfigError: `compile` was not called, or an argument is out of range (a ValueError, as in Keras).
            DataError: data that does not fit the model.
            AgreedError: either of these, on all ranks, under mpirun.
        """
        comm = self._start("fit", x)
        if epochs < 0:
            raise ConfigError(f"epochs = {epochs}: expected an integer >= 0")

        def prepare() -> tuple[Split, Split | None, Sampler]:
            train = self._split(x, y, comm)
            validation = None if validation_data is None else self._split(*validation_data, comm)
            sampler = GlobalSampler(
                len(train.x),
                batch_size,
                comm.rank,
                comm.size,
                seed=self.seed,
                shuffle=shuffle,
                drop_last=drop_last,
                steps_per_epoch=steps_per_epoch,
            )
            return train, validation, sampler

        train, validation, sampler = self._agreed(comm, "fit", prepare)
        if comm.size > 1:
            # A rank with another number of steps would leave the others waiting; with other data or another batch size
            # each would compute the gradient of something else.
            facts = {
                "the training sets (shapes, dtypes, checksum) differ": fingerprint(train.x, train.y),
                "arguments": [batch_size, epochs, validation is None, shuffle, steps_per_epoch, drop_last],
                "seed": self.seed,
                "layers": [[type(layer).__name__, layer.config()] for layer in self.layers],
                "compiled": self._describe_compiled(),
            }
            comm.require_same("the ranks call fit differently", facts)
        return self.fit_splits(train, validation, sampler, epochs=epochs, verbose=verbose, callbacks=callbacks or ())

    def fit_splits(
        self,
        train: Split,
        validation: Split | None,
        sampler: Sampler,
        *,
        epochs: int,
        verbose: str | int = "auto",
        callbacks: Sequence[Callback] = (),
    ) -> History:
        """Train on data that is already shared out among the ranks, in the order of a sampler. Collective.

        What `fit` and the command line have in common.
        """
        comm = self._start("fit", train.x)
        history = History()
        shown = for_verbosity(verbose, comm.rank, sys.stdout.isatty())
        trainer = self._trainer(comm)
        self._collectively(
            comm,
            lambda: trainer.fit(
                train, sampler, epochs=epochs, validation=validation, callbacks=[history, *shown, *callbacks]
            ),
        )
        return history

    def evaluate(
        self, x: Array, y: Array, verbose: str | int = "auto", *, return_dict: bool = False
    ) -> list[float] | float | dict[str, float]:
        """Return the mean loss and metrics over x. Collective.

        Args:
            x: as in `fit`.
            y: as in `fit`.
            verbose: 0 prints nothing, anything else one line.
            return_dict: return a dictionary by log key.

        Returns:
            [loss, metric, ...], or the loss alone where there is no metric, or a dictionary.

        Raises:
            ConfigError: `compile` was not called.
            DataError: data that does not fit the model.
        """
        comm = self._start("evaluate", x)
        split = self._agreed(comm, "evaluate", lambda: self._split(x, y, comm))
        logs = self._collectively(comm, lambda: self._trainer(comm).evaluate(split))
        if comm.rank == 0 and verbose != 0:
            print(" - ".join(f"{key}: {value:.4f}" for key, value in logs.items()), flush=True)
        if return_dict:
            return logs
        values = list(logs.values())
        return values if len(values) > 1 else values[0]

    def predict(self, x: Array) -> Array:
        """Return the model's outputs, (rows, *output_shape), on every rank. Collective.

        Args:
            x: as in `fit`.

        Raises:
            DataError: data that does not fit the model.
        """
        comm = self._start(None, x)
        samples = self._agreed(comm, "predict", lambda: self._features(x))
        return self._collectively(comm, lambda: self._trainer(comm).predict(samples))

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

    # Helpers

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
        phase.enter(method or "predict")
        if self._architecture is None and self.layers and self.layers[0].input_shape is None:
            self.build(tuple(np.shape(x)[1:]))
        return comms.current()

    def _agreed(self, comm: Communicator, where: str, action: Callable[[], T]) -> T:
        """Run what may find the user's arguments wrong: alone it raises as in Keras, on N ranks it raises on all."""
        return action() if comm.size == 1 else comm.agree(where, action)

    def _collectively(self, comm: Communicator, action: Callable[[], T]) -> T:
        """Run what the other ranks are in as well: an error of this rank alone would leave them waiting for ever."""
        try:
            try:
                result = action()
            except DeviceMemoryError as error:  # an op's scratch; the model's own buffers say for themselves what fits
                advice = "" if self._replica is None else f"; {self._replica.what_fits(error)}"
                raise DeviceError(f"{error}{advice}") from error
            phase.enter("user code")
            return result
        except AgreedError:
            raise
        except BaseException as error:
            if comm.size > 1:
                end_job(error)
            raise

    def _on_device(self, comm: Communicator) -> Replica:
        """Return the model on its device, which the ranks choose together. Collective."""
        if self._replica is None:
            backend = open_backend(comm, **(self._compiled[3] if self._compiled else {}))
            self._replica = self._agreed(comm, "device", lambda: self._make_replica(backend))
        return self._replica

    def _make_replica(self, backend: Backend) -> Replica:
        replica = Replica(backend, self.architecture, self.seed)
        if self._weights is not None:
            backend.write(replica.params, self._weights)
        if self._compiled:
            loss, optimizer, measured, _ = self._compiled
            replica.compile(loss, optimizer, measured[0], measured[1])
        return replica

    def _describe_compiled(self) -> list[Any]:
        """Return loss, optimizer and metrics as JSON can carry them."""
        assert self._compiled is not None
        loss, optimizer, measured, _ = self._compiled
        about = [[type(one).__name__, one.config()] for one in (loss, optimizer)]
        return [*about, measured[2]]

    def _trainer(self, comm: Communicator) -> Trainer:
        if self._trainer_kept is not None:
            return self._trainer_kept
        replica = self._on_device(comm)
        direct, bucket_mb, device_mb = self._ways
        comm.require_same("the ranks exchange gradients differently", {"comm and bucket_mb": [direct, bucket_mb]})
        if direct:
            comm.agree("communicator", lambda: _require_cuda_aware(replica.backend, comm))
        data_bytes = None if device_mb is None else int(device_mb * 1e6)
        self._trainer_kept = Trainer(replica, comm, bucket_mb=bucket_mb, direct=direct, data_bytes=data_bytes)
        return self._trainer_kept

    def _flat_weights(self) -> Array:
        if self._replica is not None:
            return self._replica.backend.download(self._replica.params)
        if self._weights is None:
            self._weights = self.architecture.layout.initial(self.seed, np.float64)
        return self._weights.copy()

    def _features(self, x: Array) -> Array:
        """Return x as an array after checking it against the model."""
        x = np.asarray(x)
        expected = self.architecture.input_shape
        if x.dtype.kind not in "uifb":
            raise DataError(f"x has dtype {x.dtype}: expected real numbers")
        if x.shape[1:] != expected:
            raise DataError(
                f"model expects {flat_features(expected)} features of shape {expected}, data has "
                f"{flat_features(x.shape[1:])} of shape {x.shape[1:]}"
            )
        return x

    def _split(self, x: Array, y: Array, comm: Communicator) -> Split:
        """Return x and y as a split after checking them against the model and the loss."""
        assert self._compiled is not None
        features, targets = self._features(x), np.asarray(y)
        if len(features) != len(targets):
            raise DataError(f"x has {len(features)} samples, y has {len(targets)}")
        output = self.architecture.output_shape
        if self._compiled[0].takes_labels:
            ignored = self._compiled[0].ignored
            check_labels(targets if ignored is None else targets[targets != ignored], output[-1], "y")
            targets = targets.reshape(len(targets))
        else:
            if targets.ndim == 1 and output == (1,):
                targets = targets[:, None]
            if targets.shape[1:] != output:
                raise DataError(f"y: expected targets of shape {output}, the model's output, found {targets.shape[1:]}")
        return Split.whole(features, targets, comm.rank, comm.size)


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
