"""The kernels that the backend launches: their argument types, and loading them onto a GPU."""

from typing import Any

from dptrain.backend.cuda.compile import compiled, compiled_own, find_nvcc, kernel_cache, release, too_new
from dptrain.backend.cuda.device import Gpu, cuda, driver_version
from dptrain.backend.cuda.products import product_kernels
from dptrain.backend.custom import Op
from dptrain.errors import DeviceError

# Types of stored samples that kernels read.
GATHERED = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float32", "float64")
# Argument types of every kernel by source file, in the letters of Python's struct module; P is a pointer. Those of the
# matrix products are in products.py.
_KERNELS = {
    "gather": {f"gather_{name}": "PPPddqi" for name in (*GATHERED, "uint8_quads", "int8_quads")}
    | {f"gather_bytes_{n}": "PPPqi" for n in (1, 2, 4, 8)},
    "dense": {"gemm_finish": "PPPqiii", "dense_gradient": "PPPqiif", "sum_partials": "PPii"},
    "activation": {
        "activation_forward": "PPqif",
        "activation_backward": "PPPqif",
        "softmax_forward": "PPqi",
        "softmax_backward": "PPPqi",
    },
    "softmax_cross_entropy": {"softmax_cross_entropy": "PPPqPPPqi", "dense_cross_entropy": "PPffPPPqi"},
    "probability_cross_entropy": {"probability_cross_entropy": "PPPffqPPPqi"},
    "pointwise": {"pointwise_loss": "PPifffPPPqi"},
    "metrics": {
        "highest": "PPqi",
        "top1_correct": "PPPqi",
        "label_in_top": "PPiPqi",
        "confusion": "PPfPPPqi",
        "labels_other_than": "PqPq",
        "sum_rows": "PPPPPPPPq",
        "add_totals": "PPq",
    },
    "batch_normalization": {
        "batch_sums": "PPqi",
        "batch_squares": "PPPqi",
        "batch_gradient_sums": "PPPPfPqi",
        "batch_totals": "PPPPiii",
        "batch_statistics": "PPffPPPPi",
        "batch_normalize": "PPPPPfPqi",
        "batch_normalize_backward": "PPPPPfPPPqi",
    },
    "dropout": {"dropout_mask": "PqiIfQQQQQ"},
    "optimizer": {"adam": "PPPPPqffff", "rmsprop": "PPPPqffff", "sgd": "PPPPqff"},
    "flat": {
        "fill_float32": "Pqd",
        "fill_float64": "Pqd",
        "add_float32": "PPq",
        "add_float64": "PPq",
        "add_float32_float64": "PPq",
        "affine": "PPqff",
        "axpby": "PPPqff",
        **dict.fromkeys(("multiply", "divide", "maximum", "minimum"), "PPPqi"),
        **dict.fromkeys(("absolute", "sign", "square_root"), "PPq"),
        "clip": "PPqff",
        "clip_divisors": "PPPqd",
        "sum": "PPqi",
        "squared_norm": "PPqi",
        "regularize": "PPPPqiff",
        "count_nonfinite": "PPqi",
        "sum_chunks": "PPq",
    },
}


def load_kernels(gpu: Gpu, precision: str) -> dict[str, Any]:
    """Return the prepared kernels of a GPU by name, compiled if they are not yet; they are loaded once.

    Args:
        gpu: the GPU.
        precision: of matrix products.

    Raises:
        DeviceError: no nvcc, or the kernels do not compile or load.
    """
    if precision not in gpu.loaded:
        kernels: dict[str, Any] = {}
        modules: list[Any] = []
        types = _KERNELS | product_kernels(precision)
        toolkit, driver = release(find_nvcc()), driver_version()
        if trouble := too_new(toolkit, driver):
            raise DeviceError("; ".join(trouble))
        for source, path in compiled(tuple(types), gpu.architecture).items():
            try:
                module = cuda.module_from_buffer(path.read_bytes())
                modules.append(module)
                for name, arguments in (_KERNELS.get(source, {}) | product_kernels(precision).get(source, {})).items():
                    kernels[name] = _prepared(module, name, arguments)
            except cuda.Error as error:
                versions = f"nvcc of CUDA {_dotted(toolkit)}, driver for CUDA {_dotted(driver)}"
                raise DeviceError(
                    f"{gpu.name}: the kernels do not load ({error}; {versions}); remove {kernel_cache()}"
                ) from error
        gpu.loaded[precision] = kernels, modules
    return gpu.loaded[precision][0]


def load_own_kernel(gpu: Gpu, op: Op) -> Any:
    """Return a user's prepared kernel, compiled and loaded if it is not yet.

    Raises:
        DeviceError: it does not compile or load.
    """
    path = compiled_own(op.name, op.source, gpu.architecture)
    try:
        if path not in gpu.modules:
            gpu.modules[path] = cuda.module_from_buffer(path.read_bytes())
        return _prepared(gpu.modules[path], op.kernel, op.arguments)
    except cuda.Error as error:
        raise DeviceError(
            f'op {op.name!r}: kernel {op.kernel!r} does not load ({error}); is there an extern "C" __global__ '
            "function of that name in its source?"
        ) from error


def _dotted(version: tuple[int, int] | None) -> str:
    return "unknown" if version is None else f"{version[0]}.{version[1]}"


def _prepared(module: Any, name: str, arguments: str) -> Any:
    function = module.get_function(name)
    function.prepare(arguments)
    return function
