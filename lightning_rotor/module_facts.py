"""Whether a module is still what it was at the last step, in microseconds.

What a plan holds for is looked at anew at every training call: which submodules there are, which of them train or have hooks, which parameters
learn. Python takes a microsecond or two for each module and parameter, much for one whose forward takes twenty, and nearly always finds that
nothing has changed. So the same facts are also noted as flat lists that C code makes and compares. If they differ, it is time to look properly.
"""

from __future__ import annotations

from itertools import chain, repeat
from operator import attrgetter, contains, is_, itemgetter
from typing import Any

from torch import nn

from lightning_rotor.private.torch_names import HOOKS

_TABLES = ("_modules", *HOOKS[:2], "_parameters")
_entries_in = itemgetter("training", *_TABLES[:-1])
_parameters_in = itemgetter(_TABLES[-1])
_learning = attrgetter("requires_grad", "dtype")


class ModuleFacts:
    """What a module and all below it look like at one moment.

    Args:
        root: Its children, modes, hooks and parameters count, at any depth; values of parameters, buffers and other attributes do not.
    """

    def __init__(self, root: nn.Module) -> None:
        self._modules = tuple(root.modules())
        self._parameters = tuple(root.parameters())
        self._attributes = [vars(module) for module in self._modules]
        # A scripted module keeps its children and parameters elsewhere.
        self._readable = all(_is_readable(attributes) for attributes in self._attributes)
        if self._readable:
            self._owners = list(map(_parameters_in, self._attributes))
            self._tables = [attributes[name] for attributes in self._attributes for name in _TABLES]
            self._full = [table for table in self._tables if table]
            self._entries = list(chain.from_iterable(map(dict.values, self._full)))
            self._seen = self._look()

    def holds(self) -> bool:
        """Whether all of it is as it was. False if that cannot be told so quickly."""
        return (
            self._readable
            # Dicts of tensors, and tensors, are no more to be compared with == than other tensors are.
            and all(map(is_, map(_parameters_in, self._attributes), self._owners))
            and self._look() == self._seen
            and all(map(is_, chain.from_iterable(map(dict.values, self._full)), self._entries))
        )

    def _look(self) -> Any:
        return (
            list(map(len, self._tables)),
            list(map(type, self._modules)),
            list(map(_entries_in, self._attributes)),
            list(map(contains, self._attributes, repeat("forward"))),
            list(map(_learning, self._parameters)),
        )


def _is_readable(attributes: dict[str, Any]) -> bool:
    return "training" in attributes and all(isinstance(attributes.get(name), dict) for name in _TABLES)
