"""Kernels are composed and compiled once, those of a validation beside those of the training."""

import threading

import numpy as np

from dptrain import Sequential, layers
from dptrain.backend.cuda import compile as compiling


def test_a_training_and_its_validation_are_composed_and_compiled_once(cuda_backend, monkeypatch, tmp_path):
    from dptrain.backend.cuda import backend as module

    composed, compiled, threads = [], [], set[str]()

    class Counted(module.Composition):
        def __init__(self, program, *arguments, **options):
            composed.append(program)
            super().__init__(program, *arguments, **options)

    def counted(nvcc, source, architecture):
        compiled.append(source.name)
        threads.add(threading.current_thread().name)
        return compile_(nvcc, source, architecture)

    compile_ = compiling._compile
    monkeypatch.setattr(module, "Composition", Counted)
    monkeypatch.setattr(compiling, "_compile", counted)
    monkeypatch.setenv("DPTRAIN_CACHE", str(tmp_path))
    x = np.random.default_rng(0).normal(size=(24, 5)).astype(np.float32)
    model = Sequential([layers.Dense(3, input_shape=(5,))])
    model.compile("sgd", "mse", device="cuda")
    for _ in range(2):
        model.fit(x, x[:, :3], batch_size=8, validation_data=(x, x[:, :3]), verbose=0)
    assert len(composed) == 2
    assert sorted(compiled) == ["digest.cu", "program.cu", "program.cu"]
    assert any("dptrain nvcc" in name for name in threads), "ahead of what needs them"
    model.evaluate(x[:6], x[:6, :3], batch_size=6, verbose=0)
    assert compiled.count("program.cu") == 2, "whatever the rows"
