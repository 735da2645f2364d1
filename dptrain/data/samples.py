"""Reads raw samples for a trained model: a table or pictures, whichever it was trained on."""

from pathlib import Path

from dptrain.comm.base import Communicator
from dptrain.data.preprocessing import Preprocessing, Unseen
from dptrain.data.raw import RawSamples
from dptrain.data.readers.pictures import encode_pictures
from dptrain.data.readers.text_folder import TEXT
from dptrain.data.sources import DEFAULT_MAX_BYTES
from dptrain.data.tabular.table_loading import encode_file
from dptrain.data.tabular.tables import ENDINGS, is_table
from dptrain.errors import DataError


def is_raw(path: str, preprocessing: Preprocessing | None) -> bool:
    """Whether `read_samples` opens this file for a model."""
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
    """Return x of a table or of pictures, and y where they have targets; one copy a node. Collective."""

    def check() -> Preprocessing:
        if preprocessing is None or (is_table(path) and preprocessing.kind != "table"):
            raise DataError(f"{path}: a table, and the model was not trained on one")
        reads_folder = Path(path).is_dir() and [column.name for column in preprocessing.columns] == [TEXT]
        if preprocessing.kind == "table" and not is_table(path) and not reads_folder:
            raise DataError(
                f"{path}: the model was trained on a table; expected a file that ends in {', '.join(ENDINGS)}"
            )
        return preprocessing

    checked = comm.agree("data", check)
    if checked.kind == "table":
        return encode_file(path, checked, comm, max_bytes=max_bytes, unseen=unseen)
    return encode_pictures(path, checked, comm, max_bytes=max_bytes, bad=bad)
