"""Files of a model that is on a GPU, on the emulated driver."""

import importlib.util

import pytest

from tests.conftest import ROOT
from tests.emulated import emulated_ranks, inside_emulator, skip_without_emulator

pytestmark = pytest.mark.skipif(inside_emulator(), reason="starts the emulator itself")
SCRIPT = str(ROOT / "tests" / "e2e" / "scripts" / "files_on_cuda.py")


@pytest.mark.long
def test_training_goes_on_where_it_stopped(tmp_path):
    if importlib.util.find_spec("h5py") is None:
        pytest.skip("Keras' files need the extra 'keras-files'")
    skip_without_emulator()
    done = emulated_ranks(2, SCRIPT, str(tmp_path), EMULATOR_DEVICES="2")
    assert (done.code, done.err) == (0, "")
    # Lines of two ranks may arrive as one.
    assert done.out.replace("\n", "") == "samesame"
