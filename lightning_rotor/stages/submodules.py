"""Submodules by their names, also where a name is that of a method of ``nn.Module``."""

from __future__ import annotations

from torch import nn


def submodule_of(root: nn.Module, path: str) -> nn.Module:
    """The submodule at a dotted name, the module itself for none; ``AttributeError`` if there is none.

    Torch's own asks for an attribute, and of ``self.modules = nn.ModuleList(...)`` it finds the method.
    """
    module = root
    for name in path.split(".") if path else ():
        found = module._modules.get(name)
        # A property of the user's may lead to one, too.
        module = module.get_submodule(name) if found is None else found
    return module
