"""Ranks as a grid."""

import numpy as np
import pytest

from dptrain.comm.mesh import MeshCommunicator, check_lengths
from dptrain.errors import ConfigError
from tests.thread_ranks import on_mesh, on_ranks


def test_who_differs_from_whom():
    """On a mesh whose axes lie in any order, one of them with a single rank."""

    def work(comm):
        arrays = [np.full(1, 2.0**comm.rank) for _ in range(4)]
        for group, array in zip(
            (comm.along("model"), comm.along("batch"), comm.along("pipe"), comm), arrays, strict=True
        ):
            group.allreduce_sum(array)
        sharing = comm.sharing(["model"]), comm.sharing(["pipe"])
        position = comm.coordinates, comm.replica, comm.replicas, comm.peers
        return (
            [float(group[0]) for group in arrays],
            position,
            [(group_comm.rank, group_comm.size) for group_comm in sharing],
            comm.description,
        )

    results = on_mesh(work, model=2, pipe=1, batch=3)
    for rank, (sums, position, sharing, description) in enumerate(results):
        model, batch = divmod(rank, 3)
        assert sums == [2.0**batch * (1 + 8), 7.0 * 8**model, 2.0**rank, 63.0]
        assert position == (
            {"model": model, "pipe": 0, "batch": batch},
            batch,
            3,
            [3 * model, 3 * model + 1, 3 * model + 2],
        )
        assert sharing == [(batch, 3), (rank, 6)]
        assert description == "threads, mesh 2 model x 1 pipe x 3 batch"


def test_groups_of_all_ranks():
    def work(comm):
        return [comm.partition(axes) for axes in ([], ["batch"], ["model"], ["model", "batch"])]

    for result in on_mesh(work, batch=2, model=3):
        assert result == [[[*range(6)]], [[0, 1, 2], [3, 4, 5]], [[0, 3], [1, 4], [2, 5]], [[n] for n in range(6)]]


@pytest.mark.parametrize(
    "lengths",
    [{"batch": 2, "model": 2}, {"batch": 2, "model": 1}, {"batch": 3, "model": 0}, {"batch": -1, "model": -3}],
)
def test_ranks_that_do_not_fill_a_mesh_are_refused(lengths):
    with pytest.raises(ConfigError, match=r"mesh batch=-?\d, model=-?\d: needs -?\d ranks, but there are 3"):
        check_lengths(lengths, 3)
    errors = on_ranks(3, lambda comm: MeshCommunicator(comm, lengths))
    assert all(isinstance(error, ConfigError) for error in errors)
