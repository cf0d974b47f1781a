"""The first operation in which two recordings differ."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

from torch import fx

from lightning_rotor.capture.node_facts import OF, REGION, is_constant
from lightning_rotor.capture.source import Source, look_of
from lightning_rotor.private.values import same_bits


def first_difference(left: fx.Graph, right: fx.Graph) -> tuple[fx.Node, ...]:
    """The first operation that two recordings do not share, in both, or in the one that has it; empty if they agree."""
    sources = Source(), Source()
    for mine, theirs in zip_longest(left.nodes, right.nodes):
        if mine is None or theirs is None:
            return (theirs,) if mine is None else (mine,)
        if _spelled(mine, sources[0]) != _spelled(theirs, sources[1]):
            return mine, theirs
        if is_constant(mine) and not same_bits(mine.meta[OF], theirs.meta[OF]):
            return (mine,)
    return ()


def _spelled(node: fx.Node, source: Source) -> Any:
    """An operation with its arguments, comparable between two recordings."""
    # Each operation is compared by itself. Names of variables (v0, v1) count on, and bound constants begin anew.
    source.bound.clear()
    what = node.op, str(node.meta["module"]), node.target, node.args, node.kwargs, node.meta.get(REGION)
    text = source.argument(what)
    source.name(node)
    return text, list(map(look_of, source.bound.values()))
