"""`--mesh`: the ranks as a grid, and which axes of a model's weights are sharded over it if nobody says it."""

from collections.abc import Iterable, Mapping

from dptrain.comm import Communicator
from dptrain.comm.mesh import BATCH, STAGE, check_lengths
from dptrain.distribution import DeviceMesh, LayoutMap, ModelParallel, distribution, set_distribution
from dptrain.distribution.placing import pipelines, ranks
from dptrain.errors import ConfigError
from dptrain.layers.base import Layer
from dptrain.layers.convolution import Conv2D
from dptrain.layers.dense import Dense
from dptrain.layers.embedding import Embedding
from dptrain.models import Model
from dptrain.models.explaining import Mesh
from dptrain.program.mesh import Axes
from dptrain.program.tensor import Variable

# Layers whose weights have the layer's inputs on the last axis but one, and its outputs on the last.
_FROM_TO = (Conv2D, Dense, Embedding)


def lengths_of(mesh: str) -> dict[str, int]:
    """Return the length of each axis of a mesh, such as batch=2,model=2.

    Raises:
        ConfigError: one of them is that of pipelines.
    """
    found = {name: int(length) for name, length in (one.split("=") for one in mesh.split(","))}
    if STAGE in found:
        raise ConfigError(f"mesh = {mesh!r}: the axis {STAGE!r} is that of pipelines; use --stages instead")
    return found if BATCH in found else {BATCH: 1, **found}


def arranged(mesh: str, comm: Communicator, stages: int = 1) -> Communicator:
    """Let the ranks train on a mesh, and return them. Collective.

    Args:
        mesh: as `lengths_of`.
        comm: all ranks.
        stages: of pipelines that they are to be then.

    Raises:
        AgreedError: there are not so many ranks, or pipelines do not go on the mesh, with exit code 2; nothing is set.
    """
    lengths = comm.agree("configuration", lambda: lengths_of(mesh))
    comm.agree("configuration", lambda: check_lengths(lengths, comm.size))
    if stages > 1:
        comm.agree("configuration", lambda: pipelines(stages, lengths))
    grid = DeviceMesh(tuple(lengths.values()), list(lengths))
    set_distribution(ModelParallel(layout_map=LayoutMap(grid), batch_dim_name=BATCH))
    return ranks()


def in_stages(stages: int, comm: Communicator) -> Communicator:
    """Return the ranks as pipelines of so many stages. Collective.

    Raises:
        AgreedError: their number is no multiple of it, or they are on another mesh, with exit code 2.
    """
    comm.agree("configuration", lambda: pipelines(stages))
    return ranks(stages)


def lay_out(model: Model) -> None:
    """Let a model's weights lie in `pairs` on the current distribution's mesh."""
    own = distribution()
    assert own is not None
    layouts = LayoutMap(own.device_mesh)
    for one, axes in pairs(model, own.device_mesh.lengths).items():
        layouts[one.path] = axes
    set_distribution(ModelParallel(layout_map=layouts, batch_dim_name=BATCH))


def mesh_of(model: Model, lengths: Mapping[str, int]) -> Mesh:
    """Return a mesh with weights in `pairs`, for who explains the model's program."""
    laid = pairs(model, lengths)

    def given(variable: Variable, slot_of: Variable | None) -> Axes | None:
        of = variable if slot_of is None else slot_of
        return laid.get(of) if of.shape == variable.shape else None

    return Mesh(lengths, given)


def pairs(model: Model, lengths: Mapping[str, int]) -> dict[Variable, Axes]:
    """Choose layouts of a model's weights: of each pair of layers by columns and then by rows, as in Megatron-LM.

    The first layer of a pair has its part of the outputs, the second one takes them as its part of the inputs, and one
    all-reduce makes the sum (M. Shoeybi et al., arXiv:1909.08053). What has no partner stays whole.

    Args:
        model: that has its weights.
        lengths: of the mesh's axes.
    """
    found: dict[Variable, Axes] = {}
    for axis, length in [(name, length) for name, length in lengths.items() if name != BATCH]:
        layers = list(_pairable(model._flatten_layers(), length))
        for first, second in zip(layers[::2], layers[1::2], strict=False):
            for layer, sharded in ((first, -1), (second, -2)):
                for one in layer.trainable_weights:
                    if one.ndim >= -sharded:
                        found[one] = tuple(axis if n == sharded + one.ndim else None for n in range(one.ndim))
    return found


def _pairable(layers: Iterable[Layer], ranks: int) -> Iterable[Layer]:
    """Yield layers of whose inputs and outputs each rank can have a part."""
    for one in layers:
        kernel = max(one.trainable_weights, key=lambda weight: weight.ndim, default=None)
        if isinstance(one, _FROM_TO) and kernel is not None and min(kernel.shape[-2:]) >= ranks > 1:
            yield one
