"""`--mesh`: the ranks as a grid, and which axes of a model's weights are sharded over it if nobody says it."""

from collections.abc import Iterable

from dptrain.comm import Communicator
from dptrain.comm.mesh import BATCH, check_lengths
from dptrain.distribution import DeviceMesh, LayoutMap, ModelParallel, distribution, set_distribution
from dptrain.distribution.placing import pipelines, ranks
from dptrain.layers.base import Layer
from dptrain.layers.convolution import Conv2D
from dptrain.layers.dense import Dense
from dptrain.layers.embedding import Embedding
from dptrain.models import Model

# Layers whose weights have the layer's inputs on the last axis but one, and its outputs on the last.
_FROM_TO = (Conv2D, Dense, Embedding)


def lengths_of(mesh: str) -> dict[str, int]:
    """Return the length of each axis of a mesh, such as batch=2,model=2."""
    found = {name: int(length) for name, length in (one.split("=") for one in mesh.split(","))}
    return found if BATCH in found else {BATCH: 1, **found}


def arranged(mesh: str, comm: Communicator) -> Communicator:
    """Let the ranks train on a mesh, and return them. Collective.

    Raises:
        AgreedError: there are not so many ranks, with exit code 2.
    """
    lengths = lengths_of(mesh)
    comm.agree("configuration", lambda: check_lengths(lengths, comm.size))
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
    """Choose layouts of a model's weights: of each pair of layers by columns and then by rows, as in Megatron-LM.

    The first layer of a pair has its part of the outputs, the second one takes them as its part of the inputs, and one
    all-reduce makes the sum (M. Shoeybi et al., arXiv:1909.08053). What has no partner stays whole.
    """
    own = distribution()
    assert own is not None
    layouts = LayoutMap(own.device_mesh)
    for axis, length in [(name, length) for name, length in own.device_mesh.lengths.items() if name != BATCH]:
        layers = list(_pairable(model.flat_layers(), length))
        for first, second in zip(layers[::2], layers[1::2], strict=False):
            for layer, sharded in ((first, -1), (second, -2)):
                for one in layer.trainable_weights:
                    if one.ndim >= -sharded:
                        layouts[one.path] = tuple(axis if n == sharded + one.ndim else None for n in range(one.ndim))
    set_distribution(ModelParallel(layout_map=layouts, batch_dim_name=BATCH))


def _pairable(layers: Iterable[Layer], ranks: int) -> Iterable[Layer]:
    """Yield layers of whose inputs and outputs each rank can have a part."""
    for one in layers:
        kernel = max(one.trainable_weights, key=lambda weight: weight.ndim, default=None)
        if isinstance(one, _FROM_TO) and kernel is not None and min(kernel.shape[-2:]) >= ranks > 1:
            yield one
