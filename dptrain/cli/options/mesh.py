"""`--mesh`: arranges ranks in a grid, and shards a model's weights over it by default."""

from collections.abc import Iterable, Mapping

from dptrain.comm import Communicator
from dptrain.comm.mesh import BATCH, STAGE, check_lengths
from dptrain.distribution import DeviceMesh, LayoutMap, ModelParallel, distribution, set_distribution
from dptrain.distribution.placing import pipelines, ranks
from dptrain.errors import ConfigError
from dptrain.layers.base import Layer
from dptrain.layers.convolution import Conv2D
from dptrain.layers.core.dense import Dense
from dptrain.layers.core.embedding import Embedding
from dptrain.models import Model
from dptrain.models.explaining import Mesh
from dptrain.program.sharding.mesh import Axes
from dptrain.program.tensor import Variable

# Layers whose weights have the layer's inputs on the last axis but one, and its outputs on the last.
_FROM_TO = (Conv2D, Dense, Embedding)


def lengths_of(mesh: str) -> dict[str, int]:
    """Return the lengths of a mesh's axes, such as batch=2,model=2."""
    by_axis = {name: int(length) for name, length in (axis.split("=") for axis in mesh.split(","))}
    if STAGE in by_axis:
        raise ConfigError(f"mesh = {mesh!r}: the axis {STAGE!r} is reserved for pipelines; use --stages instead")
    return by_axis if BATCH in by_axis else {BATCH: 1, **by_axis}


def arranged(mesh: str, comm: Communicator, stages: int = 1) -> Communicator:
    """Arrange all ranks in a mesh, later in pipelines of `stages`, and return them. Collective."""
    lengths = comm.agree("configuration", lambda: lengths_of(mesh))
    comm.agree("configuration", lambda: check_lengths(lengths, comm.size))
    if stages > 1:
        comm.agree("configuration", lambda: pipelines(stages, lengths))
    grid = DeviceMesh(tuple(lengths.values()), list(lengths))
    set_distribution(ModelParallel(layout_map=LayoutMap(grid), batch_dim_name=BATCH))
    return ranks()


def in_stages(stages: int, comm: Communicator) -> Communicator:
    """Return the ranks as pipelines of so many stages. Collective."""
    comm.agree("configuration", lambda: pipelines(stages))
    return ranks(stages)


def lay_out(model: Model) -> None:
    """Lay a model's weights out as `pairs` on the current distribution's mesh."""
    current = distribution()
    assert current is not None
    layouts = LayoutMap(current.device_mesh)
    for weight, axes in pairs(model, current.device_mesh._lengths).items():
        layouts[weight.path] = axes
    set_distribution(ModelParallel(layout_map=layouts, batch_dim_name=BATCH))


def mesh_of(model: Model, lengths: Mapping[str, int]) -> Mesh:
    """Return a mesh with weights laid out as `pairs`, to explain the model's program."""
    laid = pairs(model, lengths)

    def axes_of(variable: Variable, slot_of: Variable | None) -> Axes | None:
        of = variable if slot_of is None else slot_of
        return laid.get(of) if of.shape == variable.shape else None

    return Mesh(lengths, axes_of)


def pairs(model: Model, lengths: Mapping[str, int]) -> dict[Variable, Axes]:
    """Choose layouts of a model's weights: alternately by columns and rows, as in Megatron-LM.

    The first layer of a pair shards its outputs, the second its inputs, and one all-reduce makes the sum (M. Shoeybi et
    al., arXiv:1909.08053). A layer without a partner stays whole.
    """
    layouts: dict[Variable, Axes] = {}
    for axis, length in [(name, length) for name, length in lengths.items() if name != BATCH]:
        layers = list(_pairable(model._flatten_layers(), length))
        for first, second in zip(layers[::2], layers[1::2], strict=False):
            for layer, sharded in ((first, -1), (second, -2)):
                for weight in layer.trainable_weights:
                    if weight.ndim >= -sharded:
                        layouts[weight] = tuple(
                            axis if n == sharded + weight.ndim else None for n in range(weight.ndim)
                        )
    return layouts


def _pairable(layers: Iterable[Layer], ranks: int) -> Iterable[Layer]:
    """Yield layers whose inputs and outputs can be sharded over the ranks."""
    for layer in layers:
        kernel = max(layer.trainable_weights, key=lambda weight: weight.ndim, default=None)
        if isinstance(layer, _FROM_TO) and kernel is not None and min(kernel.shape[-2:]) >= ranks > 1:
            yield layer
