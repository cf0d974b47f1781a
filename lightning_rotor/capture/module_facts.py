"""A module is still what it was at the last step: told in microseconds, for calls whose plan has settled."""

from __future__ import annotations

from collections.abc import Collection
from itertools import chain, repeat
from operator import attrgetter, contains, itemgetter
from typing import Any

from torch import nn

from lightning_rotor.capture.copies import Objects
from lightning_rotor.private import torch_names as private

_tables_in = itemgetter("_modules", *private.HOOKS[:2], "_parameters")
_learns = attrgetter("requires_grad")
_dtype = attrgetter("dtype")


class ModuleFacts:
    """Children, modes, hooks and parameters of a module at any depth; no values of tensors, no other attributes.

    Of modules in ``besides``, which are watched, parameters alone.
    """

    def __init__(self, root: nn.Module, besides: Collection[nn.Module] = ()) -> None:
        watched = set(besides)
        self._modules = tuple(module for module in root.modules() if module not in watched)
        self._watched_parameters = [module._parameters for module in watched if module._parameters]
        self._parameters = tuple(root.parameters())
        self._attributes = list(map(vars, self._modules))
        self._objects = Objects(self._now())

    def holds(self) -> bool:
        """True if all of it is as it was. False if that cannot be told so quickly."""
        now = self._now()
        return bool(now) and self._objects.are(now)

    def _now(self) -> tuple[Any, ...]:
        """All of it in one flat row, to compare object by object."""
        try:
            tables = list(filter(None, chain.from_iterable(map(_tables_in, self._attributes))))
            return (
                *map(type, self._modules),
                *map(contains, self._attributes, repeat("forward")),
                # Not module.training: a compiled module asks the one inside for it.
                *map(dict.get, self._attributes, repeat("training")),
                *map(_learns, self._parameters),
                *map(_dtype, self._parameters),
                *tables,
                *chain.from_iterable(tables),
                *chain.from_iterable(map(dict.values, tables)),
                *chain.from_iterable(map(dict.values, self._watched_parameters)),
            )
        except (KeyError, TypeError):
            # A scripted module keeps its children and parameters elsewhere.
            return ()
