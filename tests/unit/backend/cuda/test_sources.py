"""Where the CUDA sources are found."""

import pytest

from dptrain.backend.cuda.sources import kernels_dir
from dptrain.errors import DeviceError


def test_kernels_of_this_checkout():
    assert (kernels_dir() / "README.md").is_file()


def test_kernels_inside_a_wheel_come_first(tmp_path):
    package = tmp_path / "dptrain"
    for place in (package / "_kernels", tmp_path / "kernels"):
        place.mkdir(parents=True)
        (place / "README.md").write_text("")
    assert kernels_dir(package) == package / "_kernels"
    (package / "_kernels" / "README.md").unlink()
    assert kernels_dir(package) == tmp_path / "kernels"


def test_no_kernels_names_both_places(tmp_path):
    with pytest.raises(DeviceError) as caught:
        kernels_dir(tmp_path / "dptrain")
    assert str(tmp_path / "dptrain" / "_kernels") in str(caught.value)
    assert str(tmp_path / "kernels") in str(caught.value)
