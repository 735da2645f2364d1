"""Convolutions and their gradients by NVIDIA's cuDNN through its Python frontend, an optional provider (`--conv`).

**Convolutions have run only against a stand-in for `cudnn` (tests/standins), never on hardware.** Names and arguments
were compared with nvidia-cudnn-frontend 1.32.

cuDNN names axes (N, C, H, W) and takes strides for their layout: images (B, H, W, I) as here, and kernels
(O, R, S, I), in which order `providers` stores them. Zeros behind an image, which our windows do not mention, follow
from the sizes. If the last window ends a stride or more before the image, cuDNN gets a smaller image in the same
memory; it would not write the rest of that image's gradient, so those gradients stay ours.

A graph with its execution plan is built once for each problem. Only plans are taken that

- give the same bits at every run (no NONDETERMINISTIC),
- multiply and add as a matrix product does: no Winograd or Fourier transform, no sums or factors in fewer bits than
  requested, and in float32 no tensor cores (which compute in TF32),
- need at most `WORKSPACE_BYTES`.

The first of those plans depends on the GPU and on cuDNN's version, which is part of `numerics`. A problem without a
plan stays with our kernels, on every GPU of that kind.

The only module that imports cudnn. Source: cuDNN frontend, "Convolutions" and "Graphs"; NVIDIA's developer
documentation.
"""

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

from dptrain.backend.cuda.libraries.providers import Problem
from dptrain.errors import ConfigError, DeviceError
from dptrain.runtime.extras import pip_install
from dptrain.runtime.types import TYPES

# Limit of a plan's workspace: kernels' gradients in slices take some MB each.
WORKSPACE_BYTES = 256 * 2**20
# Notes of plans that compute anything but a matrix product in the requested precision.
_REFUSED = ("NONDETERMINISTIC", "DOWN_CONVERT_INPUTS", "REDUCED_PRECISION_REDUCTION", "FFT", "WINOGRAD")
_TILES = ("WINOGRAD_TILE_4x4", "WINOGRAD_TILE_6x6", "WINOGRAD_TILE_13x13")
_FIRST, _SECOND, _MADE = 1, 2, 3


def why_not() -> str:
    """Return why cuDNN is unusable in this process, or an empty string if it seems usable."""
    try:
        import cudnn

        cudnn.backend_version()
    except ImportError as error:
        return f"nvidia-cudnn-frontend is not installed ({error}); {pip_install('cudnn')}"
    except Exception as error:  # the frontend has an error class for each reason
        return f"the library does not load ({error})"
    return ""


class _Plan(NamedTuple):
    """cuDNN's graph of one problem, and the bytes of workspace that it needs."""

    graph: Any
    workspace: int


class Layout(NamedTuple):
    """A tensor for cuDNN: lengths of the axes (N, C, H, W), and the stride of each in elements."""

    dim: list[int]
    stride: list[int]


