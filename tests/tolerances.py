"""How near a result must be to NumPy float64: |a - b| <= atol + rtol * |reference|.

Widening one needs a stated cause.
"""

import numpy as np
import numpy.typing as npt

# dtype -> (rtol, atol). Sums of k float32 products err by about sqrt(k) * 6e-8 of their terms; k is up to 1024 here.
# "tf32" is for products of factors that the reference has rounded as well (`rounded`): what is left is the error of
# float32 sums, which tensor cores cut off where float32 units round to nearest. Half precision may differ by one unit
# in the last place: the last bit of a float32 sum decides which way a number halfway between two is rounded.
TOLERANCES = {
    "float32": (2e-5, 2e-6),
    "float64": (1e-12, 1e-13),
    "tf32": (4e-5, 4e-6),
    "bfloat16": (2.0**-7, 2.0**-133),
    "float16": (2.0**-10, 2.0**-24),
}


def assert_near(actual: npt.ArrayLike, reference: npt.ArrayLike, dtype: npt.DTypeLike, scale: float = 1.0) -> None:
    """Assert nearness; `scale` is the magnitude of the terms that were summed, where they cancel."""
    rtol, atol = TOLERANCES[dtype if isinstance(dtype, str) else np.dtype(dtype).name]
    np.testing.assert_allclose(np.asarray(actual, np.float64), reference, rtol=rtol, atol=atol * scale)


def tf32(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return x in TF32: 10 bits of mantissa, to nearest, ties away from zero (cvt.rna.tf32.f32)."""
    return ((x.view(np.uint32) + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)


def rounded(x: npt.NDArray[np.float32], precision: str) -> npt.NDArray[np.float64]:
    """Return x as a matrix product of that precision ("float32", "tf32") sees it."""
    return (tf32(x) if precision == "tf32" else x).astype(np.float64)
