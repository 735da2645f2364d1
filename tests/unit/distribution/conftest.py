"""Jobs of several ranks that need no launcher: only their number counts here."""

from collections.abc import Callable, Iterator

import pytest

from dptrain import comm, distribution
from dptrain.comm import SoloCommunicator
from dptrain.distribution import Distribution, TensorLayout, devices


class Rows(Distribution):
    """The least that a distribution says."""

    def get_variable_layout(self, variable):
        return TensorLayout([None] * variable.ndim, self.device_mesh)

    def get_tensor_layout(self, path):
        return None


@pytest.fixture(autouse=True)
def as_before(monkeypatch) -> Iterator[None]:
    """Start without a distribution and without a GPU, and leave no distribution behind."""
    monkeypatch.setattr(devices, "_sees_gpu", lambda: False)
    distribution.set_distribution(None)
    yield
    distribution.set_distribution(None)


@pytest.fixture
def be(monkeypatch) -> Callable[..., None]:
    """Return a function that makes this process a rank of a job."""

    def be(rank: int, size: int) -> None:
        ranks = SoloCommunicator()
        ranks.rank, ranks.size = rank, size
        monkeypatch.setattr(comm, "_current", ranks)

    return be


@pytest.fixture
def eight(be) -> None:
    """Be rank 0 of eight."""
    be(0, 8)
