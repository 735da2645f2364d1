"""The CUDA backend: our own kernels, launched through PyCUDA on one GPU.

All work of a backend is queued on one non-blocking stream, in order; the host waits only where it reads. A launch
costs Python time, so kernels are prepared once, buffers are thin records of a pointer and a shape, and scratch is
allocated at its first use and kept.
"""
# ruff: noqa: D102 - each op is documented once, in backend/base.py

import contextlib
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import numpy.typing as npt

from dptrain.backend.base import DEFAULT_ALPHA, POINTWISE, Backend, HostArray, RowSum, amount
from dptrain.backend.cuda.device import cuda, open_gpu
from dptrain.backend.cuda.kernels import GATHERED, load_kernels, load_own_kernel
from dptrain.backend.cuda.memory import DeviceArray, DeviceMemory, Heap, SharedSamples, Streams, count
from dptrain.backend.cuda.products import ACTIVATION_NUMBERS, FUSED_ACTIVATIONS, Gemm, OwnGemm
from dptrain.backend.cuda.transfers import DirectExchange, PinnedExchange, PinnedStaging
from dptrain.backend.custom import Op
from dptrain.backend.transfers import SAMPLES, Exchange, Staging
from dptrain.errors import ConfigError, DeviceError
from dptrain.random import Purpose

# `dtype.name` is put together anew, in 6 us, whenever it is asked for; kernels are named by it several times a step.
_NAMES = {np.dtype(name): name for name in GATHERED}
# Threads of a block of elementwise kernels, and blocks at most: enough to fill any GPU, the rest is a loop.
_THREADS, _BLOCKS = 256, 2048
# The part of a GPU's memory that samples leave free, for scratch and for what others do.
_RESERVE = 0.05
# Rows that a block of the row kernels takes, a warp each.
_ROWS = 4
# Elements of a flat buffer that `sum` and its like make one partial sum of, 16 a thread; their order depends on it.
_SUM_CHUNK = 4096
# Shared samples that a backend keeps when nobody reads them: features, targets, weights, and those for validation.
_KEPT_SAMPLES = 6
# What a kernel takes for the label to ignore where there is none.
_NO_LABEL = -(2**63)
# Rows that one block of `dense_gradient` sums.
_GRADIENT_ROWS = 64
# Rows and columns that a block of the batch normalization's sums takes.
_BATCH_ROWS, _BATCH_COLUMNS = 256, 32
# Compute capability from which tensor cores know TF32.
_TF32_FROM = 80


