"""NaN and infinities on CUDA: where NumPy has them."""

import numpy as np
import pytest

from tests.unit.backend.cpu.test_special_numbers import IMAGE, NARROW, ROWS, WIDE, wrong

SPECIAL = {
    "several NaN in a row": ("wide", [(2, 69, np.nan), (2, 5, np.nan), (2, 6, np.nan), (2, 33, np.inf)]),
    "several NaN in a column": ("wide", [(9, 64, np.nan), (0, 64, np.nan), (4, 64, -np.inf), (10, 0, np.nan)]),
    "NaN in few columns": ("narrow", [(10, 2, np.nan), (10, 1, np.nan), (0, 2, np.inf), (3, 0, -np.inf)]),
    "an infinity in one channel": ("image", [(3, 2, 5, 4, np.inf)]),
    "NaN beside an infinity": ("image", [(0, 0, 0, 0, np.nan), (0, 0, 1, 0, np.inf), (10, 3, 5, 4, np.nan)]),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("case", SPECIAL)
def test_they_are_where_numpy_has_them(cuda_backend, case):
    rng = np.random.default_rng(0)
    shapes = {"wide": (ROWS, WIDE), "narrow": (ROWS, NARROW), "image": (ROWS, *IMAGE)}
    values = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    name, places = SPECIAL[case]
    for *place, value in places:
        values[name][tuple(place)] = value
    assert wrong(cuda_backend.executable, values) == []
