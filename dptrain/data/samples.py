"""Raw samples for a model that is there already: a table or pictures, as the training's were."""

from dptrain.comm.base import Communicator
from dptrain.data.pictures import encode_pictures
from dptrain.data.preprocessing import Preprocessing, Unseen
from dptrain.data.raw import RawSamples
from dptrain.data.sources import DEFAULT_MAX_BYTES
from dptrain.data.table_loading import encode_file
from dptrain.data.tables import ENDINGS, is_table
from dptrain.errors import DataError


def is_raw(path: str, preprocessing: Preprocessing | None) -> bool:
    """Return whether `read_samples` is what opens a file for a model."""
    return is_table(path) or (preprocessing is not None and preprocessing.kind != "arrays")


def read_samples(
    path: str,
    preprocessing: Preprocessing | None,
    comm: Communicator,
    *,
    max_bytes: int = DEFAULT_MAX_BYTES,
    bad: str = "stop",
    unseen: Unseen | None = None,
) -> RawSamples:
    """Return x of raw samples, and y where they have targets. Collective.

    Args:
        path: of a table, a picture or a folder of pictures.
        preprocessing: the model's.
        comm: the ranks.
        max_bytes: the largest that a table's content, and x of it, may be; of pictures, what stays in memory.
        bad: "stop" at a file that is no good picture, or "skip" it.
        unseen: of a table, as `Preprocessing.encode`.

    Returns:
        One copy a node.

    Raises:
        AgreedError: on every rank, whatever was wrong on any: the file, its contents, or the model is not of such data.
    """

    def check() -> Preprocessing:
        if preprocessing is None or (is_table(path) and preprocessing.kind != "table"):
            raise DataError(f"{path}: a table, and the model was not trained on one")
        if preprocessing.kind == "table" and not is_table(path):
            raise DataError(
                f"{path}: the model was trained on a table; expected a file that ends in {', '.join(ENDINGS)}"
            )
        return preprocessing

    known = comm.agree("data", check)
    if known.kind == "table":
        return encode_file(path, known, comm, max_bytes=max_bytes, unseen=unseen)
    return encode_pictures(path, known, comm, max_bytes=max_bytes, bad=bad)
