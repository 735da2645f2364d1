"""Names of compiled files: whatever the content depends on changes the name, each by itself."""

import pytest

from dptrain.backend.cpu import compile as native
from dptrain.backend.cuda import compile as cuda
from dptrain.backend.cuda.sources import kernels_dir


class NamedError(Exception):
    """Tells the name of a file instead of compiling it."""


def _refuse(*arguments):
    raise NamedError(next(argument for argument in arguments if isinstance(argument, str)))


def native_name(source="text", headers=("scalar.h",), options=(), by=None):
    native.library.cache_clear()
    with pytest.raises(NamedError) as named:
        native.library(source, headers, options, by)
    native.library.cache_clear()
    return str(named.value)


# What changes, by a function of pytest's monkeypatch, or an argument.
NATIVE = {
    "source": {"source": "other text"},
    "headers": {"headers": ("scalar.h", "half.h")},
    "order of headers": {"headers": ("half.h", "scalar.h")},
    "options": {"options": ("-pthread",)},
    "text of a header": lambda patch: patch.setattr(native, "_header", lambda name: f"other {name}"),
    "all options": lambda patch: patch.setattr(native, "OPTIONS", (*native.OPTIONS, "-g")),
    "an option less": lambda patch: patch.setattr(native, "OPTIONS", native.OPTIONS[:-1]),
    "CPU": lambda patch: patch.setattr(native, "_cpu", lambda: "another CPU"),
    "compiler": lambda patch: patch.setattr(native, "compiler", lambda: (("clang++",), "version 1")),
    "arguments of the compiler": lambda patch: patch.setattr(
        native, "compiler", lambda: (("g++", "-m32"), "version 1")
    ),
    "version of the compiler": lambda patch: patch.setattr(native, "compiler", lambda: (("g++",), "version 2")),
}


def test_names_of_native_libraries(monkeypatch):
    monkeypatch.setattr(native, "compiled", _refuse)
    monkeypatch.setattr(native, "compiler", lambda: (("g++",), "version 1"))
    names = {"nothing": native_name()}
    assert native_name() == names["nothing"]
    for what, change in NATIVE.items():
        with monkeypatch.context() as patch:
            if callable(change):
                change(patch)
            names[what] = native_name(**({} if callable(change) else change))
    assert len(set(names.values())) == len(names), names


def cuda_names(text="text", architecture="sm_90", name="program"):
    """Return the names of a cubin, of its resources, and of a user's own kernel."""
    names = []
    for make in (cuda.compiled_text, cuda.resources_of_text, cuda.compiled_own):
        with pytest.raises(NamedError) as named:
            make(name, text, architecture)
        names.append(str(named.value))
    return names


CUDA = {
    "source": {"text": "other text"},
    "architecture": {"architecture": "sm_80"},
    "name": {"name": "another"},
    "options": lambda patch: patch.setattr(cuda, "OPTIONS", (*cuda.OPTIONS, "-G")),
    "version of nvcc": lambda patch: patch.setattr(cuda, "_version", lambda nvcc: "release 2"),
    "flags before": lambda patch: patch.setenv("NVCC_PREPEND_FLAGS", "-G"),
    "flags behind": lambda patch: patch.setenv("NVCC_APPEND_FLAGS", "-G"),
}


@pytest.mark.parametrize("header", ["scalar.h", "common.cuh", ""])
def test_names_of_cuda_files(monkeypatch, tmp_path, header):
    for variable in ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(cuda, "_kept", _refuse)
    monkeypatch.setattr(cuda, "find_nvcc", lambda: "nvcc")
    monkeypatch.setattr(cuda, "_version", lambda nvcc: "release 1")
    monkeypatch.setattr(cuda, "_includes", lambda nvcc, path, architecture: [path])
    names = cuda_names()
    assert cuda_names() == names
    if header:
        for path in kernels_dir().iterdir():
            (tmp_path / path.name).write_bytes(path.read_bytes() + (b"//" if path.name == header else b""))
        monkeypatch.setattr(cuda, "kernels_dir", lambda: tmp_path)
        names += cuda_names()
    else:
        for change in CUDA.values():
            with monkeypatch.context() as patch:
                if callable(change):
                    change(patch)
                names += cuda_names(**({} if callable(change) else change))
    assert len(set(names)) == len(names), names
