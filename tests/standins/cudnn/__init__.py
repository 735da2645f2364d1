"""A stand-in for NVIDIA's `cudnn` (nvidia-cudnn-frontend) that computes convolutions in NumPy.

It knows only what tensors, graphs and calls say: lengths, strides, paddings and types, so that a wrong one gives wrong
numbers or an error. It is stricter than the library: a graph must be made in the documented order; strides must be
those of a dense (N, H, W, C) or, of filters, (K, R, S, C); the number of places must follow from the paddings; every
buffer, and the whole workspace, must lie within one allocation; of a plan's workspace it leaves nothing as it was at
the ends. Calls are queued on the handle's stream, and graphs can hold them.

Plans have the notes that real ones have: the first of each graph is not deterministic, the second uses tensor cores
(TF32, where the types are float32), the third is in slices that need workspace; all give different bits. Of filters of
other than 3 x 3 there is no gradient by the second. `UNSUPPORTED` refuses problems, for tests of what follows.
"""

import itertools
import math
from enum import Enum
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np

from tests.standins.driver import Driver
from tests.tolerances import tf32


class data_type(Enum):  # noqa: N801 - the library's names, as those that follow
    FLOAT = 1
    HALF = 3
    BFLOAT16 = 10
    NOT_SET = 0


class heur_mode(Enum):  # noqa: N801
    A = 0
    B = 1
    FALLBACK = 2


class numerical_note(Enum):  # noqa: N801
    TENSOR_CORE = 1
    DOWN_CONVERT_INPUTS = 2
    REDUCED_PRECISION_REDUCTION = 3
    FFT = 4
    NONDETERMINISTIC = 5
    WINOGRAD = 6
    WINOGRAD_TILE_4x4 = 7
    WINOGRAD_TILE_6x6 = 8
    WINOGRAD_TILE_13x13 = 9


class cudnnGraphNotSupportedError(Exception):  # noqa: N801
    pass


# Strides of convolutions that this "version" has no plan for.
UNSUPPORTED = {(5, 5)}
_TYPES = {"FLOAT": np.dtype(np.float32), "HALF": np.dtype(np.float16), "BFLOAT16": np.dtype(ml_dtypes.bfloat16)}
# What tests look at: live handles, and notes of the plans that were executed.
live: list["Handle"] = []
executed: list[tuple[str, frozenset[str]]] = []


class Handle:
    def __init__(self) -> None:
        self.stream = 0


def create_handle() -> Handle:
    live.append(Handle())
    return live[-1]


def destroy_handle(handle: Handle) -> None:
    live.remove(handle)
    if not live:
        _driver.release()


def set_stream(handle: Handle, stream: int) -> None:
    assert handle in live
    handle.stream = stream


def backend_version() -> int:
    return 0


class Tensor:
    def __init__(self, dim: list[int], stride: list[int], dtype: Any, uid: int | None) -> None:
        self.dim, self.stride, self.dtype, self.uid, self.output = list(dim), list(stride), dtype, uid, False

    def set_output(self, value: bool) -> "Tensor":
        self.output = value
        return self

    def set_data_type(self, dtype: Any) -> "Tensor":
        self.dtype = dtype
        return self

    def set_dim(self, dim: list[int]) -> "Tensor":
        self.dim = list(dim)
        return self

    def set_stride(self, stride: list[int]) -> "Tensor":
        self.stride = list(stride)
        return self

    def set_uid(self, uid: int) -> "Tensor":
        self.uid = uid
        return self

    @property
    def kind(self) -> "np.dtype[Any]":
        return _TYPES[self.dtype.name]

    @property
    def span(self) -> int:
        """Bytes from the first element to the last."""
        last = sum((n - 1) * step for n, step in zip(self.dim, self.stride, strict=True))
        return (last + 1) * self.kind.itemsize

    def check(self, *, dense: bool) -> None:
        _, c, h, w = self.dim
        batch, channel, row, column = self.stride
        packed = channel == 1 and column == c and row >= w * c and batch >= h * row
        if min(self.dim) < 1 or not packed or (dense and (row, batch) != (w * c, h * w * c)):
            raise cudnnGraphNotSupportedError(f"the stand-in knows no layout {self.dim} by {self.stride}")


