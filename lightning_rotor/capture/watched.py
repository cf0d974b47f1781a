"""What modules looked like when they were recorded: modes, plain attributes, which submodules there are.

The code of a module that was recorded does not run any more, so whatever could have sent it another way must be noticed when it changes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import chain, repeat
from operator import attrgetter, contains, is_, itemgetter
from typing import Any

import torch
from torch import nn

from lightning_rotor.private import torch_names as private
from lightning_rotor.private.torch_names import COMPILED_CALL, HOOKS, any_hooks_of_all
from lightning_rotor.stages.sequential import has_own_call
from lightning_rotor.stages.state import generator_state

# ----------------------------------------------------------------------------------------------------
# What values look like at one moment, comparable.


PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
"""Types of values that never change."""
LONG = 1000
"""Entries of a list or dict that are looked at; of a longer one, it counts which object it is and how long."""


class Same:
    """Compares by identity, and keeps the object alive so that no other one gets its address."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def version_of(tensor: torch.Tensor) -> int:
    """Counts changes in place."""
    return -1 if tensor.is_inference() else private.version_of(tensor)


def frozen(value: Any, depth: int = 4, *, objects: bool = True) -> Any:
    """Something that compares equal as long as the value stays what it is.

    Args:
        value: Anything.
        depth: How far to follow lists and dicts in lists and dicts.
        objects: The plain attributes of other objects count, too.
    """
    kind = type(value)
    if kind in PLAIN:
        return kind, repr(value) if kind is float else value
    if isinstance(value, torch.Tensor):
        return Same(value), version_of(value)
    if isinstance(value, (list, tuple, dict, set, deque)):
        if len(value) > LONG or depth == 0:
            return Same(value), len(value)
        if isinstance(value, dict):
            # Not the methods of a class of the user's, which may make its entries anew whenever they are asked for.
            entries = dict.items(value)
            return kind, tuple((frozen(key, 0), frozen(entry, depth - 1, objects=objects)) for key, entry in entries)
        return kind, tuple(frozen(entry, depth - 1, objects=objects) for entry in value)
    state = generator_state(value)
    if state is not None:
        return Same(value), state
    if objects and depth and not isinstance(value, (nn.Module, type)) and hasattr(value, "__dict__"):
        # A configuration object, most likely; what it refers to is followed no further.
        return Same(value), tuple((key, entry) for key, entry in vars(value).items() if type(entry) in PLAIN)
    return Same(value)


# ----------------------------------------------------------------------------------------------------


_TENSORS = ("_parameters", "_buffers")
_STRUCTURE = (set(nn.Module().__dict__) - {"training"}) | {"_lightning_rotor", "forward"}
_forward_of = attrgetter("forward")
_compiled_call_of = attrgetter(COMPILED_CALL)


class Watch:
    """What modules look like at one moment.

    Args:
        root: Its own hooks and ``forward`` run outside of the recording and do not matter.
        modules: The modules whose code is recorded.
        tensors: Also watch which tensors the parameters and buffers are. Stages read them anew at each call.
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
        self._root, self._modules = root, tuple(modules)
        self._tensors, self._outside = tensors, outside
        self._seen = [self._look(module) for module in self._modules]
        self._identities: _Identities | None = None

    def holds(self) -> bool:
        """True if everything still looks the same. This runs at every training call."""
        if self._identities is None or not self._identities.hold():
            if self.changed() is not None:
                return False
            if not (self._tensors or any(isinstance(module, torch.jit.ScriptModule) for module in self._modules)):
                self._identities = _Identities(self._modules)
        return self._outside()

    def changed(self, besides: Collection[nn.Module] = ()) -> nn.Module | None:
        """The first module that looks different now, not counting some."""
        for module, seen in zip(self._modules, self._seen, strict=True):
            if module not in besides and self._look(module) != seen:
                return module
        return None

    def _look(self, module: nn.Module) -> Any:
        return (
            type(module),
            None if isinstance(module, torch.jit.ScriptModule) else Same(type(module).forward),
            module is self._root or has_own_call(module),
            {name: frozen(module.__dict__[name]) for name in _own_names(module)},
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


class _Identities:
    """The attributes of modules at one moment, as flat lists that are quickly compared object by object.

    Args:
        modules: None of them is scripted, which would keep its attributes elsewhere.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._attributes = [vars(module) for module in modules]
        names = list(map(_own_names, modules))
        self._getters = [itemgetter("_modules", *_TENSORS, *HOOKS, *own) for own in names]
        self._children = [attributes["_modules"] for attributes in self._attributes]
        self._tensors = [attributes[name] for attributes in self._attributes for name in _TENSORS]
        self._hooks = [attributes[name] for attributes in self._attributes for name in HOOKS]
        self._values = self._now()
        self._below = list(chain.from_iterable(map(dict.values, self._children)))
        # What is in a list, a dict or an object may change though it stays the same object.
        values = [attributes[name] for attributes, own in zip(self._attributes, names, strict=True) for name in own]
        self._filled = [v for v in values if type(v) not in PLAIN and not isinstance(v, (nn.Module, type))]
        self._seen = self._look()

    def hold(self) -> bool:
        """True if everything is as it was for sure."""
        try:
            return (
                all(map(is_, self._now(), self._values))
                and self._look() == self._seen
                and all(map(is_, chain.from_iterable(map(dict.values, self._children)), self._below))
            )
        except KeyError:  # an attribute is gone
            return False

    def _now(self) -> list[Any]:
        return list(chain.from_iterable(get(own) for get, own in zip(self._getters, self._attributes, strict=True)))

    def _look(self) -> Any:
        kinds = list(map(type, self._modules))
        return (
            kinds,
            list(map(len, self._attributes)),
            list(map(contains, self._attributes, repeat("forward"))),
            list(map(id, map(_forward_of, kinds))),
            list(map(id, map(_compiled_call_of, self._modules))),
            any_hooks_of_all(),
            list(map(bool, self._hooks)),
            list(chain.from_iterable(self._children)),
            list(chain.from_iterable(self._tensors)),
            list(map(is_, chain.from_iterable(map(dict.values, self._tensors)), repeat(None))),
            list(map(frozen, self._filled)),
        )
