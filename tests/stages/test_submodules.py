"""Submodules by their names."""

from __future__ import annotations

import pytest
from torch import nn

from lightning_rotor.stages.submodules import submodule_of


def test_a_submodule_may_be_named_as_a_method() -> None:
    root = nn.Module()
    root.add_module("inner", nn.Module())
    root.inner._modules["modules"] = layers = nn.ModuleList([nn.Linear(2, 2)])
    assert submodule_of(root, "") is root
    assert submodule_of(root, "inner.modules") is layers
    assert submodule_of(root, "inner.modules.0") is layers[0]
    with pytest.raises(AttributeError, match="other"):
        submodule_of(root, "inner.other")
