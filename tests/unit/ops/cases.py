"""What every op is tried with: the generic tests run over `OPS`, and a new op without cases fails them."""

from collections.abc import Callable
from typing import Any

import numpy as np

Rng = np.random.Generator
ROWS = 5


def normal(*shape: int) -> Callable[[Rng], np.ndarray]:
    return lambda rng: rng.normal(size=shape)


def positive(*shape: int) -> Callable[[Rng], np.ndarray]:
    return lambda rng: rng.uniform(0.5, 2, shape)


def whole(low: int, high: int, *shape: int) -> Callable[[Rng], np.ndarray]:
    return lambda rng: rng.integers(low, high, shape).astype(np.int32)


def definite(*shape: int) -> Callable[[Rng], np.ndarray]:
    """Symmetric, positive definite matrices."""

    def make(rng: Rng) -> np.ndarray:
        a = rng.normal(size=shape)
        return a @ a.swapaxes(-1, -2) + np.eye(shape[-1])

    return make


def regular(*shape: int) -> Callable[[Rng], np.ndarray]:
    """Square matrices that are far from singular, with no symmetry."""
    return lambda rng: rng.normal(size=shape) + 3 * np.eye(shape[-1])


def flags(*shape: int) -> Callable[[Rng], np.ndarray]:
    return lambda rng: rng.random(shape) < 0.5


def places(length: int, *shape: int) -> Callable[[Rng], np.ndarray]:
    return lambda rng: rng.integers(0, length, shape)


def log_probabilities(*shape: int) -> Callable[[Rng], np.ndarray]:
    def make(rng: Rng) -> np.ndarray:
        x = rng.normal(size=shape)
        return x - np.log(np.exp(x).sum(-1, keepdims=True))

    return make


class Case:
    """Inputs of an op. `rows` is the axis of each input that counts rows of the batch, None for a whole one."""

    def __init__(self, *inputs: Any, rows: tuple[int | None, ...] | None = None, **attributes: Any) -> None:
        self.inputs, self.attributes = inputs, attributes
        self.rows = (0,) + (None,) * (len(inputs) - 1) if rows is None else rows


B = ROWS
_PAIRS = [
    Case(normal(B, 3), normal(B, 3), rows=(0, 0)),
    Case(normal(B, 3), normal(3)),
    Case(normal(B, 3), normal(B, 1), rows=(0, 0)),
]
_POSITIVE = [Case(positive(B, 3), positive(B, 3), rows=(0, 0)), Case(positive(3), positive(B, 3), rows=(None, 0))]
_FLAGS = [Case(flags(B, 3), flags(3))]
_ROOTS = [Case(positive(B, 3))]
_BOUNDED = [Case(normal(B, 3), lambda rng: np.full(3, -0.5), lambda rng: np.array([0.7, 0.6, -0.9]))]
_SINES = [Case(lambda rng: rng.uniform(-0.9, 0.9, (B, 3)))]
_ONE = [Case(normal(B, 3)), Case(normal(2, B), rows=(1,))]
_SUMS = [
    Case(normal(B, 3), axes=(0,), keepdims=False),
    Case(normal(B, 3), axes=(0, 1), keepdims=True),
    Case(normal(2, B, 3), axes=(0, 2), keepdims=False, rows=(1,)),
    Case(normal(2, B), axes=(0,), keepdims=True, rows=(1,)),
]

