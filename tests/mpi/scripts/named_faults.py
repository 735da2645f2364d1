"""Plants one fault after the other, each in several samples, rows or files, and prints what is said of them as JSON.

Arguments: a folder, the samples, and the faults. One that a single rank reports ends the job, and is the only one.
"""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import dptrain as dp
from dptrain import layers, ops, utils
from dptrain.comm import current
from dptrain.data.readers.pictures import PictureOptions, load_pictures
from dptrain.data.tabular.table_columns import TableOptions
from dptrain.data.tabular.table_loading import load_table
from dptrain.errors import DptrainError

ROWS, BATCH = 40, 10
FOLDER, COMM, RNG = Path(sys.argv[1]), current(), np.random.default_rng(0)
X, Y, IDS = RNG.normal(size=(ROWS, 3)), RNG.integers(0, 4, ROWS), RNG.integers(0, 9, (ROWS, 3))


def changed(values: np.ndarray, row: Any, value: float) -> np.ndarray:
    values = values.copy()
    values[row] = value
    return values


def dense(loss: str = "sparse_categorical_crossentropy") -> dp.Sequential:
    last = layers.Dense(4, "softmax") if loss.startswith("sparse") else layers.Dense(1)
    model = dp.Sequential([dp.Input((3,)), last], seed=1)
    model.compile("sgd", loss, device="cpu")
    return model


def embedding(*before: Any, after: Any = None) -> dp.Sequential:
    table = [layers.Embedding(9, 2), *([] if after is None else [after]), layers.Flatten(), layers.Dense(4, "softmax")]
    stack = [dp.Input((3,), dtype="int64"), *before, *table]
    model = dp.Sequential(stack, seed=1)
    model.compile("sgd", "sparse_categorical_crossentropy", device="cpu")
    return model


def fit(model: dp.Sequential, x: Any, y: Any, **options: Any) -> Any:
    return model.fit(x, y, batch_size=BATCH, verbose=0, **options).history


