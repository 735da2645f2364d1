"""Compilers that hang, say nothing or make what does not load."""

import os
import stat

import pytest

from dptrain.backend.cpu import compile as compiling
from dptrain.errors import DeviceError

SOURCE = 'extern "C" int dp_seven() { return 7; }\n'


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """Return a function that makes a compiler of the lines of a shell script, and names it."""
    monkeypatch.setenv("DPTRAIN_CACHE", str(tmp_path / "cache"))

    def write(lines, version="echo good 1.0"):
        path = tmp_path / "c plus"
        path.write_text(f'#!/bin/sh\nif [ "$1" = --version ]; then {version}; exit; fi\nfor out; do :; done\n{lines}\n')
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        compiling.library.cache_clear()
        return f"'{path}'"

    yield write
    compiling.library.cache_clear()


def load(by):
    return compiling.library(SOURCE, (), by=by).dp_seven()


@pytest.mark.parametrize(
    ("version", "first_line"),
    [("true", ""), ("printf '\\377good\\n'", "\ufffdgood"), ("echo good 1.0; echo more", "good 1.0")],
)
def test_any_version_will_do(compiler, version, first_line):
    name = compiler("", version)
    assert compiling.compiler_named(name)[1] == first_line


def test_a_compiler_that_cannot_be_asked_is_not_used(compiler, monkeypatch, capfd, tmp_path):
    monkeypatch.setattr(compiling, "_PATIENCE_FOR_VERSION", 0.2)
    assert compiling.compiler_named(compiler("", "sleep 60")) is None
    assert "--version: no answer within 0.2 s; this compiler is not used" in capfd.readouterr().err
    assert compiling.compiler_named("g++ 'x") is None
    assert 'CXX = "g++ \'x": No closing quotation; this' in capfd.readouterr().err
    (tmp_path / "no-program").write_bytes(b"\x7fELF")
    os.chmod(tmp_path / "no-program", 0o700)
    assert compiling.compiler_named(str(tmp_path / "no-program")) is None
    assert "Exec format error" in capfd.readouterr().err


def test_a_compilation_has_an_end(compiler, monkeypatch):
    monkeypatch.setattr(compiling, "_PATIENCE", 0.2)
    with pytest.raises(DeviceError, match=r"has not compiled a program within 0\.2 s: set CXX"):
        load(compiler('case "$out" in *program.so) sleep 60;; esac'))


@pytest.mark.skipif(compiling.compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize(
    "spoil",
    [
        'echo no library > "$out"',
        'c++ "$@" && truncate -s 5000 "$out"',
        'c++ "$@" && truncate -s -1 "$out"',
        'echo "int x;" | c++ -c -xc++ - -o "$out"',
    ],
)
def test_what_does_not_load_is_not_kept(compiler, spoil):
    by = compiler(spoil)
    with pytest.raises(DeviceError, match=r"a compiled program does not load: .*; set DPTRAIN_CACHE, or CXX"):
        load(by)
    assert load(compiler('c++ "$@"')) == 7


def test_whatever_changes_a_library_changes_its_name(monkeypatch):
    """Else a cache that machines share gives one of them what crashes there, or computes something else."""
    asked: list[str] = []
    names = []

    class StopError(Exception):
        pass

    def note(folder, name, make, check):
        asked.append(name)
        raise StopError

    def name_of(source="int f();", headers=("scalar.h",), options=()):
        for function in (compiling.compiler, compiling._cpu, compiling._header):
            getattr(function, "cache_clear", lambda: None)()
        with pytest.raises(StopError):
            compiling.library.__wrapped__(source, headers, options)
        return asked[-1]

    compiler = (("c++",), "version 1")
    monkeypatch.setattr(compiling, "compiled", note)
    monkeypatch.setattr(compiling, "compiler", lambda: compiler)
    monkeypatch.setattr(compiling, "_cpu", lambda: "avx2")
    monkeypatch.setattr(compiling, "_header", lambda name: f"// {name}")
    usual = name_of()
    assert name_of() == usual
    names = [usual, name_of(source="int g();"), name_of(headers=("half.h",)), name_of(options=("-pthread",))]
    for attribute, value in {
        "compiler": lambda: (("g++",), "version 1"),
        "_cpu": lambda: "avx512f",
        "_header": lambda name: f"// another {name}",
        "OPTIONS": (*compiling.OPTIONS, "-O2"),
    }.items():
        with monkeypatch.context() as changed:
            changed.setattr(compiling, attribute, value)
            names.append(name_of())
    compiler = (("c++",), "version 2")
    names.append(name_of())
    assert len(set(names)) == len(names)


def test_the_cpu_is_part_of_what_a_library_depends_on():
    assert "-march=native" in compiling.OPTIONS
    assert compiling._cpu()