class pygraph:  # noqa: N801
    def __init__(
        self,
        name: str = "test_graph",
        io_data_type: Any = None,
        intermediate_data_type: Any = None,
        compute_data_type: Any = None,
        handle: Any = None,
    ) -> None:
        if handle not in live or compute_data_type is not data_type.FLOAT:
            raise ValueError("not a live handle and sums in float32")
        self._node: Any = None
        self._tensors: list[Tensor] = []
        self._done: list[str] = []
        self._plans: list[tuple[frozenset[str], int]] = []

    def tensor(
        self, dim: Any, stride: Any = None, data_type: Any = None, name: str = "", uid: int | None = None
    ) -> Tensor:
        self._tensors.append(Tensor(dim, stride, data_type, uid))
        return self._tensors[-1]

    def conv_fprop(self, image: Tensor, weight: Tensor, **options: Any) -> Tensor:
        return self._noted("fprop", {"image": image, "filter": weight}, "places", options)

    def conv_dgrad(self, loss: Tensor, filter: Tensor, **options: Any) -> Tensor:
        return self._noted("dgrad", {"places": loss, "filter": filter}, "image", options)

    def conv_wgrad(self, image: Tensor, loss: Tensor, **options: Any) -> Tensor:
        return self._noted("wgrad", {"image": image, "places": loss}, "filter", options)

    def _noted(self, way: str, tensors: dict[str, Tensor], output: str, options: dict[str, Any]) -> Tensor:
        known_options = {"pre_padding", "post_padding", "stride", "dilation", "compute_data_type", "name"}
        if options.keys() - known_options:
            raise TypeError(f"{way}() got unexpected arguments {sorted(options.keys() - known_options)}")
        result = Tensor([], [], data_type.NOT_SET, None)
        self._node = SimpleNamespace(
            way=way, tensors={**tensors, output: result}, operands=list(tensors), result_name=output, **options
        )
        self._tensors.append(result)
        return result

    def _after(self, *steps: str) -> None:
        if tuple(self._done) != steps:
            raise RuntimeError(f"called after {self._done} instead of {steps}")

    def validate(self) -> None:
        self._after()
        node, tensors = self._node, self._node.tensors
        for name, tensor in tensors.items():
            tensor.check(dense=name == "filter")
        if (
            tensors[node.result_name].span
            != math.prod(tensors[node.result_name].dim) * tensors[node.result_name].kind.itemsize
        ):
            raise ValueError("nothing would be written between the rows of what is made")
        if len({tensor.uid for tensor in self._tensors}) != 3 or not tensors[node.result_name].output:
            raise ValueError("three tensors with numbers of their own, one of them an output")
        (b, i, *image), (b_too, o, *places), (o_too, i_too, *size) = (
            tensors[name].dim for name in ("image", "places", "filter")
        )
        actual = [
            (image[n] + node.pre_padding[n] + node.post_padding[n] - ((size[n] - 1) * node.dilation[n] + 1))
            // node.stride[n]
            + 1
            for n in range(2)
        ]
        if (b, i, o) != (b_too, i_too, o_too) or actual != places or min(node.pre_padding + node.post_padding) < 0:
            raise ValueError(f"{actual} places instead of {places}: {[tensor.dim for tensor in tensors.values()]}")
        if (
            len({tensors[name].dtype for name in node.operands}) != 1
            or tensors[node.result_name].dtype is not data_type.FLOAT
        ):
            raise cudnnGraphNotSupportedError("operands of one type and results in float32")
        self._done.append("validated")

    def build_operation_graph(self) -> None:
        self._after("validated")
        self._done.append("built")

    def create_execution_plans(self, heuristics: list[Any] | None = None) -> None:
        self._after("validated", "built")
        assert heuristics == [heur_mode.A, heur_mode.FALLBACK]
        if tuple(self._node.stride) not in UNSUPPORTED:
            names = [["NONDETERMINISTIC"], ["WINOGRAD"], ["TENSOR_CORE"], []]
            elements = math.prod(self._node.tensors["filter"].dim[2:])
            self._plans = [(frozenset(note_names), 4096 * number * elements) for number, note_names in enumerate(names)]
            self._plans.append((frozenset(), 1 << 40))
        self._done.append("planned")

    def deselect_numeric_notes(self, notes: list[Any]) -> "pygraph":
        self._after("validated", "built", "planned")
        refused = {numerical_note(note).name for note in notes}
        self._plans = [plan for plan in self._plans if not plan[0] & refused]
        return self

    def deselect_workspace_greater_than(self, workspace_limit: int) -> "pygraph":
        self._plans = [plan for plan in self._plans if plan[1] <= workspace_limit]
        return self

    def check_support(self) -> None:
        self._after("validated", "built", "planned")
        if not self._plans:
            raise cudnnGraphNotSupportedError("no plan")
        self._done.append("supported")

    def build_plans(self) -> None:
        self._after("validated", "built", "planned", "supported")
        self._done.append("ready")

    def get_workspace_size(self) -> int:
        assert self._done[-1] == "ready"
        return self._plans[0][1]

    def execute(self, tensor_dict: dict[int, int], workspace: int | None = None, handle: Any = None) -> None:
        assert self._done[-1] == "ready"
        if handle not in live or type(workspace) is not int:
            raise ValueError("a live handle, and the address of a workspace")
        node, (notes, nbytes) = self._node, self._plans[0]
        executed.append((node.way, notes))
        if nbytes:
            _driver.range("the workspace", workspace, nbytes)
        flats, reads = dict[str, Any](), dict[int, Any]()
        for name, tensor in node.tensors.items():
            address = tensor_dict[tensor.uid]
            if address % 16:
                raise ValueError(f"{name} at {address:#x} is not aligned to 16 bytes")
            _driver.range(name, address, tensor.span)
            if name in node.operands:
                if address not in reads:
                    reads[address] = _driver.host(tensor.span // tensor.kind.itemsize, tensor.kind)
                flats[name] = reads[address]
        output = node.tensors[node.result_name]
        result = _driver.host(math.prod(output.dim), np.float32)
        rounds = "TENSOR_CORE" in notes and node.tensors[node.operands[0]].dtype is data_type.FLOAT

        def compute() -> Any:
            arrays = {name: _array(flat, node.tensors[name]) for name, flat in flats.items()}
            if rounds:
                arrays = {name: tf32(array.astype(np.float32)) for name, array in arrays.items()}
            return _computed(node, {name: array.astype(np.float64) for name, array in arrays.items()}).reshape(-1)

        _driver.queue(handle.stream, reads, compute, tensor_dict[output.uid], result, (workspace, nbytes))


def _array(flat: Any, tensor: Tensor) -> Any:
    """Return (N, H, W, C) of memory."""
    n, c, h, w = tensor.dim
    batch, channel, row, column = (step * flat.itemsize for step in tensor.stride)
    return np.lib.stride_tricks.as_strided(flat, (n, h, w, c), (batch, row, column, channel))


def _computed(node: Any, arrays: dict[str, Any]) -> Any:
    """Return what a node makes as (N, H, W, C), term by term."""
    shapes = {name: (tensor.dim[0], *tensor.dim[2:], tensor.dim[1]) for name, tensor in node.tensors.items()}
    result = np.zeros(shapes[node.result_name])
    B, H, W, I = shapes["image"]  # noqa: E741
    _, P, Q, _ = shapes["places"]
    before, behind = node.pre_padding, node.post_padding
    padded = np.zeros((B, H + before[0] + behind[0], W + before[1] + behind[1], I))
    inside = padded[:, before[0] : before[0] + H, before[1] : before[1] + W]
    if "image" in arrays:
        inside[...] = arrays["image"]
    for r, s in itertools.product(*(range(n) for n in shapes["filter"][1:3])):
        rows, columns = (
            slice(at * node.dilation[n], at * node.dilation[n] + (count - 1) * node.stride[n] + 1, node.stride[n])
            for n, (at, count) in enumerate(((r, P), (s, Q)))
        )
        window = padded[:, rows, columns]
        if node.way == "fprop":
            result += window @ arrays["filter"][:, r, s].T
        elif node.way == "wgrad":
            result[:, r, s] = np.einsum("bpqo,bpqi->oi", arrays["places"], window)
        else:
            window += arrays["places"] @ arrays["filter"][:, r, s]
    return inside if node.way == "dgrad" else result


_driver = Driver(RuntimeError)
