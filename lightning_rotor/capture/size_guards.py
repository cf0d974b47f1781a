"""What one recording asked of sizes and of values, and whether a call would be answered the same.

Sizes that the code asked for are nodes of the graph, so a recording may hold for other sizes in dimensions in which two
recordings of the same operations differ. That is found out once per new set of sizes: the questions about sizes are
computed again, on tensors without values. Questions about values are computed at each call.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any, TypeAlias

import torch
from torch import fx
from torch.overrides import TorchFunctionMode

from lightning_rotor.capture.graph_stage import (
    LINE,
    OF,
    REGION,
    SIZE,
    GraphSlice,
    Source,
    is_constant,
    look_of,
    spell_value,
)
from lightning_rotor.private.values import same_bits
from lightning_rotor.stages.sequential import packed

OWN = "own"
"""Where a node keeps whether it runs code that is not torch's, of which nobody knows what it does for other sizes."""
Question: TypeAlias = tuple[fx.Node, Any]
"""A node, and the value of it that the code saw."""
Signature: TypeAlias = tuple[tuple[tuple[int, ...], Any], ...]
"""For each tensor its shape, and all else about it that code can tell without looking at values."""


class SizeGuards:
    """What one recording saw of sizes and of values.

    Attributes:
        asks_values: Values of inputs or buffers count.
        settled: Signatures for which it holds whatever the values.
        totals: Entries of the packed sequences in the call for which it was last found to hold.
        objection: Where the user's code decides otherwise for the sizes of the last call; empty if it does not.
    """

    def __init__(
        self,
        signature: Signature,
        inputs: Sequence[fx.Node],
        sizes: Sequence[Question],
        values: Sequence[Question],
        totals: Sequence[fx.Node] = (),
    ) -> None:
        nodes = list(inputs[0].graph.nodes) if inputs else []
        needed = ancestors([*totals, *(node for node, _ in values)], sizes=False)
        read = [node for node in nodes if SIZE in node.meta and node in needed]
        self._value_answers = [spell_value([value for _, value in values])]
        self._values = GraphSlice(
            [*inputs, *read], _operations(nodes, needed - set(read)), [[node for node, _ in values], list(totals)]
        )
        self.totals: tuple[int, ...] = ()
        self.objection = ""
        self.asks_values = any(node.op in ("placeholder", "get_attr") and not is_constant(node) for node in needed)
        self._asked = [node for node, _ in sizes]
        self._size_answers = [spell_value([value for _, value in sizes])]
        behind = ancestors([*self._asked, *read])
        self._sizes = GraphSlice(inputs, _operations(nodes, behind), [self._asked, read])
        self._own = next((node for node in nodes if node in behind and node.meta.get(OWN)), None)
        self._recorded = [signature]
        # For each signature for which it holds: the sizes that the questions about values read.
        self._read = {signature: tuple(node.meta[SIZE] for node in read)}
        self.settled = {} if self.asks_values else self._read

    def hold(self, signature: Signature, inputs: Sequence[Any]) -> bool:
        """True if a call with these inputs would see the same."""
        self.objection = ""
        if signature not in self._read and not self._holds_for_sizes(signature, inputs):
            return False
        if not self.asks_values:
            return True
        try:
            with torch.no_grad():
                found, totals = self._values(packed((*inputs, *self._read[signature])))
        except (RuntimeError, IndexError, ValueError):  # the forward itself will say it better
            return False
        self.totals = tuple(totals)
        return spell_value(found) in self._value_answers

    def _holds_for_sizes(self, signature: Signature, inputs: Sequence[Any]) -> bool:
        if not self._may_be(signature):
            return False
        if self._own is not None:
            self.objection = f"sizes depend on code that is not torch's, {line_of(self._own)}"
            return False
        found = self._sizes_on_meta(inputs, once=True)
        found = self._sizes_on_meta(inputs, once=False) if found is None else found
        if found is None:  # no rule for an operation, or sizes that do not go together
            return False
        answers, read = found
        if spell_value(answers) not in self._size_answers:
            others = zip(answers, self._size_answers[0][1], self._asked, strict=True)
            asked = next(node for answer, known, node in others if spell_value(answer) != known)
            self.objection = f"a size decides over what it does, {line_of(asked)}"
            return False
        self._read[signature] = tuple(read)
        return True

    def _sizes_on_meta(self, inputs: Sequence[Any], *, once: bool) -> Any:
        """What was asked of sizes, in a few microseconds an operation; None if an operation needs its own device."""
        try:
            with torch.no_grad(), _OnMeta(once=once):
                return self._sizes(packed([_on_meta(value) for value in inputs]))
        except Exception:
            return None

    def _may_be(self, signature: Signature) -> bool:
        """True if a signature differs from recorded ones of its kind only where these differ from each other."""
        recorded = [known for known in self._recorded if _kind(known) == _kind(signature)]
        known = [set(sizes) for sizes in zip(*map(_sizes_in, recorded), strict=True)]
        return bool(recorded) and all(
            len(sizes) > 1 or size in sizes for sizes, size in zip(known, _sizes_in(signature), strict=True)
        )

    def include(self, newer: SizeGuards) -> None:
        """Hold also where the guards of a newer recording do, which has the same operations."""
        pairs = (self._values, newer._values), (self._sizes, newer._sizes)
        if any((mine.operations, mine.reads) != (theirs.operations, theirs.reads) for mine, theirs in pairs):
            vars(self).update(vars(newer))
            return
        self._value_answers += [answer for answer in newer._value_answers if answer not in self._value_answers]
        self._size_answers += [answer for answer in newer._size_answers if answer not in self._size_answers]
        self._read.update(newer._read)
        self._recorded += newer._recorded