class CudaBackend(Backend):
    """Ops on one NVIDIA GPU, in float32.

    Args:
        dtype: "float32".
        number: of the GPU among those that CUDA shows this process.
        select: "mask" or "index", as in `open_gpu`.
        host: this node's name, for messages.
        precision: of matrix products, "float32" or "tf32".
        gemm: who computes them, "dptrain" or "cublaslt".
        sharers: ranks that use the GPU.

    Raises:
        ConfigError: another dtype, a GPU without the precision, or a provider that is not installed.
        DeviceError: no driver, no GPU, no nvcc, or too little memory.
    """

    def __init__(
        self,
        dtype: npt.DTypeLike = np.float32,
        number: int = 0,
        select: str = "mask",
        host: str = "localhost",
        precision: str = "float32",
        gemm: str = "dptrain",
        sharers: int = 1,
    ) -> None:
        self.name = "cuda"
        self.dtype = np.dtype(dtype)
        if self.dtype != np.float32:
            raise ConfigError(f"dtype = {self.dtype.name!r}: the CUDA kernels compute in float32; use --device cpu")
        self._gpu = gpu = open_gpu(number, select, host)
        if precision == "tf32" and int(gpu.architecture.removeprefix("sm_")) < _TF32_FROM:
            # Not a DeviceError, after which `--device auto` would take the CPU.
            raise ConfigError(
                f"precision = 'tf32': {gpu.name} ({gpu.architecture}) has no TF32, which needs compute capability 8.0; "
                "use --precision float32"
            )
        self.gpu = gpu.uuid
        # Ranks that may put samples on the same GPU.
        self._sharers = sharers
        self._last_samples: deque[SharedSamples] = deque(maxlen=_KEPT_SAMPLES)
        self._workspace: DeviceMemory | None = None
        self._library_workspace: DeviceMemory | None = None
        self.gemm: Gemm | None = None
        self._own_kernels: dict[Op, Any] = {}
        self._streams = Streams(gpu)
        self._heap = Heap(gpu, self._streams)
        self._kernels = load_kernels(gpu, precision)
        gpu.backends.add(self)
        self.gemm = self._provider(gemm, precision)
        self.numerics = f"cuda, {self.dtype}, {gpu.architecture}, {self.gemm.numerics}"
        products_by = "" if gemm == "dptrain" else f", products by {gemm}"
        kind = f"{self.dtype}" if precision == "float32" else f"{self.dtype} with products in {precision}"
        self.description = f"{gpu.name}, {gpu.uuid or 'UUID unknown'}, {amount(gpu.memory)}, {kind}{products_by}"

    def _provider(self, name: str, precision: str) -> Gemm:
        own = OwnGemm(precision, self._launch, self._elementwise, self._scratch)
        if name == "dptrain":
            return own
        from dptrain.backend.cuda.cublaslt import CublasLtGemm

        def allocate(nbytes: int) -> int:
            self._library_workspace = DeviceMemory(self._heap, nbytes, "workspace of cuBLASLt")
            return self._library_workspace.pointer

        def activate(address: int, size: int, activation: str) -> None:
            self._activation("activation_forward", activation, None, size, address, address)

        return CublasLtGemm(precision, self._streams.ops.handle, allocate, activate, own)

    def close(self) -> None:
        """Give the device's memory back; the backend cannot be used afterwards."""
        if self.gemm is not None:
            with contextlib.suppress(cuda.Error):
                self._wait()
            self.gemm.close()
            self.gemm = None
        self._last_samples.clear()
        self._heap.close()
        self._streams.close()
        self._workspace = self._library_workspace = None
        self._kernels = {}
        self._own_kernels.clear()

    # Memory

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike | None = None, name: str = "") -> DeviceArray:
        kind = self.dtype if dtype is None else np.dtype(dtype)
        shape = tuple(int(n) for n in shape)
        memory = DeviceMemory(self._heap, count(shape) * kind.itemsize, name or "other buffers")
        return DeviceArray(memory, memory.pointer, shape, kind)

    def zeros(self, shape: tuple[int, ...], dtype: npt.DTypeLike | None = None, name: str = "") -> DeviceArray:
        buffer = self.empty(shape, dtype, name)
        if buffer.nbytes:
            cuda.memset_d8_async(buffer.pointer, 0, buffer.nbytes, self._streams.ops)
        return buffer

    def upload(self, array: HostArray, name: str = "") -> DeviceArray:
        buffer = self.empty(array.shape, _stored(array.dtype), name)
        self.write(buffer, array)
        return buffer

    def download(self, buffer: DeviceArray) -> HostArray:
        host = np.empty(buffer.shape, buffer.dtype)
        if buffer.size:
            cuda.memcpy_dtoh_async(host, buffer.pointer, self._streams.ops)
            self._wait()
        return host

    def write(self, buffer: DeviceArray, array: HostArray) -> None:
        host = np.ascontiguousarray(array, buffer.dtype)
        if host.shape != buffer.shape:
            raise ValueError(f"cannot write an array of shape {host.shape} to a buffer of shape {buffer.shape}")
        if buffer.size:
            cuda.memcpy_htod_async(buffer.pointer, host, self._streams.ops)
            self._wait()  # the array is the caller's again

    def upload_samples(self, array: HostArray) -> DeviceArray:
        if not self.shares_samples:
            return self.upload(array, SAMPLES)
        samples, identity = self._gpu.samples, _identity(array)
        memory, is_new = samples.get(identity), False
        if memory is None:
            memory = samples[identity] = SharedSamples(self._heap, _stored_bytes(array), SAMPLES, array)
            is_new = True
        self._last_samples.append(memory)
        buffer = DeviceArray(memory, memory.pointer, array.shape, _stored(array.dtype))
        if is_new:
            self.write(buffer, array)
        return buffer

    def missing_samples(self, array: HostArray) -> int:
        return 0 if self.shares_samples and _identity(array) in self._gpu.samples else _stored_bytes(array)

    def exchange(self, buffer: DeviceArray, *, direct: bool = False) -> Exchange:
        return (DirectExchange if direct else PinnedExchange)(self._heap, buffer)

    def staging(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Staging:
        return PinnedStaging(self._heap, self.empty(shape, _stored(np.dtype(dtype)), SAMPLES))

    def room_for_data(self) -> int | None:
        free, total = cuda.mem_get_info()
        return max(0, int(free - total * _RESERVE) // self._sharers)

    def step_scope(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    # Batches

    def gather(self, x_NF: DeviceArray, rows_B: DeviceArray, scale: float, offset: float, out_BF: DeviceArray) -> None:
        kernel, features = f"gather_{_NAMES[x_NF.dtype]}", count(out_BF.shape[1:])
        if x_NF.dtype.itemsize == 1 and features % 4 == 0 and x_NF.pointer % 4 == 0 and out_BF.pointer % 16 == 0:
            kernel, features = f"{kernel}_quads", features // 4
        self._gather(kernel, features, x_NF, rows_B, out_BF, float(scale), float(offset))

    def gather_targets(self, y_N: DeviceArray, rows_B: DeviceArray, out_B: DeviceArray) -> None:
        _same_dtype(y_N, out_B)
        self._gather(f"gather_bytes_{y_N.dtype.itemsize}", count(out_B.shape[1:]), y_N, rows_B, out_B)

    def _gather(
        self, kernel: str, features: int, x: DeviceArray, rows: DeviceArray, out: DeviceArray, *scaling: float
    ) -> None:
        """Launch a thread for each row of `rows` and each of `features`, which are what the kernel takes them for."""
        if rows.dtype != np.int64:
            raise TypeError(f"row numbers are int64, not {rows.dtype}")
        if out.size == 0:
            return
        threads = min(_THREADS, _up(features, 32))
        grid = (out.shape[0], _up(features, threads) // threads)
        self._launch(
            kernel, grid, (threads, 1, 1), x.pointer, rows.pointer, out.pointer, *scaling, x.shape[0], features
        )

    # Layers

    def dense_forward(
        self, x_BI: DeviceArray, kernel_IO: DeviceArray, bias_O: DeviceArray | None, activation: str, y_BO: DeviceArray
    ) -> None:
        rows, outputs = y_BO.shape
        fused = activation if activation in FUSED_ACTIVATIONS else "linear"
        self._product("nn", x_BI, kernel_IO, bias_O, y_BO, (rows, outputs, kernel_IO.shape[0]), fused)
        if fused != activation:
            self.activation_forward(y_BO, activation, y_BO)

    def dense_backward(
        self,
        x_BI: DeviceArray,
        kernel_IO: DeviceArray,
        y_BO: DeviceArray,
        dy_BO: DeviceArray,
        activation: str,
        dkernel_IO: DeviceArray | None,
        dbias_O: DeviceArray | None,
        dx_BI: DeviceArray | None,
    ) -> None:
        rows, outputs = y_BO.shape
        inputs = kernel_IO.shape[0]
        if activation == "softmax" or dbias_O is None:
            if activation != "linear":
                self.activation_backward(y_BO, dy_BO, activation, dy_BO)
            activation = "linear"
        if dbias_O is not None:
            self._bias_gradient(y_BO, dy_BO, activation, dbias_O)
        if dkernel_IO is not None:
            self._product("tn", x_BI, dy_BO, None, dkernel_IO, (inputs, outputs, rows), "linear")
        if dx_BI is not None:
            self._product("nt", dy_BO, kernel_IO, None, dx_BI, (rows, inputs, outputs), "linear")

    def _bias_gradient(self, y_BO: DeviceArray, dy_BO: DeviceArray, activation: str, dbias_O: DeviceArray) -> None:
        """dy *= activation'(y), dbias = sum of dy over rows."""
        rows, outputs = dy_BO.shape
        parts = max(1, _up(rows, _GRADIENT_ROWS) // _GRADIENT_ROWS)
        partials = dbias_O.pointer if parts == 1 else self._scratch(parts * outputs * 4)
        self._launch(
            "dense_gradient",
            (_up(outputs, 32) // 32, parts),
            (32, 8, 1),
            y_BO.pointer,
            dy_BO.pointer,
            partials,
            rows,
            outputs,
            ACTIVATION_NUMBERS[activation],
            DEFAULT_ALPHA.get(activation, 0.0),
        )
        if parts > 1:
            self._elementwise("sum_partials", outputs, partials, dbias_O.pointer, outputs, parts)

    def _product(
        self,
        layout: str,
        a: DeviceArray,
        b: DeviceArray,
        bias_N: DeviceArray | None,
        c_MN: DeviceArray,
        sizes: tuple[int, int, int],
        activation: str,
    ) -> None:
        """c = activation(op(a) op(b) + bias); see `Gemm.product`."""
        assert self.gemm is not None, "the backend is closed"
        self._gpu.enter()  # a library queues on the stream's handle
        self.gemm.product(layout, a.pointer, b.pointer, _pointer(bias_N), c_MN.pointer, sizes, activation)

    def activation_forward(
        self, x_BF: DeviceArray, activation: str, y_BF: DeviceArray, alpha: float | None = None
    ) -> None:
        if activation == "softmax":
            self._by_rows("softmax_forward", x_BF, x_BF.pointer, y_BF.pointer)
        else:
            self._activation("activation_forward", activation, alpha, x_BF.size, x_BF.pointer, y_BF.pointer)

    def activation_backward(
        self,
        y_BF: DeviceArray,
        dy_BF: DeviceArray,
        activation: str,
        dx_BF: DeviceArray,
        alpha: float | None = None,
    ) -> None:
        pointers = (y_BF.pointer, dy_BF.pointer, dx_BF.pointer)
        if activation == "softmax":
            self._by_rows("softmax_backward", y_BF, *pointers)
        else:
            self._activation("activation_backward", activation, alpha, y_BF.size, *pointers)

    def _activation(self, kernel: str, activation: str, alpha: float | None, size: int, *pointers: int) -> None:
        alpha = DEFAULT_ALPHA.get(activation, 0.0) if alpha is None else alpha
        self._elementwise(kernel, size, *pointers, size, ACTIVATION_NUMBERS[activation], alpha)

    def affine(self, x_BF: DeviceArray, scale: float, offset: float, y_BF: DeviceArray) -> None:
        self._elementwise("affine", x_BF.size, x_BF.pointer, y_BF.pointer, x_BF.size, scale, offset)

    def dropout_mask(self, rate: float, seed: int, step: int, layer: int, first_row: int, mask_BF: DeviceArray) -> None:
        B, F = mask_BF.shape
        self._elementwise(
            "dropout_mask",
            B * (_up(F, 8) // 8),
            mask_BF.pointer,
            B,
            F,
            int(rate * 2**32),
            1 / (1 - rate),
            seed,
            int(Purpose.DROPOUT),
            step,
            layer,
            first_row,
        )

    def copy(self, source: DeviceArray, out: DeviceArray) -> None:
        _same_dtype(source, out)
        if out.size and out.pointer != source.pointer:
            cuda.memcpy_dtod_async(out.pointer, source.pointer, out.nbytes, self._streams.ops)

    # Batch normalization

    def batch_sums(self, x_BF: DeviceArray, sums_F: DeviceArray) -> None:
        self._batch_sums("batch_sums", x_BF, x_BF.pointer, sums=sums_F)

    def batch_squares(self, x_BF: DeviceArray, totals_F1: DeviceArray, squares_F: DeviceArray) -> None:
        self._batch_sums("batch_squares", x_BF, x_BF.pointer, totals_F1.pointer, sums=squares_F)

    def batch_statistics(
        self,
        totals_F1: DeviceArray,
        squares_F: DeviceArray,
        momentum: float,
        moving_mean_F: DeviceArray,
        moving_variance_F: DeviceArray,
        mean_F: DeviceArray,
        variance_F: DeviceArray,
    ) -> None:
        self._elementwise(
            *("batch_statistics", mean_F.size, totals_F1.pointer, squares_F.pointer, momentum, 1 - momentum),
            *(moving_mean_F.pointer, moving_variance_F.pointer, mean_F.pointer, variance_F.pointer, mean_F.size),
        )

    def batch_normalize(
        self,
        x_BF: DeviceArray,
        mean_F: DeviceArray,
        variance_F: DeviceArray,
        gamma_F: DeviceArray | None,
        beta_F: DeviceArray | None,
        epsilon: float,
        y_BF: DeviceArray,
    ) -> None:
        self._elementwise(
            *("batch_normalize", x_BF.size, x_BF.pointer, mean_F.pointer, variance_F.pointer),
            *(_pointer(gamma_F), _pointer(beta_F), epsilon, y_BF.pointer, x_BF.size, x_BF.shape[1]),
        )

    def batch_gradient_sums(
        self,
        x_BF: DeviceArray,
        dy_BF: DeviceArray,
        mean_F: DeviceArray,
        variance_F: DeviceArray,
        epsilon: float,
        sums_2F: DeviceArray,
        dgamma_F: DeviceArray | None,
        dbeta_F: DeviceArray | None,
    ) -> None:
        arguments = (x_BF.pointer, dy_BF.pointer, mean_F.pointer, variance_F.pointer, epsilon)
        self._batch_sums("batch_gradient_sums", x_BF, *arguments, sums=sums_2F, first=dbeta_F, second=dgamma_F)

    def _batch_sums(
        self,
        kernel: str,
        x_BF: DeviceArray,
        *arguments: Any,
        sums: DeviceArray,
        first: DeviceArray | None = None,
        second: DeviceArray | None = None,
    ) -> None:
        """Sum columns over parts of the rows, then over the parts; `first` and `second` get a copy, F columns each."""
        if sums.dtype != np.float64:
            raise TypeError(f"{kernel} sums in float64, not {sums.dtype}")
        B, F = x_BF.shape
        parts = max(1, _up(B, _BATCH_ROWS) // _BATCH_ROWS)
        partials = self._scratch(parts * sums.size * 8)
        grid = (_up(F, _BATCH_COLUMNS) // _BATCH_COLUMNS, parts)
        self._launch(kernel, grid, (_BATCH_COLUMNS, 8, 1), *arguments, partials, B, F)
        pointers = (partials, sums.pointer, _pointer(first), _pointer(second))
        self._elementwise("batch_totals", sums.size, *pointers, F, sums.size, parts)

    def batch_normalize_backward(
        self,
        x_BF: DeviceArray,
        dy_BF: DeviceArray,
        mean_F: DeviceArray,
        variance_F: DeviceArray,
        gamma_F: DeviceArray | None,
        epsilon: float,
        sums_2F: DeviceArray | None,
        totals_F1: DeviceArray | None,
        dx_BF: DeviceArray,
    ) -> None:
        self._elementwise(
            *("batch_normalize_backward", x_BF.size, x_BF.pointer, dy_BF.pointer, mean_F.pointer, variance_F.pointer),
            *(_pointer(gamma_F), epsilon, _pointer(sums_2F), _pointer(totals_F1), dx_BF.pointer),
            *(x_BF.size, x_BF.shape[1]),
        )

    # Losses

    def softmax_cross_entropy(
        self,
        logits_BC: DeviceArray,
        labels_B: DeviceArray,
        weights_B: DeviceArray | None,
        ignored: int | None,
        dlogits_BC: DeviceArray | None,
        values_B: DeviceArray,
        correct_B: DeviceArray | None,
    ) -> None:
        self._by_rows(
            "softmax_cross_entropy",
            logits_BC,
            logits_BC.pointer,
            labels_B.pointer,
            _pointer(weights_B),
            _NO_LABEL if ignored is None else ignored,
            _pointer(dlogits_BC),
            values_B.pointer,
            _pointer(correct_B),
        )

    def dense_cross_entropy(
        self,
        logits_BC: DeviceArray,
        target_BC: DeviceArray,
        keep: float,
        shift: float,
        weights_B: DeviceArray | None,
        dlogits_BC: DeviceArray | None,
        values_B: DeviceArray,
    ) -> None:
        self._by_rows(
            "dense_cross_entropy",
            logits_BC,
            logits_BC.pointer,
            target_BC.pointer,
            keep,
            shift,
            _pointer(weights_B),
            _pointer(dlogits_BC),
            values_B.pointer,
        )

    def probability_cross_entropy(
        self,
        y_BC: DeviceArray,
        target: DeviceArray,
        keep: float,
        shift: float,
        ignored: int | None,
        weights_B: DeviceArray | None,
        dy_BC: DeviceArray | None,
        values_B: DeviceArray,
    ) -> None:
        labels, values = (target.pointer, 0) if target.dtype == np.int64 else (0, target.pointer)
        self._by_rows(
            "probability_cross_entropy",
            y_BC,
            y_BC.pointer,
            labels,
            values,
            keep,
            shift,
            _NO_LABEL if ignored is None else ignored,
            _pointer(weights_B),
            _pointer(dy_BC),
            values_B.pointer,
        )

    def pointwise_loss(
        self,
        kind: str,
        parameter: float,
        y_BF: DeviceArray,
        target_BF: DeviceArray,
        keep: float,
        shift: float,
        weights_B: DeviceArray | None,
        dy_BF: DeviceArray | None,
        values_B: DeviceArray,
    ) -> None:
        self._by_rows(
            "pointwise_loss",
            y_BF,
            y_BF.pointer,
            target_BF.pointer,
            POINTWISE.index(kind),
            parameter,
            keep,
            shift,
            _pointer(weights_B),
            _pointer(dy_BF),
            values_B.pointer,
        )

    # Metrics: a value for each row, then their sum in a fixed order

    def highest(self, scores_BC: DeviceArray, places_B: DeviceArray) -> None:
        self._by_rows("highest", scores_BC, scores_BC.pointer, places_B.pointer)

    def top1_correct(self, scores_BC: DeviceArray, labels_B: DeviceArray, values_B: DeviceArray) -> None:
        self._by_rows("top1_correct", scores_BC, scores_BC.pointer, labels_B.pointer, values_B.pointer)

    def label_in_top(self, scores_BC: DeviceArray, labels_B: DeviceArray, k: int, values_B: DeviceArray) -> None:
        self._by_rows("label_in_top", scores_BC, scores_BC.pointer, labels_B.pointer, k, values_B.pointer)

    def confusion(
        self,
        y_BF: DeviceArray,
        target_BF: DeviceArray,
        threshold: float,
        both_B: DeviceArray,
        predicted_B: DeviceArray,
        missed_B: DeviceArray,
    ) -> None:
        counts = (both_B.pointer, predicted_B.pointer, missed_B.pointer)
        self._by_rows("confusion", y_BF, y_BF.pointer, target_BF.pointer, threshold, *counts)

    def labels_other_than(self, labels_B: DeviceArray, ignored: int, values_B: DeviceArray) -> None:
        B = labels_B.size
        self._elementwise("labels_other_than", B, labels_B.pointer, ignored, values_B.pointer, B)

    def sum_rows(self, *sums: RowSum) -> None:
        if len({one.values.size for one in sums}) > 1:
            raise ValueError("sums over different numbers of rows")
        for begin in range(0, len(sums), 2):
            pair = sums[begin : begin + 2]
            pointers = [_pointer(buffer) for one in pair for buffer in one]
            blocks = 4 if len(pair) == 2 else 1 if pair[0].weight is None else 2
            B = pair[0].values.size
            if B:
                pointers += [0] * (8 - len(pointers))
                self._launch("sum_rows", (blocks, 1), (_THREADS, 1, 1), *pointers, B)

    def add_totals(self, tail: DeviceArray, totals: DeviceArray) -> None:
        self._elementwise("add_totals", tail.size, tail.pointer, totals.pointer, tail.size)

    def custom(self, op: Op, buffers: Sequence[DeviceArray], numbers: Mapping[str, Any]) -> None:
        launch = op.launch(buffers, numbers)
        if 0 in launch.grid:
            return
        stream = self._streams.ops
        kernel = self._own_kernels.get(op)
        if kernel is None:
            kernel = self._own_kernels[op] = load_own_kernel(self._gpu, op)
        arguments = [one.pointer if isinstance(one, DeviceArray) else one for one in launch.arguments]
        try:
            kernel.prepared_async_call(launch.grid, launch.block, stream, *arguments, shared_size=launch.shared)
        except Exception as error:  # PyCUDA packs arguments by a struct module of its own, with errors of its own
            raise DeviceError(
                f"op {op.name!r}: kernel {op.kernel!r} does not launch on grid {launch.grid}, block {launch.block}, "
                f"arguments {op.arguments!r}: {error}"
            ) from error

    # Flat buffers

    def sum(self, x: DeviceArray, total: DeviceArray) -> None:
        self._sum_flat("sum", x, total)

    def squared_norm(self, x: DeviceArray, total: DeviceArray) -> None:
        self._sum_flat("squared_norm", x, total)

    def regularize(
        self,
        params_P: DeviceArray,
        grads_P: DeviceArray | None,
        weight: DeviceArray,
        l1: float,
        l2: float,
        total: DeviceArray,
    ) -> None:
        pointers = (params_P.pointer, _pointer(grads_P), weight.pointer)
        self._sum_flat("regularize", params_P, total, pointers, (l1, l2))

    def count_nonfinite(self, x: DeviceArray, total: DeviceArray) -> None:
        self._sum_flat("count_nonfinite", x, total)

    def _sum_flat(
        self,
        kernel: str,
        x: DeviceArray,
        total: DeviceArray,
        pointers: tuple[int, ...] = (),
        numbers: tuple[float, ...] = (),
    ) -> None:
        if x.dtype != np.float32 or total.dtype != np.float64:
            raise TypeError(f"{kernel} adds float32 to float64, not {x.dtype} to {total.dtype}")
        if x.size == 0:
            return
        chunks = _up(x.size, _SUM_CHUNK) // _SUM_CHUNK
        partials = self._scratch(chunks * 8)
        arguments = (*(pointers or (x.pointer,)), partials, x.size, _SUM_CHUNK, *numbers)
        self._launch(kernel, (min(chunks, _BLOCKS), 1), (256, 1, 1), *arguments)
        self._launch("sum_chunks", (1, 1), (256, 1, 1), partials, total.pointer, chunks)

    def fill(self, buffer: DeviceArray, value: float) -> None:
        self._elementwise(f"fill_{_NAMES[buffer.dtype]}", buffer.size, buffer.pointer, buffer.size, value)

    def add(self, source: DeviceArray, out: DeviceArray) -> None:
        kernel = f"add_{_NAMES[source.dtype]}"
        if source.dtype != out.dtype:
            kernel += f"_{_NAMES[out.dtype]}"
        self._elementwise(kernel, out.size, source.pointer, out.pointer, out.size)

    def axpby(self, a: float, x: DeviceArray, b: float, y: DeviceArray, out: DeviceArray) -> None:
        self._elementwise("axpby", out.size, x.pointer, y.pointer, out.pointer, out.size, a, b)

    def multiply(self, a: DeviceArray, b: DeviceArray, out: DeviceArray) -> None:
        self._binary("multiply", a, b, out)

    def divide(self, a: DeviceArray, b: DeviceArray, out: DeviceArray) -> None:
        self._binary("divide", a, b, out)

    def maximum(self, a: DeviceArray, b: DeviceArray, out: DeviceArray) -> None:
        self._binary("maximum", a, b, out)

    def minimum(self, a: DeviceArray, b: DeviceArray, out: DeviceArray) -> None:
        self._binary("minimum", a, b, out)

    def clip(self, x: DeviceArray, low: float, high: float, out: DeviceArray) -> None:
        self._elementwise("clip", out.size, x.pointer, out.pointer, out.size, low, high)

    def absolute(self, x: DeviceArray, out: DeviceArray) -> None:
        self._elementwise("absolute", out.size, x.pointer, out.pointer, out.size)

    def sign(self, x: DeviceArray, out: DeviceArray) -> None:
        self._elementwise("sign", out.size, x.pointer, out.pointer, out.size)

    def sqrt(self, x: DeviceArray, out: DeviceArray) -> None:
        self._elementwise("square_root", out.size, x.pointer, out.pointer, out.size)

    def clip_divisors(self, squares_E: DeviceArray, weight: DeviceArray, limit: float, divisors_E: DeviceArray) -> None:
        E = divisors_E.size
        self._elementwise("clip_divisors", E, squares_E.pointer, weight.pointer, divisors_E.pointer, E, limit)

    def _binary(self, kernel: str, a: DeviceArray, b: DeviceArray, out: DeviceArray) -> None:
        """Launch a kernel of two operands, of which the second may have one element for all."""
        if b.size not in (1, out.size):
            raise ValueError(f"{kernel}: the second operand has {b.size} elements, expected {out.size} or 1")
        step = 0 if b.size == 1 else 1
        self._elementwise(kernel, out.size, a.pointer, b.pointer, out.pointer, out.size, step)

    def adam(
        self,
        params_P: DeviceArray,
        grads_P: DeviceArray,
        momentum_P: DeviceArray,
        velocity_P: DeviceArray,
        weight: DeviceArray,
        alpha: float,
        beta_1: float,
        beta_2: float,
        epsilon: float,
    ) -> None:
        self._elementwise(
            "adam",
            params_P.size,
            params_P.pointer,
            grads_P.pointer,
            momentum_P.pointer,
            velocity_P.pointer,
            weight.pointer,
            params_P.size,
            alpha,
            1 - beta_1,
            1 - beta_2,
            epsilon,
        )

    def rmsprop(
        self,
        params_P: DeviceArray,
        grads_P: DeviceArray,
        velocity_P: DeviceArray,
        weight: DeviceArray,
        learning_rate: float,
        rho: float,
        epsilon: float,
    ) -> None:
        self._elementwise(
            "rmsprop",
            params_P.size,
            params_P.pointer,
            grads_P.pointer,
            velocity_P.pointer,
            weight.pointer,
            params_P.size,
            learning_rate,
            rho,
            1 - rho,
            epsilon,
        )

    def sgd(
        self,
        params_P: DeviceArray,
        grads_P: DeviceArray,
        momentum_P: DeviceArray | None,
        weight: DeviceArray,
        learning_rate: float,
        momentum: float,
    ) -> None:
        self._elementwise(
            "sgd",
            params_P.size,
            params_P.pointer,
            grads_P.pointer,
            _pointer(momentum_P),
            weight.pointer,
            params_P.size,
            learning_rate,
            momentum,
        )

    # Helpers

    def _launch(self, kernel: str, grid: tuple[int, ...], block: tuple[int, int, int], *arguments: Any) -> None:
        stream = self._streams.ops
        self._kernels[kernel].prepared_async_call(grid, block, stream, *arguments)

    def _elementwise(self, kernel: str, size: int, *arguments: Any) -> None:
        """Launch a kernel that loops over `size` elements."""
        if size:
            self._launch(kernel, (min(_up(size, _THREADS) // _THREADS, _BLOCKS), 1), (_THREADS, 1, 1), *arguments)

    def _by_rows(self, kernel: str, rows_of: DeviceArray, *arguments: float) -> None:
        """Launch a kernel that gives each row of the last axis a warp; it takes their number and length last."""
        if rows_of.size:
            columns = rows_of.shape[-1]
            rows = rows_of.size // columns
            self._launch(kernel, (_up(rows, _ROWS) // _ROWS, 1), (_ROWS * 32, 1, 1), *arguments, rows, columns)

    def _scratch(self, nbytes: int) -> int:
        """Return the address of memory for one op's intermediate results; the next op overwrites it."""
        if self._workspace is None or self._workspace.nbytes < nbytes:
            if self._workspace is not None:
                self._workspace.free()
            self._workspace = DeviceMemory(self._heap, nbytes, "scratch of ops")
        return self._workspace.pointer

    def _wait(self) -> None:
        self._streams.ops.synchronize()


def _stored(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The type on the device of samples: types that no kernel reads become the next one that holds their values."""
    if dtype.name in GATHERED:
        return dtype.newbyteorder("=")
    return np.dtype({"bool": np.uint8, "float16": np.float32}.get(dtype.name, np.float64))


def _stored_bytes(array: HostArray) -> int:
    return int(array.size * _stored(array.dtype).itemsize)


def _identity(array: HostArray) -> tuple[Any, ...]:
    """Return what tells an array apart from all others that are alive."""
    return array.ctypes.data, array.shape, array.strides, array.dtype.str


def _pointer(buffer: DeviceArray | None) -> int:
    """The address of a buffer, 0 for none."""
    return 0 if buffer is None else buffer.pointer


def _up(number: int, step: int) -> int:
    """The next multiple of `step`."""
    return -(-number // step) * step


def _same_dtype(source: DeviceArray, out: DeviceArray) -> None:
    if source.dtype != out.dtype:
        raise TypeError(f"cannot copy {source.dtype} to {out.dtype} without a cast")
