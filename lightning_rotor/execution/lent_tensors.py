"""Tables of parameters and buffers in which other tensors stand for a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import nn

from lightning_rotor.private.undoing import undone

Slot: TypeAlias = tuple[dict[str, Any], str, Any]
"""A module's table of parameters or buffers, a name in it, and what is there."""


@contextmanager
def standing_in(loans: Iterable[Slot]) -> Iterator[None]:
    """Context in which other tensors stand in tables of parameters and buffers."""
    owners: list[Slot] = []

    def put_back() -> None:
        # Last in, first out: what was lent twice gets its first owner back.
        for table, name, owner in reversed(owners):
            table[name] = owner

    with undone(put_back):
        for table, name, loan in loans:
            # What is there already would be put back over a later owner.
            if table[name] is not loan:
                owners.append((table, name, table[name]))
                table[name] = loan
        yield


def buffers_of(modules: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    """The modules' own buffers, with who has them and the names."""
    for module in modules:
        for name, buffer in module._buffers.items():
            if buffer is not None:
                yield module, name, buffer


def copies_of(buffers: Iterable[tuple[nn.Module, str, torch.Tensor]]) -> list[tuple[nn.Module, str, torch.Tensor]]:
    """Buffers with a copy in the place of each: one for each tensor, as two modules may share one."""
    copies: dict[int, torch.Tensor] = {}
    rows = []
    for module, name, buffer in buffers:
        # Tied buffers stay tied: a write to the copy of one must show in the other.
        if id(buffer) not in copies:
            copies[id(buffer)] = buffer.detach().clone()
        rows.append((module, name, copies[id(buffer)]))
    return rows
