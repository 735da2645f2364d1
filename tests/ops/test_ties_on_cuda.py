"""The order of equal elements on the CUDA backend is that of `tests/unit/ops/test_ties.py`."""

import pytest

from tests.sample import sample
from tests.unit.ops.test_ties import DTYPES, wrong


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", sample(DTYPES, 4, 2))
def test_equal_elements_keep_their_order(cuda_backend, dtype):
    assert wrong(cuda_backend.executable, dtype) == []
