"""Assigns devices to ranks: a GPU of its own for each, and the same kind for all."""

from collections.abc import Iterable, Sequence
from typing import Any

from dptrain import backend as backends
from dptrain.backend.base import Backend
from dptrain.backend.cuda.gpu.selection import assign, visible_gpus
from dptrain.comm import Communicator
from dptrain.errors import AgreedError, DeviceError, ExitCode
from dptrain.runtime.cores import limit_threads
from dptrain.runtime.text import ranges


def open_backend(
    comm: Communicator,
    *,
    device: str = "auto",
    dtype: str = "float32",
    share_gpu: bool = False,
    **options: Any,
) -> Backend:
    """Open this rank's backend, with the options of `backend.create`. Collective.

    Raises:
        ConfigError: as `backend.create`; an AgreedError with its exit code on several ranks.
        DeviceError: likewise.
        AgreedError: the ranks found different devices, or the same GPU, on every rank.
    """
    place = find_place(comm, device, dtype, share_gpu)
    threads = limit_threads(comm.local_size)

    def create() -> Backend:
        return backends.create(device, dtype, threads, place=place, **options)

    if comm.size == 1:
        return create()
    backend = comm.agree("device", create)
    check_devices(comm, backend, share_gpu)
    return backend


def find_place(comm: Communicator, device: str, dtype: str, share_gpu: bool) -> backends.DeviceAssignment:
    """Return the GPU of this rank, agreed with the ranks of its node. Collective."""
    if comm.size == 1:
        return backends.DeviceAssignment(comm.host)
    # A rank alone on its node takes the first GPU that it sees; asking the driver costs tenths of a second.
    looks = comm.local_size > 1 and backends.tries_gpu(device, dtype)
    node_gpus = comm.allgather([comm.node, visible_gpus() if looks else []])
    ranks = [rank for rank, (node, _) in enumerate(node_gpus) if node == comm.node]
    try:
        chosen = assign([node_gpus[rank][1] for rank in ranks], ranks, share_gpu, comm.host)
    except DeviceError as error:
        return backends.DeviceAssignment(comm.host, trouble=str(error))
    names = [node_gpus[rank][1][number : number + 1] for rank, number in zip(ranks, chosen, strict=True)]
    mine = ranks.index(comm.rank)
    return backends.DeviceAssignment(comm.host, chosen[mine], sharers=names.count(names[mine]))


def check_devices(comm: Communicator, backend: Backend, share_gpu: bool) -> None:
    """Refuse ranks on devices of different kinds, and ranks that share a GPU unless they may. Collective."""
    identity = [comm.host, backend.name, backend.numerics, backend.description, backend.gpu]
    identities = comm.allgather(identity)
    hosts, kinds, numerics, descriptions, gpus = zip(*identities, strict=True)
    if len(set(kinds)) > 1:
        shown = [
            numeric if name == "cuda" else text
            for name, numeric, text in zip(kinds, numerics, descriptions, strict=True)
        ]
        raise AgreedError(
            "device",
            ExitCode.DEVICE,
            f"some ranks have a GPU and others do not: {_by_rank(hosts, shown)}; "
            "give every rank a GPU, or use --device cpu",
            [],
        )
    if len(set(numerics)) > 1:
        raise AgreedError(
            "device",
            ExitCode.CONFIG,
            f"the ranks would compute different bits: {_by_rank(hosts, numerics)}; "
            "give all ranks the same kind of GPU or CPU, the same options and the same packages",
            [],
        )
    for gpu in dict.fromkeys(device for device in gpus if device is not None and not share_gpu):
        users = [rank for rank, other in enumerate(gpus) if other == gpu]
        if len(users) > 1:
            raise AgreedError(
                "device",
                ExitCode.DEVICE,
                f"ranks {ranges(users)} use the same GPU {gpu} ({_hosts(hosts, users)}); "
                "give each rank its own GPU, or use --share-gpu or --device cpu",
                [],
            )


def _by_rank(hosts: Sequence[str], values: Sequence[str]) -> str:
    """Return "ranks 0-2 (host a): x; rank 3 (host b): y"."""
    parts = []
    for value in dict.fromkeys(values):
        ranks = [rank for rank, other in enumerate(values) if other == value]
        parts.append(f"rank{'s' if len(ranks) > 1 else ''} {ranges(ranks)} ({_hosts(hosts, ranks)}): {value}")
    return "; ".join(parts)


def _hosts(hosts: Sequence[str], ranks: Iterable[int]) -> str:
    names = list(dict.fromkeys(hosts[rank] for rank in ranks))
    return f"host{'s' if len(names) > 1 else ''} {', '.join(names)}"
