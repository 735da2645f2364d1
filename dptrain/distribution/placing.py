"""The current distribution for `dptrain.program`: its mesh, and the layouts of variables on it."""

from dptrain import comm as comms
from dptrain.comm import Communicator
from dptrain.comm.mesh import STAGE, MeshCommunicator
from dptrain.distribution.strategies import Distribution, distribution
from dptrain.errors import ConfigError
from dptrain.program.sharding.mesh import BATCH, Axes
from dptrain.program.tensor import Variable

# Meshes by communicator (which lives as long as the process) and axis lengths.
_arranged: dict[tuple[int, tuple[tuple[str, int], ...]], MeshCommunicator] = {}


def current_mesh() -> dict[str, int] | None:
    """Return the axis lengths of the current distribution's mesh, in order; None without a distribution.

    `BATCH`, the axis of rows, comes first with a length of 1 if the mesh has none.
    """
    current = distribution()
    if current is None:
        return None
    if current.device_mesh.devices.size != comms.current().size:
        raise ConfigError(
            f"the distribution's mesh {current.device_mesh} has {current.device_mesh.devices.size} devices, but here "
            f"{comms.current().size} train together; call set_distribution(None) first"
        )
    mesh = {_axis(current, name) or name: length for name, length in current.device_mesh._lengths.items()}
    if STAGE in mesh:
        raise ConfigError(
            f"the distribution's mesh {current.device_mesh} has an axis {STAGE!r}, a name that pipelines use: "
            f"rename it, or use compile(stages={mesh[STAGE]}) instead"
        )
    return mesh if BATCH in mesh else {BATCH: 1, **mesh}


def ranks(stages: int = 1) -> Communicator:
    """Return the ranks that train together, arranged in the current mesh. Collective at its first call."""
    comm, mesh = comms.current(), current_mesh() if stages == 1 else pipelines(stages)
    if mesh is None or mesh == {BATCH: comm.size}:
        return comm
    key = id(comm), tuple(mesh.items())
    if key not in _arranged:
        # Making its groups is collective as well: a rank that is arranged otherwise is in another call here.
        axes = ", ".join(f"{axis}={length}" for axis, length in mesh.items())
        comm.require_same(f"a mesh {axes}, by set_distribution or compile(stages={stages})", {})
        _arranged[key] = MeshCommunicator(comm, mesh)
    return _arranged[key]


def pipelines(stages: int, mesh: dict[str, int] | None = None) -> dict[str, int]:
    """Return the mesh of the ranks as pipelines of this number of stages."""
    size, mesh = comms.current().size, current_mesh() if mesh is None else mesh
    if mesh is not None and mesh != {BATCH: size}:
        grid = ",".join(f"{axis}={length}" for axis, length in mesh.items())
        raise ConfigError(f"stages = {stages}: not supported on the mesh {grid}; leave out one of them")
    if size % stages:
        fits = max(size // stages, 1) * stages
        raise ConfigError(
            f"stages = {stages}: the number of ranks, {size}, is not a multiple of it; start {fits} ranks (mpirun -n "
            f"{fits}), or choose another number of stages"
        )
    return {BATCH: size // stages, STAGE: stages}


def layout_of(variable: Variable, slot_of: Variable | None = None) -> Axes | None:
    """Return the mesh axis or None for each axis of a variable; None without a distribution.

    A slot of its weight's shape lies like the weight, others are replicated. A layout with fewer axes leaves the last
    ones whole; more are refused where it is used, see `program.sharding.local.MeshPosition.check`.
    """
    current = distribution()
    if current is None:
        return None
    if slot_of is not None and slot_of.shape != variable.shape:
        return (None,) * variable.ndim
    axes = current.get_variable_layout(variable if slot_of is None else slot_of).axes
    return (*(_axis(current, name) for name in axes), *[None] * (variable.ndim - len(axes)))


def _axis(current: Distribution, name: str | None) -> str | None:
    """Return the name of a mesh axis in `dptrain.program`."""
    return BATCH if name is not None and name == current.batch_dim_name else name
