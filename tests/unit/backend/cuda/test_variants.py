"""Choices that hardware decides."""

import pytest

from dptrain.backend.cuda.variants import Variants, chosen_variants
from dptrain.errors import ConfigError


def test_the_environment_changes_the_defaults(monkeypatch):
    monkeypatch.delenv("DPTRAIN_CUDA_VARIANTS", raising=False)
    assert chosen_variants() == Variants()
    monkeypatch.setenv("DPTRAIN_CUDA_VARIANTS", "dependent=1,columns=8")
    assert chosen_variants() == Variants(dependent=True, columns=8)
    assert chosen_variants("grouped=0") == Variants(grouped=False)


@pytest.mark.parametrize("text", ["colums=8", "columns", "columns=-1", "columns=wide", "columns=9"])
def test_what_is_no_choice_is_refused(text):
    with pytest.raises(ConfigError, match="DPTRAIN_CUDA_VARIANTS"):
        chosen_variants(text)
