"""A model's layers, what it was compiled with, and the device that it lives on."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from dptrain import comm as comms
from dptrain import losses, optimizers
from dptrain.backend.base import Backend
from dptrain.comm import Communicator
from dptrain.errors import AgreedError, ConfigError, DeviceError, DeviceMemoryError
from dptrain.layers import InputLayer, Layer
from dptrain.layers.base import sizes
from dptrain.losses import Loss
from dptrain.metrics import Metric
from dptrain.metrics import resolve as resolve_metrics
from dptrain.model import Architecture
from dptrain.optimizers import Optimizer
from dptrain.runtime.failure import end_job, phase
from dptrain.runtime.text import short
from dptrain.saving.snapshot import OptimizerState
from dptrain.train.allreduce import DEFAULT_BUCKET_MB
from dptrain.train.custom import Steps
from dptrain.train.devices import open_backend
from dptrain.train.explicit import ExplicitReplica, NoLoss
from dptrain.train.replica import Replica
from dptrain.train.trainer import Trainer
from dptrain.utils import check_seed, default_seed

T = TypeVar("T")
Array = npt.NDArray[Any]


class Network(Steps):
    """Layers in a row that can be compiled and put on a device: what `Sequential` is before it has seen data.

    Its weights are in one of three places: nowhere yet, which means their initial values; in `_weights` on the host; or
    in `_replica` on the device, once something has been computed.

    Args:
        layers: the layers.
        trainable: as `Sequential`.
        name: for summaries.
        seed: as `Sequential`.

    Raises:
        ConfigError: the seed is out of range, or something else than a layer.
    """

    def __init__(
        self, layers: Sequence[Layer] | None, *, trainable: bool = True, name: str, seed: int | None = None
    ) -> None:
        super().__init__()
        self._stack: list[Layer] = [_checked(layer) for layer in layers or []]  # with the Input, if there is one
        self._trainable = bool(trainable)
        self.name = name
        self.seed = default_seed() if seed is None else check_seed(seed)
        self._architecture: Architecture | None = None
        self._backend: Backend | None = None  # where it is to live; None for one that it opens itself
        self._replica: Replica | None = None
        self._weights: Array | None = None
        self._optimizer_state: OptimizerState | None = None  # of a file, until there is a replica to have it
        self._trainer_kept: Trainer | None = None
        self._steps_called = False
        self._seen = False  # whether targets have come since `compile`
        self._exchange_options: tuple[bool, float, float | None] = (False, DEFAULT_BUCKET_MB, None)
        self._compiled: tuple[Loss, Optimizer, tuple[Any, Any, list[str]], dict[str, Any]] | None = None

    # Setting up

    @property
    def layers(self) -> list[Layer]:
        """The layers in a list of their own, as in Keras without an `Input`."""
        return [layer for layer in self._stack if not isinstance(layer, InputLayer)]

    @property
    def trainable(self) -> bool:
        """Whether weights are trained at all; setting it sets every layer's as well, as in Keras."""
        return self._trainable

    @trainable.setter
    def trainable(self, trainable: bool) -> None:
        self._trainable = bool(trainable)
        for layer in self._stack:
            layer.trainable = self._trainable

    def add(self, layer: Layer) -> None:
        """Append a layer.

        Raises:
            ConfigError: the model's weights exist already, or it is no layer.
        """
        if self._architecture is not None:
            raise ConfigError("layers can be added only before the model is first used")
        self._stack.append(_checked(layer))

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
            if size is not None and not 0 < size * 1e6 < math.inf:
                raise ConfigError(f"{name} = {size}: expected a number above 0")
        chosen = NoLoss() if loss is None else losses.get(loss)
        shape = None if self._architecture is None else self._architecture.output_shape
        measured = [one.key for one in resolve_metrics(metrics, weighted_metrics, chosen.takes_labels, shape)]
        self._keep_weights()
        self._replica = self._trainer_kept = self._optimizer_state = None
        self._seen = False
        self._exchange_options = (comm == "cuda-aware", bucket_mb, device_mb)
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
        self._architecture = before.as_trainable_now(self._trainable)
        if self._architecture is not before:
            flat = self._architecture.layout.rearranged(flat, before.layout)
        self._weights = flat

    def _follow_trainable(self) -> None:
        """Train from now on what `trainable` of model and layers says; weights and the optimizer's state stay."""
        before = self._architecture
        if before is None or before.as_trainable_now(self._trainable) is before:
            return
        state = self._optimizer_state
        if self._replica is not None and self._compiled is not None:
            state = OptimizerState.of(self._replica)
        self._keep_weights()
        self._replica = self._trainer_kept = None
        if state is not None:
            self._optimizer_state = state.rearranged(self.architecture.layout, before.layout)

    def build(self, input_shape: Sequence[int | None] | None = None) -> None:
        """Fix the shapes of all layers.

        Args:
            input_shape: (batch size, *shape of one sample), as in Keras; the batch size, which may be None, is left
                unused. None: the first layer says it.

        Raises:
            ConfigError: it is no such shape, another one than the model has already, or a layer cannot take it.
        """
        if input_shape is None:
            _ = self.architecture
            return
        if isinstance(input_shape, str) or not isinstance(input_shape, Sequence) or len(input_shape) < 2:
            raise ConfigError(
                f"build: input_shape = {input_shape!r}: expected (batch size or None, *shape of one sample), such as "
                "(None, 784)"
            )
        shape = sizes(input_shape[1:])
        if not self._awaits_shape() and self.architecture.input_shape != shape:
            raise ConfigError(
                f"Sequential model {self.name!r} has already been configured to use input shape "
                f"{(None, *self.architecture.input_shape)}. You cannot build it with input_shape {tuple(input_shape)}"
            )
        self._build_for(shape)

    def _awaits_shape(self) -> bool:
        """Whether nobody has said yet what shape a sample has."""
        return self._architecture is None and bool(self._stack) and self._stack[0].input_shape is None

    def _build_for(self, shape: tuple[int, ...]) -> None:
        """Fix the shapes of all layers, for samples of that shape."""
        if self._architecture is None:
            self._architecture = Architecture(self._stack, shape, trainable=self._trainable)

    @property
    def architecture(self) -> Architecture:
        """The model's shapes and parameter layout.

        Raises:
            ConfigError: the first layer has no input_shape and the model has not seen data.
        """
        if self._architecture is None:
            self._architecture = Architecture(self._stack, trainable=self._trainable)
        return self._architecture

    @property
    def is_compiled(self) -> bool:
        """Whether `compile` has been called."""
        return self._compiled is not None

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer that the model was compiled with.

        Raises:
            ConfigError: `compile` was not called.
        """
        if self._compiled is None:
            raise ConfigError("You must call `compile()` before using the optimizer.")
        return self._compiled[1]

    @property
    def device_options(self) -> dict[str, Any]:
        """What `compile` was told about the device: keywords of `dptrain.train.devices.open_backend`."""
        return dict(self._compiled[3]) if self._compiled else {}

    def _describe_compiled(self) -> list[Any]:
        """Return loss, optimizer and metrics as JSON can carry them."""
        assert self._compiled is not None
        loss, optimizer, measured, _ = self._compiled
        about = [[type(loss).__name__, loss.config()], [type(optimizer).__name__, optimizer.describe()]]
        return [*about, measured[2]]

    # Where it lives

    def put_on(self, backend: Backend) -> None:
        """Let the model live on a backend that is open already; its weights come along."""
        self._keep_weights()
        self._backend, self._replica, self._trainer_kept = backend, None, None

    def release(self) -> None:
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
        return self.on_device(comm).backend.description

    def on_device(self, comm: Communicator) -> Replica:
        """Return the model on its device, which the ranks choose together at the first call. Collective.

        Raises:
            DptrainError: as `describe_device`.
        """
        if self._replica is None:
            backend = self._backend or open_backend(comm, **self.device_options)
            self._replica = self._agreed(comm, "device", lambda: self._make_replica(backend))
        return self._replica

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

    def _trainer(self, comm: Communicator) -> Trainer:
        replica = self.on_device(comm)
        if isinstance(replica, ExplicitReplica):
            self._join(replica, comm)
        if self._trainer_kept is not None:
            return self._trainer_kept
        direct, bucket_mb, device_mb = self._exchange_options
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

    # Together with the other ranks

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

    # Steps of a user's own

    def _without_loss(self) -> bool:
        return self._compiled is not None and isinstance(self._compiled[0], NoLoss)

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
            self._replica = self.on_device(comm)
        else:
            self._replica = self._agreed(comm, "device", lambda: self._make_replica(backend))

    def _join(self, replica: ExplicitReplica, comm: Communicator) -> list[ExplicitReplica]:
        """Join the ranks, and bring the models that are parts of this one to the same device; return their replicas."""
        direct, bucket_mb, _ = self._exchange_options
        replica.join(comm, bucket_mb, direct)
        partners: list[ExplicitReplica] = []
        for part in self.parts():
            assert isinstance(part, Network)
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