def _kind(signature: Signature) -> list[Any]:
    """All of a signature but the sizes."""
    return [(len(shape), rest) for shape, rest in signature]


def _sizes_in(signature: Signature) -> list[int]:
    return [size for shape, _ in signature for size in shape]


_RESHAPES_IN_PLACE = frozenset(
    f"{name}_" for name in ("as_strided", "resize", "resize_as", "set", "squeeze", "swapaxes", "swapdims", "t",
    "transpose", "unsqueeze")
)  # fmt: skip


_MOVES = ("cpu", "cuda")
"""Methods that put a tensor on a device."""
_DEVICE = re.compile(r"(cpu|cuda)(:\d+)?")


class _OnMeta(TorchFunctionMode):
    """Runs operations on the meta device, if ``once``, only once for equal arguments, such as those of equal layers."""

    def __init__(self, *, once: bool) -> None:
        super().__init__()
        self._once = once
        self._results: dict[Any, Any] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not self._once:
            return _run_on_meta(func, args, kwargs)
        if getattr(func, "__name__", "") in _RESHAPES_IN_PLACE:
            raise NotImplementedError  # the tensor may stand for others
        key = func, _look(args), _look(kwargs or {})
        if key not in self._results:
            self._results[key] = _run_on_meta(func, args, kwargs)
        return self._results[key]


def _run_on_meta(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    args, kwargs = fx.node.map_aggregate((args, kwargs or {}), _on_meta)
    with torch.device("meta"):
        return args[0].clone() if getattr(func, "__name__", "") in _MOVES else func(*args, **kwargs)


def _look(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride(), value.dtype
    if isinstance(value, (tuple, list)):
        return type(value), tuple(map(_look, value))
    if isinstance(value, dict):
        return tuple((key, _look(entry)) for key, entry in value.items())
    return repr(value) if isinstance(value, slice) else (type(value), value)


def _on_meta(value: Any) -> Any:
    """What stands for an argument among tensors of the meta device, which have sizes and no values."""
    if isinstance(value, torch.Tensor):
        return value if value.is_meta else value.detach().to("meta")
    if isinstance(value, torch.device) or (isinstance(value, str) and _DEVICE.fullmatch(value)):
        return torch.device("meta")
    return value


def _operations(nodes: Iterable[fx.Node], wanted: set[fx.Node]) -> list[fx.Node]:
    return [node for node in nodes if node in wanted and node.op not in ("placeholder", "get_attr")]


def ancestors(nodes: Iterable[fx.Node], *, sizes: bool = True) -> set[fx.Node]:
    """The nodes and everything that they are computed from, also by way of sizes if ``sizes``."""
    found: set[fx.Node] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending.extend(node.all_input_nodes if sizes or SIZE not in node.meta else ())
    return found


# -------------------------------------------------------------------- Whether two recordings agree.


def line_of(node: fx.Node) -> str:
    """The user's line that did an operation."""
    return "at {}:{}".format(*node.meta[LINE])


def first_difference(left: fx.Graph, right: fx.Graph) -> tuple[fx.Node, ...]:
    """The first operation that two recordings do not share, in both, or in the one that has it; empty if they agree."""
    sources = Source(), Source()
    for mine, theirs in zip_longest(left.nodes, right.nodes):
        if mine is None or theirs is None or _said(mine, sources[0]) != _said(theirs, sources[1]):
            return tuple(node for node in (mine, theirs) if node is not None)
        if is_constant(mine) and not same_bits(mine.meta[OF], theirs.meta[OF]):
            return (mine,)
    return ()


def _said(node: fx.Node, source: Source) -> Any:
    """What an operation does, comparable between two recordings."""
    source.bound.clear()
    what = node.op, str(node.meta["module"]), node.target, node.args, node.kwargs, node.meta.get(REGION)
    text = source.spell(what)
    source.name(node)
    return text, list(map(look_of, source.bound.values()))
