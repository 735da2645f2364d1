"""How near a result must be to NumPy float64: |a - b| <= atol + rtol * |reference|.

Widening one needs a stated cause.
"""

import numpy as np
import numpy.typing as npt

# dtype -> (rtol, atol). Sums of k float32 products err by about sqrt(k) * 6e-8 of their terms; k is up to 1024 here.
TOLERANCES = {"float32": (2e-5, 2e-6), "float64": (1e-12, 1e-13)}


def assert_near(actual: npt.ArrayLike, reference: npt.ArrayLike, dtype: npt.DTypeLike, scale: float = 1.0) -> None:
    """Assert nearness; `scale` is the magnitude of the terms that were summed, where they cancel."""
    rtol, atol = TOLERANCES[np.dtype(dtype).name]
    np.testing.assert_allclose(np.asarray(actual, np.float64), reference, rtol=rtol, atol=atol * scale)
