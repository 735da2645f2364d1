"""The same fault names the same step and the same sample, on one rank and on three."""

import re

import numpy as np
import pytest

from tests.launching import python

SCRIPT = """
import sys
import numpy as np
import dptrain as dp
from dptrain import ops
from dptrain.comm import current

def train(kind, sample, batch_size, shuffle):
    x = np.random.default_rng(0).uniform(1, 2, (40, 3)).astype(np.float32)
    y = x[:, :1].copy()
    if kind == "op":
        x[sample, 1] = -1
    else:
        (x if kind == "x" else y)[sample] = np.nan
    roots = [dp.layers.Lambda(ops.sqrt)] if kind == "op" else []
    model = dp.Sequential([dp.layers.Input((3,)), *roots, dp.layers.Dense(1)], seed=1)
    model.compile("sgd", "mse")
    try:
        model.fit(x, y, batch_size=batch_size, shuffle=shuffle, verbose=0)
    except ArithmeticError as error:
        return str(error)
    except dp.errors.AgreedError as error:
        assert error.exit_code == 76
        return str(error)

for case in sys.argv[1:]:
    kind, *numbers = case.split(",")
    text = train(kind, *map(int, numbers[:2]), numbers[2] == "True")
    if current().rank == 0:
        print(text, flush=True)
"""
KINDS = ("x", "y", "op")


@pytest.fixture(scope="module")
def messages():
    """The cases, random samples in random batches, and what is said of them on one rank and on three."""
    draw = np.random.default_rng(5)
    cases = [
        (kind, int(draw.integers(40)), int(draw.choice([5, 7, 16, 40])), bool(draw.integers(2)))
        for kind in KINDS
        for _ in range(4)
    ]
    words = [",".join(map(str, case)) for case in cases]
    done = [python(ranks, "-c", SCRIPT, *words, timeout=200) for ranks in (0, 3)]
    assert [job.code for job in done] == [0, 0], done[1].err
    return cases, [job.out.splitlines() for job in done]


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_fault_names_the_same_sample_on_any_number_of_ranks(messages, kind):
    cases, texts = messages
    chosen = [(case, *said) for case, *said in zip(cases, *texts, strict=True) if case[0] == kind]
    assert len(chosen) == 4
    for (_, sample, *_), *said in chosen:
        facts = [re.findall(r"step \d+ of epoch 1|samples? \d+(?:, \d+)*", text) for text in said]
        assert facts[0] == facts[1], said
        assert f"sample {sample}" in facts[0], said
