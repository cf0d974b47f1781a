"""What a trace takes for granted about a model: modes, plain attributes, which submodules there are.

A trace is a snapshot. The code of a module that was traced through does not run any more, so whatever could have sent it another way must
be noticed when it changes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import nn

from lightning_rotor.sequential import has_own_call
from lightning_rotor.tracing.appearance import Same, frozen
from lightning_rotor.tracing.attribute_facts import AttributeFacts

_STRUCTURE = (set(nn.Module().__dict__) - {"training"}) | {"_lightning_rotor", "forward"}


class Watch:
    """What modules look like at one moment.

    Args:
        root: Its own hooks and ``forward`` run outside of the trace and do not matter.
        modules: The modules whose code is traced.
        tensors: Also watch which tensors the parameters and buffers are. Stages read them anew, so between calls it does not matter.
        outside: Says whether all that their code read outside of modules is as it was.
    """

    def __init__(
        self,
        root: nn.Module,
        modules: Iterable[nn.Module],
        *,
        tensors: bool = False,
        outside: Callable[[], bool] = lambda: True,
    ) -> None:
        self._root = root
        self._outside = outside
        self._tensors = tensors
        self._modules = tuple(modules)
        self._seen = [self._look(module) for module in self._modules]
        self._facts: AttributeFacts | None = None
        self._objects: list[Any] | None = None

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """The modules that are watched."""
        return self._modules

    def holds(self) -> bool:
        """Whether everything still looks the same. This runs at every training call."""
        if self._facts is None or not self._facts.hold():
            if self.changed() is not None:
                return False
            if not (self._tensors or any(isinstance(module, torch.jit.ScriptModule) for module in self._modules)):
                self._facts = AttributeFacts(self._modules, _own_names)
        return self._outside()

    def changed(self, besides: Collection[nn.Module] = ()) -> nn.Module | None:
        """The first module that looks different now, not counting some."""
        for module, seen in zip(self._modules, self._seen, strict=True):
            if module not in besides and self._look(module) != seen:
                return module
        return None

    def _look(self, module: nn.Module) -> Any:
        attributes = {name: frozen(module.__dict__[name]) for name in _own_names(module)}
        return (
            type(module),
            None if isinstance(module, torch.jit.ScriptModule) else Same(type(module).forward),
            module is self._root or has_own_call(module),
            attributes,
            {key: Same(child) for key, child in module._modules.items()},
            *(
                {key: Same(tensor) if self._tensors else tensor is None for key, tensor in tensors.items()}
                for tensors in (module._parameters, module._buffers)
            ),
        )


def _own_names(module: nn.Module) -> tuple[str, ...]:
    """The attributes that are neither torch's nor ours."""
    # Lightning keeps its trainer and bookkeeping of hooks in private attributes.
    hidden = any(kind.__name__ == "LightningModule" for kind in type(module).__mro__)
    return tuple(name for name in module.__dict__ if name not in _STRUCTURE and not (hidden and name.startswith("_")))