CASES: dict[str, list[Case]] = {
    **dict.fromkeys(("add", "subtract", "multiply", "maximum", "minimum"), _PAIRS),
    **dict.fromkeys(("equal", "not_equal", "less", "less_equal", "greater", "greater_equal"), _PAIRS),
    **dict.fromkeys(("logical_and", "logical_or"), _FLAGS),
    "logical_not": [Case(flags(B, 3))],
    **dict.fromkeys(("divide", "floor_divide", "power", "mod", "fmod"), _POSITIVE),
    **dict.fromkeys(("arctan2", "hypot"), _PAIRS),
    **dict.fromkeys(("clip_to", "saturate_to"), _BOUNDED),
    **dict.fromkeys(("expm1", "sinh", "cosh", "arcsinh", "sinc"), _ONE),
    "cbrt": [Case(positive(B, 3)), Case(lambda rng: -1 - rng.random((B, 3)))],
    "arccosh": [Case(lambda rng: 1.5 + rng.random((B, 3)))],
    "divide_no_nan": [*_POSITIVE, Case(normal(B, 3), lambda rng: np.array([0, 1, -2]))],
    "where": [Case(flags(B, 1), normal(B, 3), normal(3), rows=(0, 0, None))],
    **dict.fromkeys(
        ("negative", "absolute", "sign", "arctan", "erf", "exp", "square", "sin", "cos", "tanh", "sigmoid", "softplus"),
        _ONE,
    ),
    **dict.fromkeys(("relu", "stop_gradient"), _ONE),
    "unshard": [Case(normal(3, 2), rows=(None,))],
    **dict.fromkeys(("log", "log1p", "sqrt", "root_of_squares"), _ROOTS),
    **dict.fromkeys(("arcsin", "arccos"), _SINES),
    **dict.fromkeys(("ceil", "floor", "rint", "isnan", "isinf", "isfinite"), _ONE),
    "leaky_relu": [Case(normal(B, 3), negative_slope=0.3)],
    "elu": [Case(normal(B, 3), alpha=0.7)],
    "cast_to": [Case(normal(B, 3), dtype="float64")],
    "round_to": [Case(normal(B, 3), dtype="float16")],
    "full": [Case(shape=(3, 2), value=1.5, dtype="float64", rows=())],
    "reduce_sum": _SUMS,
    "reduce_max": _SUMS,
    "argmax_along": [Case(normal(B, 3), axis=1), Case(normal(3, B), axis=0, rows=(1,))],
    "reshape_to": [Case(normal(2, 6), shape=(3, 4), rows=(None,))],
    "transpose_to": [Case(normal(B, 3, 2), axes=(1, 0, 2)), Case(normal(2, B, 3), axes=(2, 0, 1), rows=(1,))],
    "broadcast_along": [Case(normal(3, 1), shape=(2, 3, 4), rows=(None,))],
    "getitem": [Case(normal(2, 6), key=(1, (1, 6, 2)), rows=(None,))],
    "put": [Case(normal(2, 3), key=((1, 3, 1), 0, (0, 3, 1)), shape=(4, 2, 3), rows=(None,))],
    "concatenate_along": [
        Case(normal(B, 3), normal(B, 2), axis=1, rows=(0, 0)),
        Case(normal(2, 3), normal(1, 3), normal(2, 3), axis=0, rows=(None, None, None)),
    ],
    "batch_matmul": [
        Case(normal(B, 3), normal(3, 4)),
        Case(normal(3, B), normal(B, 4), rows=(1, 0)),
        Case(normal(2, 3), normal(3, B), rows=(None, 1)),
        Case(normal(B, 2, 3), normal(B, 3, 2), rows=(0, 0)),
        Case(normal(B, 2, 3), normal(3, 2)),
        Case(normal(2, B, 3), normal(3, 2), rows=(1, None)),
    ],
    "conv2d": [
        Case(normal(B, 5, 4, 2), normal(3, 2, 2, 3), strides=(2, 1), dilation=(1, 2), before=(1, 1), size=(3, 3)),
        Case(normal(B, 3, 3, 1), normal(3, 3, 1, 2), strides=(1, 1), dilation=(1, 1), before=(0, 0), size=(1, 1)),
        Case(
            *(normal(2, 3, 4, B), normal(2, 2, B, 3)),
            **{"strides": (1, 1), "dilation": (1, 1), "before": (0, 0), "size": (2, 3), "rows": (3, 2)},
        ),
        Case(
            *(normal(2, 3, 4, 3), normal(2, 2, 3, B)),
            **{"strides": (1, 1), "dilation": (1, 1), "before": (0, 0), "size": (2, 3), "rows": (None, 3)},
        ),
    ],
    "conv2d_input": [
        Case(normal(B, 3, 2, 3), normal(3, 2, 2, 3), strides=(2, 2), dilation=(1, 1), before=(1, 0), size=(6, 5)),
    ],
    "conv2d_kernel": [
        Case(
            *(normal(B, 5, 4, 2), normal(B, 3, 4, 3)),
            **{"strides": (2, 1), "dilation": (1, 1), "before": (1, 0), "size": (3, 2), "rows": (0, 0)},
        ),
    ],
    "depthwise2d": [
        Case(normal(B, 5, 4, 2), normal(3, 2, 2), strides=(2, 1), dilation=(1, 2), before=(1, 1), size=(3, 3)),
    ],
    "depthwise2d_input": [
        Case(normal(B, 3, 2, 3), normal(3, 2, 3), strides=(2, 2), dilation=(1, 1), before=(1, 0), size=(6, 5)),
    ],
    "max_pool2d": [
        Case(normal(B, 5, 4, 2), window=(2, 3), strides=(2, 1), before=(0, 1), size=(3, 4)),
        Case(normal(2, 4, 4, B), window=(2, 2), strides=(2, 2), before=(0, 0), size=(2, 2), rows=(3,)),
    ],
    "max_pool2d_input": [
        Case(
            *(places(3, B, 4, 4, 1), places(3, B, 2, 2, 1), normal(B, 2, 2, 1)),
            **{"window": (2, 2), "strides": (2, 2), "before": (0, 0), "rows": (0, 0, 0)},
        ),
    ],
    "max_pool2d_take": [
        Case(
            *(places(3, B, 4, 4, 1), places(3, B, 2, 2, 1), normal(B, 4, 4, 1)),
            **{"window": (2, 2), "strides": (2, 2), "before": (0, 0), "rows": (0, 0, 0)},
        ),
    ],
    "attend_heads": [
        Case(normal(B, 4, 2, 3), normal(B, 3, 2, 3), normal(B, 3, 2, 2), rows=(0, 0, 0), scale=0.7, is_causal=False),
        Case(normal(2, 4, B, 3), normal(2, 4, B, 3), normal(2, 4, B, 3), rows=(2, 2, 2), scale=0.5, is_causal=True),
        Case(
            *(normal(B, 3, 1, 2), normal(B, 4, 1, 2), normal(B, 4, 1, 2), flags(B, 1, 3, 4)),
            **{"rows": (0, 0, 0, 0), "scale": 1.0, "is_causal": False},
        ),
        Case(
            *(normal(B, 3, 2, 2), normal(B, 3, 2, 2), normal(B, 3, 2, 1), flags(1, 2, 1, 3)),
            **{"rows": (0, 0, 0, None), "scale": 1.0, "is_causal": True},
        ),
    ],
    "random_bits": [Case(places(9), shape=(B, 11), seed=3, purpose=100, number=2, rows=(None,))],
    "take_rows": [Case(normal(4, 3), places(4, B, 2), rows=(None, 0))],
    "take_each": [
        Case(normal(B, 4, 3), places(4, B, 2), rows=(0, 0)),
        Case(normal(B, 3), places(3, B, 2, 2), rows=(0, 0)),
    ],
    "add_rows": [Case(normal(B, 2, 3), places(4, B, 2), length=4, rows=(0, 0))],
    "one_hot_last": [Case(places(4, B), classes=3, dtype="float64")],
    **{
        key: [Case(normal(B, 6)), Case(normal(2, B, 4), rows=(1,)), Case(normal(7), rows=(None,))]
        for key in ("sort_last", "argsort_last")
    },
    **{
        key: [Case(whole(-40, 40, B, 3), whole(-40, 40, B, 3), rows=(0, 0)), Case(whole(0, 90, B, 3), whole(1, 9, 3))]
        for key in ("bit_and", "bit_or", "bit_xor", "greatest_divisor")
    },
    **{
        key: [Case(whole(-9999, 9999, B, 3), whole(0, 40, B, 3), rows=(0, 0))]
        for key in ("left_shifted", "right_shifted")
    },
    "bit_invert": [Case(whole(-40, 40, B, 3))],
    "nextafter_along": [Case(normal(B, 3), normal(3))],
    "has_sign": [Case(normal(B, 3)), Case(whole(-3, 3, B, 2))],
    "bits_as": [
        Case(whole(-99, 99, B, 4), dtype="float32", itemsize=4),
        Case(whole(-99, 99, B, 4), dtype="int16", itemsize=4),
        Case(whole(-99, 99, B, 4), dtype="int64", itemsize=4),
    ],
    **{key: [Case(normal(B, 3))] for key in ("erfc_of", "alias")},
    "erfinv_of": _SINES,
    "bessel_of": [Case(normal(B, 3), order=0), Case(normal(B, 3), order=1)],
    "greatest_rows": [
        Case(normal(B, 2, 3), lambda rng: np.array([0, 2, 1, 2, 0]), length=3, rows=(0, 0)),
        Case(normal(B), lambda rng: np.array([0, 1, -1, 1, 2]), length=2, rows=(0, 0)),
    ],
    "multiplied_rows": [
        Case(positive(B, 2), places(4, B), length=4, rows=(None, None)),
        Case(
            lambda rng: np.array([0.0, 2, 3, 0, 5]), lambda rng: np.array([0, 0, 1, 2, 2]), length=3, rows=(None, None)
        ),
    ],
    "fourier": [Case(normal(B, 2, 6), inverse=False), Case(normal(B, 2, 5), inverse=True)],
    "half_spectrum": [Case(normal(B, 6)), Case(normal(2, B, 5), rows=(1,))],
    "from_half_spectrum": [Case(normal(B, 2, 4), length=6), Case(normal(B, 2, 3), length=5)],
    **{
        key: [Case(regular(B, 3, 3)), Case(regular(2, B, 2, 2), rows=(1,))]
        for key in ("inverse", "determinant", "log_determinant", "cofactors")
    },
    **{
        key: [Case(definite(B, 3, 3)), Case(definite(1, 1), rows=(None,))]
        for key in ("cholesky_factor", "eigen_packed")
    },
    "solution": [
        Case(regular(B, 3, 3), normal(B, 3, 2), rows=(0, 0)),
        Case(regular(3, 3), normal(B, 3, 1), rows=(None, 0)),
        Case(regular(3, 3), normal(3, B), rows=(None, 1)),
    ],
    "triangular_solution": [
        Case(regular(B, 3, 3), normal(B, 3, 2), lower=True, rows=(0, 0)),
        Case(regular(3, 3), normal(B, 3, 1), lower=False, rows=(None, 0)),
    ],
    "qr_packed": [
        Case(normal(B, 4, 2), full=False),
        Case(normal(B, 2, 4), full=False),
        Case(regular(B, 3, 3), full=True),
        Case(normal(2, 3), full=True, rows=(None,)),
    ],
    "svd_packed": [
        Case(normal(B, 4, 2), full=False),
        Case(normal(B, 2, 3), full=False),
        Case(regular(B, 3, 3), full=True),
    ],
    "singular_values": [Case(normal(B, 4, 2)), Case(normal(B, 2, 3))],
    "lu_packed": [Case(regular(B, 3, 3)), Case(lambda rng: rng.normal(size=(2, 4, 4)), rows=(None,))],
    "pivot_matrix": [Case(lambda rng: np.array([[1, 1, 2], [2, 2, 2], [0, 2, 2], [0, 1, 2], [1, 2, 2]]))],
    "pseudo_inverse": [Case(normal(B, 4, 2), rcond=-1.0), Case(normal(B, 2, 3), rcond=1e-10)],
    "rank_of": [Case(normal(B, 4, 2), tol=-1.0), Case(lambda rng: np.ones((B, 3, 3)), tol=0.1)],
    **{
        key: [
            Case(
                *(log_probabilities(B, 6, 4), whole(1, 4, B, 3), whole(0, 4, B), whole(5, 7, B)),
                **{"blank": 0, "rows": (0, 0, 0, 0)},
            )
        ]
        for key in ("ctc_losses", "ctc_slopes")
    },
    "beam_paths": [Case(log_probabilities(B, 5, 3), whole(3, 6, B), width=9, paths=3, blank=2, rows=(0, 0))],
}
