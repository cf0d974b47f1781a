"""Modules whose code was recorded must stay what they are: their attributes, children, parameters and hooks."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Collection, Iterable
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any, Generic, Protocol

import torch
from torch import nn

from lightning_rotor.capture.call import layout_of
from lightning_rotor.capture.copies import Copies, Same, plain_value
from lightning_rotor.capture.module_calls import Slot
from lightning_rotor.capture.notes import Notes
from lightning_rotor.private import torch_names as private
from lightning_rotor.stages.known_layers import does_more_than_forward
from lightning_rotor.stages.user_code import is_users_class

_STRUCTURE = (set(nn.Module().__dict__) - {"training"}) | {"_lightning_rotor", "_lightning_rotor_compiled", "forward"}
"""Attributes of modules that are torch's or ours."""
_forward_of = attrgetter("forward")
_BASES = (nn.Module, object, ABC, Generic, Protocol)
"""Classes that are not the user's, and read no attributes that are."""


class Watch:
    """The looks of some modules at one moment. Hooks and ``forward`` of ``root`` run outside of the recording.

    With ``tensors``, also which tensors the parameters and buffers are. Stages read them anew at each call, so else
    only their shapes, types and layouts count. Attributes in ``inputs`` they take like arguments, and those in
    ``idle``, which have changed and made no difference, do not count. ``outside`` tells if what code reads beside the
    modules is as it was.
    """

    def __init__(
        self,
        root: nn.Module,
        modules: Iterable[nn.Module],
        *,
        tensors: bool = False,
        outside: Callable[[], bool] = lambda: True,
        inputs: Collection[Slot] = (),
        idle: Collection[Slot] = (),
    ) -> None:
        self._root = root
        # A scripted module keeps what it has in C++, and is one operation anyway.
        self.modules = [module for module in modules if not isinstance(module, torch.jit.ScriptModule)]
        self._inputs = frozenset(inputs)
        self._idle = frozenset(idle)
        self._tensors = tensors
        self._outside = outside
        self._seen = [self._look(module, Copies()) for module in self.modules]
        # What the quick comparison needs, once the slow one has found no change.
        self._copies: Copies | None = None
        self._filled_tables: list[dict[str, Any]] = []
        for module in self.modules:
            self._filled_tables += filter(None, (module._parameters, module._buffers))
        self._shapes = self._shapes_now()

    def holds(self) -> bool:
        """True if everything still looks the same. This runs at every training call.

        The quick comparison comes first. What a slow one has seen without a change serves the next quick one.
        """
        if self._copies is None or not self._copies.hold() or self._shapes_now() != self._shapes:
            copies = Copies()
            if self.changed(copies=copies) is not None:
                return False
            # Settling notes how many attributes there are: as many as before with the known ones among them, none new.
            copies.settle(*self._parts())
            self._copies = copies
        return self._outside()

    def _shapes_now(self) -> list[torch.Size]:
        # ``parameter.data = other`` leaves the same object, with another shape.
        tensors: Iterable[torch.Tensor | None] = chain.from_iterable(table.values() for table in self._filled_tables)
        return [tensor.shape for tensor in tensors if tensor is not None]

    def changed_numbers(self) -> list[Slot]:
        """Attributes that hold another number of the same type now."""
        slots = []
        for module, (_, _, _, attributes, *_) in zip(self.modules, self._seen, strict=True):
            for name, then in attributes.items():
                now = module.__dict__.get(name)
                # By type, as a bool is an int for isinstance.
                is_number = type(now) in (int, float)
                was_like_it = isinstance(then, tuple) and then[0] is type(now)
                if is_number and was_like_it and plain_value(now) != then:
                    slots.append((module, name))
        return slots

    def idle(self, notes: Notes) -> frozenset[Slot]:
        """Attributes that have nothing to do with a recording which was made again, of the same operations.

        They have changed since, and the code mentions none of their names, as of what a ``training_step`` collects.
        """
        slots = set(self._idle)
        for module, (_, _, _, attributes, *_) in zip(self.modules, self._seen, strict=True):
            if notes.names_all or not _is_users_alone(type(module)):
                continue
            # A module of which no method ran can only be read by code of others, through a name that they mention.
            read = notes.names if module in notes.entered else notes.names_of_others
            for name in attributes.keys() - read - {"training"}:
                if Copies().of(module.__dict__.get(name)) != attributes[name]:
                    slots.add((module, name))
        return frozenset(slots)

    def changed(
        self,
        besides: Collection[nn.Module] = (),
        copies: Copies | None = None,
    ) -> nn.Module | None:
        """The first module that looks different now, not counting some; ``copies`` takes what it looks like."""
        copies = copies or Copies()
        for module, seen in zip(self.modules, self._seen, strict=True):
            if module not in besides and self._look(module, copies) != seen:
                return module
        return None

    def _look(self, module: nn.Module, copies: Copies) -> Any:
        """The looks of a module, comparable."""
        attributes = {}
        for name in self._names_in(module):
            value = module.__dict__[name]
            # Of an input, only the type is baked into the recording.
            attributes[name] = type(value) if (module, name) in self._inputs else copies.of(value)
        look_at_tensor = Same if self._tensors else _seen_in_slot
        return (
            type(module),
            # A class may get another forward, as by a patch of the user's.
            Same(type(module).forward),
            # Whether there are any hooks at all. Which ones, the quick comparison sees (``_parts``).
            module is self._root or does_more_than_forward(module),
            attributes,
            _mapped(Same, module._modules),
            _mapped(look_at_tensor, module._parameters),
            _mapped(look_at_tensor, module._buffers),
        )

    def _names_in(self, module: nn.Module) -> tuple[str, ...]:
        """Names of the attributes that count, and are neither torch's nor ours."""
        names = [name for name in module.__dict__ if name not in _STRUCTURE and (module, name) not in self._idle]
        # Lightning keeps its trainer and bookkeeping of hooks in private attributes.
        if any(kind.__name__ == "LightningModule" for kind in type(module).__mro__):
            names = [name for name in names if not name.startswith("_")]
        return tuple(names)

    def _parts(self) -> tuple[Callable[[], tuple[Any, ...]], list[dict[str, Any]]]:
        """A function that gives what modules are made of, and dicts whose lengths say whether anything was added."""
        # Everything that can be is done here, once. What stays for each call are loops in C, over some thousand values.
        modules = self.modules
        structure = ("_modules", "_parameters", "_buffers", *private.HOOKS)
        attributes = list(map(vars, modules))
        tables: list[dict[str, Any]] = []
        hooks: list[dict[str, Any]] = []
        getters = []
        # Where some attributes do not count, one of them may go when one comes that does. The number stays then.
        names: list[dict[str, Any]] = []
        for module, own in zip(modules, attributes, strict=True):
            if not own.keys() - _STRUCTURE <= {*self._names_in(module)}:
                names.append(own)
            tables += (own["_modules"], own["_parameters"], own["_buffers"])
            hooks += map(own.__getitem__, private.HOOKS)
            getters.append(itemgetter(*self._names_in(module), *structure))
        # An empty table that is filled has another length.
        filled = list(filter(None, tables))
        kinds = dict.fromkeys(map(type, modules))

        def read() -> tuple[Any, ...]:
            try:
                values = [get(own) for get, own in zip(getters, attributes, strict=True)]
            except KeyError:
                # An attribute is gone.
                return ()
            return (
                *map(type, modules),
                *map(_forward_of, kinds),
                private.any_hooks_of_all(),
                *filter(None, hooks),
                *chain.from_iterable(names),
                *chain.from_iterable(values),
                *chain.from_iterable(filled),
                *chain.from_iterable(map(dict.values, filled)),
            )

        return read, [*attributes, *tables]


def _mapped(look: Callable[[Any], Any], table: dict[str, Any]) -> dict[str, Any]:
    """A table with the look of each value."""
    return {name: look(value) for name, value in table.items()}


def _seen_in_slot(tensor: torch.Tensor | None) -> Any:
    """Shape, type and layout of a parameter or buffer. Its device does not count: pipelines change it."""
    if tensor is None:
        return None
    return (tensor.shape, tensor.dtype, layout_of(tensor))


def _is_users_alone(kind: type[nn.Module]) -> bool:
    """True if all code that reads a module's own attributes is the user's, so that its names are known."""
    return all(base in _BASES or is_users_class(base) for base in kind.__mro__)
