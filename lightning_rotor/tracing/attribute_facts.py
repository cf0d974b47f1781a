"""A quick answer to whether the attributes of modules are the same objects as before, for :mod:`lightning_rotor.tracing.watch`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import chain, repeat
from operator import attrgetter, contains, is_, itemgetter
from typing import Any

from torch import nn

from lightning_rotor.private.torch_names import COMPILED_CALL, HOOKS, any_hooks_of_all
from lightning_rotor.tracing.appearance import PLAIN, frozen

_TENSORS = ("_parameters", "_buffers")
_forward_of = attrgetter("forward")
_compiled_call_of = attrgetter(COMPILED_CALL)


class AttributeFacts:
    """The attributes of modules at one moment, as flat lists that are compared object by object.

    Args:
        modules: None of them is scripted, which would keep its attributes elsewhere.
        names_in: The names of a module's own attributes that count; its children, parameters, buffers and hooks do besides.
    """

    def __init__(self, modules: Sequence[nn.Module], names_in: Callable[[nn.Module], Collection[str]]) -> None:
        self._modules = modules
        self._attributes = [vars(module) for module in modules]
        names = list(map(names_in, modules))
        self._getters = [itemgetter("_modules", *_TENSORS, *HOOKS, *own) for own in names]
        self._children = [attributes["_modules"] for attributes in self._attributes]
        self._tensors = [attributes[name] for attributes in self._attributes for name in _TENSORS]
        self._hooks = [attributes[name] for attributes in self._attributes for name in HOOKS]
        self._values = self._now()
        self._below = list(chain.from_iterable(map(dict.values, self._children)))
        # What is in a list, a dict or an object may change though it stays the same object.
        self._filled = [
            attributes[name]
            for attributes, own in zip(self._attributes, names, strict=True)
            for name in own
            if type(attributes[name]) not in PLAIN and not isinstance(attributes[name], (nn.Module, type))
        ]
        self._seen = self._look()

    def hold(self) -> bool:
        """Whether everything is as it was for sure."""
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