class Cudnn:
    """Convolutions by cuDNN, queued on `stream`; `workspace` and `numerics` as of `CublasLt`.

    Raises:
        ConfigError: the frontend is not installed.
        DeviceError: the library does not load or start.
    """

    def __init__(self, stream: int, workspace: Callable[[int], int]) -> None:
        try:
            import cudnn
        except ImportError as error:
            raise ConfigError(
                f"conv = 'cudnn': nvidia-cudnn-frontend is not installed ({error}); {pip_install('cudnn')}"
            ) from error
        self._cudnn, self._workspace = cudnn, workspace
        self._plans: dict[Problem, _Plan | None] = {}
        self._handle: Any = None
        try:
            self._handle = cudnn.create_handle()
            cudnn.set_stream(handle=self._handle, stream=stream)
            version = cudnn.backend_version()
        except Exception as error:  # the frontend has an error class for each reason
            raise DeviceError(
                f"conv = 'cudnn': the library cannot be initialized ({error}); use --conv dptrain"
            ) from error
        self.numerics = f"cudnn {version}"

    def takes(self, problem: Problem) -> bool:
        """Whether cuDNN computes a convolution."""
        return self._plan(problem) is not None

    def prepared(self, problem: Problem, a: int, b: int, c: int) -> Callable[[], None]:
        """Return a function that queues a convolution of dense arrays: kernels (O, R, S, I), `c` float32."""
        plan = self._plan(problem)
        assert plan is not None, "dptrain's kernels compute it"
        workspace = self._workspace(plan.workspace) if plan.workspace else 0
        pointers = {_FIRST: a, _SECOND: b, _MADE: c}

        def queue() -> None:
            try:
                plan.graph.execute(pointers, workspace, handle=self._handle)
            except Exception as error:
                raise DeviceError(f"conv = 'cudnn': {problem} failed ({error}); use --conv dptrain") from error

        return queue

    def close(self) -> None:
        """Release the library's resources; all queued work has ended."""
        self._plans.clear()
        if self._handle is not None:
            self._cudnn.destroy_handle(self._handle)
            self._handle = None

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # an exception here would reach nobody
            self.close()

    def _plan(self, problem: Problem) -> _Plan | None:
        if problem not in self._plans:
            self._plans[problem] = self._built(problem)
        return self._plans[problem]

    def _built(self, problem: Problem) -> _Plan | None:
        """Return a graph with the best permitted plan; None if there is none."""
        cudnn = self._cudnn
        window = windowed(problem)
        if window is None:
            return None
        images, places, kernel = layouts(problem, window)
        kinds, float32 = cudnn.data_type, cudnn.data_type.FLOAT
        dtype = getattr(kinds, TYPES[problem.dtype].cudnn or "")
        graph = cudnn.pygraph(
            name="convolution",
            io_data_type=dtype,
            intermediate_data_type=float32,
            compute_data_type=float32,
            handle=self._handle,
        )

        def described(layout: Layout, uid: int) -> Any:
            return graph.tensor(dim=layout.dim, stride=layout.stride, data_type=dtype, name=f"operand_{uid}", uid=uid)

        options: dict[str, Any] = {
            "pre_padding": list(window.before),
            "post_padding": list(window.behind),
            "stride": list(window.strides),
            "dilation": list(window.dilation),
            "compute_data_type": float32,
            "name": problem.makes,
        }
        if problem.makes == "places":
            result, layout = (
                graph.conv_fprop(image=described(images, _FIRST), weight=described(kernel, _SECOND), **options),
                places,
            )
        elif problem.makes == "images":
            result, layout = (
                graph.conv_dgrad(loss=described(places, _FIRST), filter=described(kernel, _SECOND), **options),
                images,
            )
        else:
            result, layout = (
                graph.conv_wgrad(image=described(images, _FIRST), loss=described(places, _SECOND), **options),
                kernel,
            )
        result.set_output(True).set_data_type(float32).set_uid(_MADE).set_dim(layout.dim).set_stride(layout.stride)
        notes = [*_REFUSED, *_TILES, *(["TENSOR_CORE"] if problem.precision == "float32" else [])]
        try:
            graph.validate()
            graph.build_operation_graph()
            graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
            graph.deselect_numeric_notes([getattr(cudnn.numerical_note, note) for note in notes])
            graph.deselect_workspace_greater_than(WORKSPACE_BYTES)
            graph.check_support()
            graph.build_plans()
            return _Plan(graph, graph.get_workspace_size())
        except (cudnn.cudnnGraphNotSupportedError, NotImplementedError):
            return None
        except Exception as error:
            raise DeviceError(f"conv = 'cudnn': {problem} cannot be planned ({error}); use --conv dptrain") from error


class CudnnWindow(NamedTuple):
    """A window for cuDNN: sizes (H, W), (P, Q) and (R, S), and zeros before and behind the image along H and W."""

    image: tuple[int, int]
    places: tuple[int, int]
    size: tuple[int, int]
    strides: tuple[int, int]
    dilation: tuple[int, int]
    before: tuple[int, int]
    behind: tuple[int, int]


def windowed(problem: Problem) -> CudnnWindow | None:
    """Return the window of a convolution; None if cuDNN's parameters cannot express it."""
    numbers = problem.sizes[4:]
    image, places, size, strides, dilation, before = ((numbers[n], numbers[n + 1]) for n in range(0, 12, 2))
    image_seen, behind = list(image), [0, 0]
    for axis in range(2):
        last = (places[axis] - 1) * strides[axis] + (size[axis] - 1) * dilation[axis] - before[axis]
        # One more place would begin another stride: cuDNN's own count of the places agrees.
        behind[axis] = max(0, last + 1 - image[axis])
        if last + strides[axis] < image[axis]:
            image_seen[axis] = last + 1
    if min(before) < 0 or min(image_seen) < 1:
        return None
    if tuple(image_seen) != image and problem.makes == "images":
        return None
    return CudnnWindow((image_seen[0], image_seen[1]), places, size, strides, dilation, before, (behind[0], behind[1]))


def layouts(problem: Problem, window: CudnnWindow) -> tuple[Layout, Layout, Layout]:
    """Return the layouts of images, places and kernel."""
    B, I, O = problem.sizes[1:4]  # noqa: E741 - the letters of all convolutions
    (H, W), (P, Q), (R, S) = problem.sizes[4:6], window.places, window.size

    def of(count: int, channels: int, size: tuple[int, int], stored: tuple[int, ...]) -> Layout:
        rows, columns = stored
        return Layout([count, channels, *size], [rows * columns * channels, 1, columns * channels, channels])

    return of(B, I, window.image, (H, W)), of(B, O, (P, Q), (P, Q)), of(O, I, (R, S), (R, S))
