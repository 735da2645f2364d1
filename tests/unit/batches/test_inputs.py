"""How evaluations and predictions of arrays are cut into batches."""

from types import SimpleNamespace

import numpy as np
import pytest

from dptrain.batches.inputs import Samples, evaluation_batches
from dptrain.data.loading import Split

ROWS = 70


def cut_into(rank: int, world: int, rows: int = ROWS, own_rows: int | None = None, **options) -> list[tuple[int, int]]:
    """Return (start, stop) of each step of a rank; `own_rows`: rows over all ranks, where each has its own."""
    x, y = np.zeros((rows, 2)), np.zeros(rows)
    samples = Samples(x, split=None if own_rows is None else Split(x, y, total=own_rows))
    batches = evaluation_batches(samples, SimpleNamespace(replica=rank, replicas=world), **options)
    plan = [batches._sampler.shards(step) for step in range(min(batches.steps, batches._sampler.steps))]
    assert all(len(shards) == 1 for shards in plan)
    return [(shards[0].start, shards[0].stop) for shards in plan]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [(0, 70)]),
        ({"otherwise": 8}, [(0, 70)]),
        ({"batch_size": 40}, [(0, 40), (40, 70)]),
        ({"batch_size": 40, "otherwise": 8}, [(0, 40), (40, 70)]),
        ({"together": True}, [(0, 32), (32, 64), (64, 70)]),
        ({"together": True, "otherwise": 40}, [(0, 40), (40, 70)]),
        ({"steps": 2}, [(0, 35), (35, 70)]),
        ({"steps": 2, "otherwise": 8}, [(0, 8), (8, 16)]),
        ({"steps": 2, "batch_size": 8, "otherwise": 9}, [(0, 8), (8, 16)]),
        ({"own_rows": 210}, [(0, 70)]),  # of a rank that has a third of them
        ({"rows": 0, "steps": 2}, []),
        ({"rows": 0, "together": True}, []),
    ],
)
def test_on_one_rank(options, expected):
    assert cut_into(0, 1, **options) == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [[(0, 35)], [(35, 70)]]),
        ({"batch_size": 40}, [[(0, 20), (40, 55)], [(20, 40), (55, 70)]]),
        ({"together": True, "batch_size": 40}, [[(0, 20), (40, 55)], [(20, 40), (55, 70)]]),
        ({"together": True}, [[(0, 16), (32, 48), (64, 67)], [(16, 32), (48, 64), (67, 70)]]),
        ({"together": True, "steps": 2, "otherwise": 10}, [[(0, 5), (10, 15)], [(5, 10), (15, 20)]]),
        ({"rows": 0, "batch_size": 4}, [[], []]),
    ],
)
def test_on_two_ranks(options, expected):
    assert [cut_into(rank, 2, **options) for rank in range(2)] == expected
