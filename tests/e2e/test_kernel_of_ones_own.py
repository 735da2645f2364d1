"""What docs/kernels.md says is typed as it stands: an op of one's own, checked, and its mistakes found."""

import re
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.emulated import emulated_ranks, inside_emulator
from tests.launching import Finished
from tests.sample import sample

pytestmark = pytest.mark.skipif(inside_emulator(), reason="starts the emulator itself")
PAGE = (ROOT / "docs" / "kernels.md").read_text(encoding="utf-8")


def shown(language: str) -> str:
    (text,) = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    return str(text)


def checked(folder: Path, source: str, **environment: str) -> Finished:
    (folder / "unit_rows.cu").write_text(source)
    (folder / "unit_rows.py").write_text(shown("python"))
    return emulated_ranks(1, "unit_rows.py", cwd=folder, timeout=300, **environment)


@pytest.mark.parametrize(
    "mode", sample([{}, {"EMULATOR_SANITIZE": "all", "EMULATOR_ORDER": "shuffled", "EMULATOR_SEED": "7"}], 2)
)
def test_a_right_kernel_prints_what_the_page_shows(tmp_path, mode):
    done = checked(tmp_path, shown("cuda"), **mode)
    assert (done.code, done.err) == (0, "")
    assert f"```text\n{done.out}```" in PAGE


@pytest.mark.parametrize(
    ("right", "wrong", "mode", "report"),
    sample([
        ("square += x[c] * x[c];", "square += x[c];", {},
         r"CheckError: op 'unit_rows' on cuda: 'y' differs first at \[0, 0\]"),
        ("    __syncthreads();  // the next sum uses the same memory\n", "", {"EMULATOR_SANITIZE": "race"},
         "emulator: race: read at unit_rows.cu:12 by .* and write at unit_rows.cu:6 by .*, in kernel unit_rows_grad"),
        ("c < columns; c += blockDim.x) y[c]", "c <= columns; c += blockDim.x) y[c]", {},
         "CheckError: op 'unit_rows' on cuda writes outside of its output 'y'"),
        ("c < columns; c += blockDim.x) y[c]", "c <= columns; c += blockDim.x) y[c]", {"EMULATOR_SANITIZE": "address"},
         "emulator: out of bounds: read of 4 bytes at .*, in kernel unit_rows, .* at unit_rows.cu:23"),
    ], 4, first=1),
)  # fmt: skip
def test_a_wrong_one_is_named_as_the_page_says(tmp_path, right, wrong, mode, report):
    source = shown("cuda")
    assert source.count(right) == 1
    done = checked(tmp_path, source.replace(right, wrong), EMULATOR_LEAKS="off", **mode)
    assert done.code == 1
    assert re.search(report, done.err)