def batches(x: np.ndarray, y: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for first in range(0, ROWS, BATCH):
        yield x[first : first + BATCH], y[first : first + BATCH]


class Batches(utils.PyDataset):
    """What `batches` yields."""

    def __init__(self, x: np.ndarray, y: np.ndarray) -> None:
        super().__init__()
        self.parts = list(batches(x, y))

    def __len__(self) -> int:
        return len(self.parts)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return self.parts[index]


def fit_batches(model: dp.Sequential, x: np.ndarray, y: np.ndarray) -> Any:
    return model.fit(batches(x, y), steps_per_epoch=4, shuffle=False, verbose=0).history


def fit_data_set(model: dp.Sequential, x: np.ndarray, y: np.ndarray) -> Any:
    return model.fit(Batches(x, y), shuffle=False, verbose=0).history


def root() -> dp.Sequential:
    model = dp.Sequential([dp.Input((3,)), layers.Lambda(ops.sqrt), layers.Dense(1)], seed=1)
    model.compile("sgd", "mse", device="cpu")
    return model


def steps_weighted(row: int) -> Any:
    model = dp.Sequential([dp.Input((3, 1)), layers.Dense(1)], seed=1)
    model.compile("sgd", "mse", device="cpu")
    return fit(model, X[..., None], X[..., None], sample_weight=changed(np.ones((ROWS, 3)), (row, 2), np.nan))


def outlier(row: int) -> Any:
    x = np.tile(X, (15, 1))
    y = changed(x.sum(1), 500 + row, 1e4)
    return fit(dense("mse"), x, y, shuffle=False, skip_outliers=8)["skipped_steps"]


def on_rank_0(name: str, write: Callable[[Path], None]) -> Path:
    """Write a file or folder on rank 0, and wait for it."""
    COMM.agree("writing", lambda: write(FOLDER / name) if COMM.rank == 0 else None)
    return FOLDER / name


def table(row: int) -> Any:
    lines = [f"{n % 7}.5,{'ab'[n % 2]}" for n in range(ROWS)]
    lines[row] = "word,a"
    path = on_rank_0(f"{row}.csv", lambda path: path.write_text("\n".join(["x,y", *lines])))
    return load_table(str(path), TableOptions("y", number_columns=("x",)), COMM)


def texts(row: int) -> Any:
    def write(path: Path) -> None:
        for n in range(ROWS):
            (path / "ab"[n % 2]).mkdir(parents=True, exist_ok=True)
            (path / "ab"[n % 2] / f"{n:02}.txt").write_bytes(b"\xe9" if n == row else b"text")

    return load_table(str(on_rank_0(f"texts{row}", write)), TableOptions("class", texts=("text",)), COMM)


def pictures(row: int) -> Path:
    def write(path: Path) -> None:
        for n in range(ROWS):
            (path / "ab"[n % 2]).mkdir(parents=True, exist_ok=True)
            file = path / "ab"[n % 2] / f"{n:02}.png"
            Image.fromarray(np.full((4, 4), n, np.uint8)).save(file)
            if n == row:
                file.write_bytes(file.read_bytes()[:-25])  # its header is good

    return on_rank_0(f"pictures{row}", write)


def folder_of_pictures(row: int) -> Any:
    data = utils.image_dataset_from_directory(pictures(row), image_size=(4, 4), batch_size=BATCH, seed=0, verbose=False)
    model = dp.Sequential([dp.Input((4, 4, 3)), layers.Flatten(), layers.Dense(2, "softmax")], seed=1)
    model.compile("sgd", "sparse_categorical_crossentropy", device="cpu")
    return model.fit(data, verbose=0).history


FAULTS: dict[str, Callable[[int], Any]] = {
    "NaN": lambda row: fit(dense(), changed(X, row, np.nan), Y, shuffle=False),
    "NaN, shuffled": lambda row: fit(dense(), changed(X, row, np.nan), Y),
    "NaN in small batches": lambda row: dense().fit(changed(X, row, np.nan), Y, batch_size=7, verbose=0),
    "NaN in one batch": lambda row: dense().fit(changed(X, row, np.nan), Y, batch_size=ROWS, verbose=0),
    "NaN of a generator": lambda row: fit_batches(dense(), changed(X, row, np.nan), Y),
    "NaN of a data set": lambda row: fit_data_set(dense(), changed(X, row, np.nan), Y),
    "NaN in targets": lambda row: fit(dense("mse"), X, changed(X[:, :1], row, np.nan)),
    "NaN in weights": lambda row: fit(dense(), X, Y, sample_weight=changed(np.ones(ROWS), row, np.nan)),
    "NaN in weights of steps": steps_weighted,
    "root": lambda row: root().fit(changed(abs(X) + 1, (row, 1), -1), X[:, :1], batch_size=16, verbose=0),
    "overflow": lambda row: fit(dense("mse"), changed(X.astype(np.float32), row, 1e30), X[:, :1]),
    "label": lambda row: fit(dense(), X, changed(Y, row, 4)),
    "label of a generator": lambda row: fit_batches(dense(), X, changed(Y, row, 4)),
    "label of a data set": lambda row: fit_data_set(dense(), X, changed(Y, row, 4)),
    "label of a validation": lambda row: fit(dense(), X, Y, validation_data=(X, changed(Y, row, 7))),
    "label to evaluate": lambda row: dense().evaluate(X, changed(Y, row, 4), verbose=0),
    "id": lambda row: fit(embedding(), changed(IDS, row, 9), Y),
    "id among all ids": lambda row: fit(
        embedding(
            layers.Lambda(lambda x: ops.reshape(x, (-1,))), after=layers.Lambda(lambda x: ops.reshape(x, (-1, 6)))
        ),
        changed(IDS, (row, 1), 9),
        Y,
    ),
    "id to evaluate": lambda row: embedding().evaluate(changed(IDS, row, 9), Y, batch_size=BATCH, verbose=0),
    "id to predict": lambda row: embedding().predict(changed(IDS, row, 9), batch_size=BATCH, verbose=0),
    "id of a generator": lambda row: fit_batches(embedding(), changed(IDS, row, 9), Y),
    "id of a data set": lambda row: fit_data_set(embedding(), changed(IDS, row, 9), Y),
    "outlier": outlier,
    "cell of a table": table,
    "text": texts,
    "picture": lambda row: load_pictures(str(pictures(row)), PictureOptions(bad="skip"), COMM).notes,
    "picture of a data set": folder_of_pictures,
}


def said(fault: Callable[[int], Any], row: int) -> str:
    try:
        text = str(fault(row))
    except DptrainError as error:
        text = f"{int(error.exit_code)} {error}"
    return text.replace(str(FOLDER), "")


places, names = [int(row) for row in sys.argv[2].split(",")], sys.argv[3:]
if len(places) == 1:
    FAULTS[names[0]](places[0])
messages = {name: [said(FAULTS[name], row) for row in places] for name in names}
if COMM.rank == 0:
    print(json.dumps(messages))
