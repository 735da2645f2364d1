"""Every Python block of a page runs, in the order of the page, after what the page takes for granted.

`BEFORE` makes that: models, arrays and files of the least size. `INSTEAD` replaces what needs another machine, or a
training that takes long.
"""

import contextlib
import re

import numpy as np
import pytest

import dptrain as dp
from tests.conftest import ROOT
from tests.launching import dptrain

PAGES = {path.relative_to(ROOT).as_posix(): path for path in (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")))}
# Pages whose blocks are typed by another test, with what they print, or on several ranks.
ELSEWHERE = {
    "README.md": "tests/e2e/test_first_minutes.py",
    "docs/distribution.md": "tests/unit/distribution/test_placing.py",
    "docs/kernels.md": "tests/e2e/test_kernel_of_ones_own.py",
    "docs/tutorial.md": "tests/e2e/test_tutorial.py",
}
# They train by the command line, and sweep.
LONG = ("docs/data.md", "docs/sweeps.md")
BLOCKS = [
    pytest.param(page, marks=pytest.mark.long if page in LONG else ())
    for page, path in PAGES.items()
    if "```python\n" in path.read_text(encoding="utf-8") and page not in ELSEWHERE
]
START = """
import numpy as np
import dptrain as dp
from dptrain import layers, ops
rng = np.random.default_rng(0)
"""
DIGITS = """
x, y = rng.integers(0, 255, (60, 784)).astype("float32"), rng.integers(0, 10, 60)
x_test, y_test = x_val, y_val = x[:20], y[:20]
"""
LANGUAGE_MODEL = """
model = dp.Sequential([layers.Input((64,)), layers.Embedding(10, 4), layers.Dense(10)])
model.compile("adam", dp.losses.SparseCategoricalCrossentropy(from_logits=True))
"""
# Before a page's block of this index.
BEFORE = {
    ("docs/data.md", 0): """
from PIL import Image
from pathlib import Path
for kind in ("cat", "dog"):
    Path("pets", kind).mkdir(parents=True)
    for index in range(5):
        Image.new("RGB", (8, 8), (index, 0, 0)).save(f"pets/{kind}/{index}.png")
model = dp.Sequential([layers.Input((64, 64, 3)), layers.GlobalAveragePooling2D(), layers.Dense(1, "sigmoid")])
model.compile("adam", "binary_crossentropy")
""",
    ("docs/data.md", 1): """
for kind in ("good", "bad"):
    Path("reviews", kind).mkdir(parents=True)
    for index in range(5):
        Path("reviews", kind, f"{index}.txt").write_text(f"a {kind} film {index}")
model = dp.Sequential([layers.Input((50,)), layers.Embedding(1000, 4), layers.Flatten(), layers.Dense(1, "sigmoid")])
model.compile("adam", "binary_crossentropy")
""",
    ("docs/data.md", 2): """
import pandas
for folder in ("corpus", "web", "books"):
    Path(folder).mkdir()
    (np.arange(2000) % 10).astype("uint16").tofile(f"{folder}/0.bin")
Path("rows").mkdir()
rows = {"score": rng.random(200), "features": rng.random(200), "label": np.arange(200) % 2}
pandas.DataFrame(rows).to_parquet("rows/0.parquet")
model = dp.Sequential([layers.Input((256,)), layers.Embedding(10, 4), layers.Dense(10, "softmax")])
model.compile("adam", "sparse_categorical_crossentropy")
web, books = ("web/*.bin", "books/*.bin")
web, books = (dp.utils.ShardedDataset(urls, batch_size=4, sequence_length=16) for urls in (web, books))
""",
    ("docs/data.md", 3): "texts = [rng.integers(0, 50, length) for length in (9, 5, 7)]",
    ("docs/data.md", 4): """
pandas.DataFrame({"a": [0.5, 1.5] * 20, "b": [1.5, 0.25, 2.75, 3.5] * 10}).to_csv("new.csv", index=False)
trained("--data", "new.csv", "--target", "b", "--epochs", "1", "--out", "runs/X")
""",
    ("docs/generation.md", 0): LANGUAGE_MODEL + 'model.save("gpt.keras")',
    ("docs/program.md", 1): """
from dptrain.program.passes import rewritten
from dptrain.program.sharding.mesh import ALL_REDUCE
""",
    ("docs/program.md", 4): """
from dptrain.ops.elementwise import Element, broadcast_shape, elementwise, floating_dtype, op
""",
    ("docs/pruning.md", 0): DIGITS,
    ("docs/python.md", 4): """
texts = np.array(["a good film", "a bad film"])
def classifier(ids):
    return layers.Dense(1)(layers.Flatten()(layers.Embedding(1000, 2)(ids)))
""",
    ("docs/python.md", 7): """
model = dp.Sequential([dp.layers.Input((3,)), dp.layers.Dense(1)])
optimizer, loss_fn = dp.optimizers.Adam(), lambda y, y_pred: ops.mean((y - y_pred) ** 2)
batches = [(np.ones((4, 3), "float32"), np.ones((4, 1), "float32"))] * 2
""",
    ("docs/python.md", 8): 'SWISH = ""',
    ("docs/serving.md", 0): """
model = dp.Sequential([layers.Input((3,)), layers.Dense(1)])
model.export("model.onnx", format="onnx", verbose=False)
from pathlib import Path
Path("runs/20261123-101500-strokes").mkdir(parents=True)
model.save("runs/20261123-101500-strokes/model.keras")
x = np.ones((4, 3))
""",
    ("docs/sweeps.md", 0): DIGITS,
    ("docs/sweeps.md", 1): """
def build_model():
    model = dp.Sequential([layers.Input((784,)), layers.Dense(10, "softmax")])
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model
""",
}
# After a block that only defines something.
AFTER = {
    ("docs/generation.md", 2): """
greedy = Greedy(model.input, model.output)
greedy.compile(loss="mse")
assert greedy.predict(np.ones((2, 64), "int32"), verbose=0).shape == (2, 64)
""",
    ("docs/python.md", 5): """
mine = Mine([layers.Input((3,)), layers.Dense(1)])
mine.compile("adam", "mse")
mine.fit(np.ones((8, 3), "float32"), np.ones((8, 1), "float32"), verbose=0)
""",
    ("docs/training.md", 0): "assert build_model((28, 28), 10, units=3).output_shape == (None, 10)",
}
INSTEAD = {
    "docs/data.md": {
        **{'"s3://bucket/rows/"': '"rows/"', "epochs=10": "epochs=1", "epochs=3": "epochs=1"},
        **{"length=1024": "length=16", "50_257": "50"},
    },
    "docs/python.md": {
        'dp.datasets.load("fashion-mnist")': "digits",
        "model = dp.from_keras(keras_model)": "",  # with Keras' models: tests/against_keras/test_files.py
    },
    "docs/serving.md": {"import tritonclient.http": "raise Elsewhere"},  # a running server: tests/e2e/test_serve.py
    "docs/sweeps.md": {
        "seeds=range(8)": "seeds=range(2)",
        "samples=10": "samples=2",
        "[64, 128]": "[2, 4]",
        "epochs=5": "epochs=1",
        "seeds=8": "seeds=2",
        "epochs=15": "epochs=1",
    },
}
NEEDS = {
    "docs/data.md": ("PIL", "pandas", "pyarrow"),
    "docs/serving.md": ("onnx", "onnxruntime"),
    "docs/sweeps.md": ("scipy",),
}


class ElsewhereError(Exception):
    """The rest of a block is tested by another file."""


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """Run in a folder of its own, and leave no policy and no distribution behind."""
    monkeypatch.chdir(tmp_path)
    yield
    forget()


def forget() -> None:
    """Let the next block begin as a script would."""
    dp.mixed_precision.set_global_policy("float32")
    dp.distribution.set_distribution(None)


def trained(*options: str) -> None:
    """Train by the command line."""
    done = dptrain(0, *options, fresh=True)
    assert done.code == 0, done.err


@pytest.mark.parametrize("page", BLOCKS)
def test_the_blocks_of_a_page_run(page, alone):
    for module in NEEDS.get(page, ()):
        pytest.importorskip(module)
    text = PAGES[page].read_text(encoding="utf-8")
    for old, new in INSTEAD.get(page, {}).items():
        assert old in text, f"{page} no longer has {old}"
        text = text.replace(old, new)
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    pixels = np.zeros((60, 28, 28), "uint8")
    names = {"trained": trained, "Elsewhere": ElsewhereError, "digits": ((pixels, np.arange(60) % 10),) * 2}
    exec(START, names)
    for index, block in enumerate(blocks):
        for source in (BEFORE.get((page, index), ""), block, AFTER.get((page, index), "")):
            with contextlib.suppress(ElsewhereError):
                exec(compile(source, f"{page}, block {index}", "exec"), names)
        forget()


def test_what_is_said_of_blocks_is_of_blocks_that_there_are():
    counts = {page: path.read_text(encoding="utf-8").count("```python\n") for page, path in PAGES.items()}
    for page, index in (*BEFORE, *AFTER):
        assert index < counts[page], (page, index)
    for page, path in ELSEWHERE.items():
        assert page.rpartition("/")[2] in (ROOT / path).read_text(encoding="utf-8"), f"{path} does not read {page}"
