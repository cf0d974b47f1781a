"""Questions of one recording about sizes and about values, and whether a call would be answered the same.

Sizes that the code asked for are nodes of the graph, so a recording may hold for other sizes in dimensions in which two
recordings of the same operations differ. That is found out once per new set of sizes: the questions about sizes are
computed again, on tensors without values. Questions about values are computed at each call.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch import fx
from torch.overrides import TorchFunctionMode

from lightning_rotor.capture.graph_stage import GraphSlice
from lightning_rotor.capture.node_facts import OWN, SIZE, is_constant, line_of
from lightning_rotor.capture.recorded_checks import spell_value
from lightning_rotor.capture.result_sizes import by_rule
from lightning_rotor.devices import TRAINING
from lightning_rotor.stages.wiring import packed

Question: TypeAlias = tuple[fx.Node, Any]
"""A node, and the value of it that the code saw."""
Signature: TypeAlias = tuple[tuple[tuple[int, ...], Any], ...]
"""For each tensor its shape, and all else about it that code can tell without looking at values."""


class SizeGuards:
    """Questions of one recording about sizes and values, with the answers that the code saw.

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
        self.totals: tuple[int, ...] = ()
        self.objection = ""
        nodes = list(inputs[0].graph.nodes) if inputs else []
        value_nodes, values_seen = _unzipped(values)
        self._asked, sizes_seen = _unzipped(sizes)
        # More answers come with newer recordings, see include.
        self._value_answers = [spell_value(values_seen)]
        self._size_answers = [spell_value(sizes_seen)]

        needed = ancestors([*totals, *value_nodes], sizes=False)
        # The sizes that questions about values read. The questions about sizes give them, once per signature, so that
        # the questions at each call do not compute them again.
        read = [node for node in nodes if SIZE in node.meta and node in needed]
        operations = _operations(nodes, needed - set(read))
        self._values = GraphSlice([*inputs, *read], operations, [value_nodes, list(totals)])
        self.asks_values = any(map(_may_change, needed))

        # Everything, operations on tensors too: a shape is that of the tensor which they make.
        behind = ancestors([*self._asked, *read])
        self._sizes = GraphSlice(inputs, _operations(nodes, behind), [self._asked, read])
        # Without a rule for its sizes, code of the user's cannot be asked on tensors without values.
        self._own: fx.Node | None = None
        for node in nodes:
            if node in behind and node.meta.get(OWN):
                self._own = node
                break

        # Signatures that were really recorded. Those found to hold by asking prove nothing about other ones.
        self._recorded = [signature]
        # For each signature for which it holds: the sizes that the questions about values read.
        self._read = {signature: tuple(node.meta[SIZE] for node in read)}
        # The very same dict: a signature that is added there is settled at once.
        self.settled = {} if self.asks_values else self._read

    @property
    def recorded_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the tensors of the call that was recorded."""
        return tuple(shape for shape, _ in self._recorded[0])

    def hold(self, signature: Signature, inputs: Sequence[Any]) -> bool:
        """True if a call with these inputs would see the same."""
        self.objection = ""
        if signature not in self._read and not self._holds_for_sizes(signature, inputs):
            return False
        if not self.asks_values:
            return True
        try:
            # Nobody differentiates an answer, and a graph would hold the inputs.
            with torch.no_grad():
                answers, totals = self._values(packed((*inputs, *self._read[signature])))
        except (RuntimeError, IndexError, ValueError):
            # Such a call fails in the forward as well, which says it better.
            return False
        self.totals = tuple(totals)
        return spell_value(answers) in self._value_answers

    def _holds_for_sizes(self, signature: Signature, inputs: Sequence[Any]) -> bool:
        """True if the questions about sizes have the recorded answers; then remembers the signature."""
        if not self._may_be(signature):
            return False
        if self._own is not None:
            self.objection = f"sizes depend on code that is not torch's, {line_of(self._own)}"
            return False
        computed = self._sizes_on_meta(inputs, once=True)
        if computed is None:
            # An operation may change a tensor in place that stands for those of several equal layers.
            computed = self._sizes_on_meta(inputs, once=False)
        # No rule for an operation, or sizes that do not go together.
        if computed is None:
            return False
        answers, read = computed
        if spell_value(answers) not in self._size_answers:
            self.objection = f"a size decides over what it does, {line_of(self._first_other(answers))}"
            return False
        self._read[signature] = tuple(read)
        return True

    def _first_other(self, answers: Sequence[Any]) -> fx.Node:
        """The first question that is answered otherwise than in the first recording."""
        _, recorded = self._size_answers[0]
        for answer, then, node in zip(answers, recorded, self._asked, strict=True):
            if spell_value(answer) != then:
                return node
        raise AssertionError("the caller has seen that the answers differ")

    def _sizes_on_meta(self, inputs: Sequence[Any], *, once: bool) -> Any:
        """Answers about sizes, in a few microseconds an operation; None if an operation needs its own device."""
        try:
            with torch.no_grad(), _OnMeta(once=once):
                return self._sizes(packed(list(map(_on_meta, inputs))))
        except Exception:
            # Whatever it is, the call is recorded anew then, which is right for every call, and slower.
            return None

    def _may_be(self, signature: Signature) -> bool:
        """True if a signature differs from recorded ones of its kind only where these differ from each other."""
        kind = _kind(signature)
        recorded = []
        for earlier in self._recorded:
            if _kind(earlier) == kind:
                recorded.append(_sizes_in(earlier))
        if not recorded:
            return False
        # Code may take a dimension for granted without ever asking for it. Two recordings with the same operations, and
        # other sizes in that dimension, show that it does not.
        # All recorded sizes of one dimension, dimension by dimension.
        by_dimension = zip(*recorded, strict=True)
        for recorded_sizes, size in zip(by_dimension, _sizes_in(signature), strict=True):
            is_free = len(set(recorded_sizes)) > 1
            if not is_free and size not in recorded_sizes:
                return False
        return True

    def include(self, newer: SizeGuards) -> None:
        """Hold also where the guards of a newer recording do, which has the same operations."""
        if _differ(self._values, newer._values) or _differ(self._sizes, newer._sizes):
            # Other questions were asked: the older answers say nothing about them.
            vars(self).update(vars(newer))
            return
        # Other answers to the same questions led to the same operations, so either will do.
        _add_new(self._value_answers, newer._value_answers)
        _add_new(self._size_answers, newer._size_answers)
        self._read.update(newer._read)
        self._recorded += newer._recorded


def _add_new(answers: list[Any], more: Iterable[Any]) -> None:
    """Append those of more answers that are not there yet."""
    # A list, and no set: an objection compares with the first one.
    for answer in more:
        if answer not in answers:
            answers.append(answer)


def _unzipped(questions: Sequence[Question]) -> tuple[list[fx.Node], list[Any]]:
    """The nodes of some questions, and their answers."""
    return [node for node, _ in questions], [answer for _, answer in questions]


def _may_change(node: fx.Node) -> bool:
    """True for an input, a parameter or a buffer, whose values may be others at each call."""
    # A constant was made by the recording and stays as it is: who changes one in place is refused.
    return node.op in ("placeholder", "get_attr") and not is_constant(node)


def _differ(mine: GraphSlice, theirs: GraphSlice) -> bool:
    return (mine.operations, mine.reads) != (theirs.operations, theirs.reads)


def _kind(signature: Signature) -> list[Any]:
    """All of a signature but the sizes."""
    return [(len(shape), rest) for shape, rest in signature]


def _sizes_in(signature: Signature) -> list[int]:
    return [size for shape, _ in signature for size in shape]


_RESHAPES_IN_PLACE = frozenset(
    f"{name}_" for name in ("as_strided", "resize", "resize_as", "set", "squeeze", "swapaxes", "swapdims", "t",
    "transpose", "unsqueeze")
)  # fmt: skip
_MOVES = TRAINING
"""Methods that put a tensor on a device."""
_DEVICE = re.compile(rf"({'|'.join(TRAINING)})(:\d+)?")


class _OnMeta(TorchFunctionMode):
    """Runs operations on the meta device, if ``once``, only once for equal arguments, such as those of equal layers."""

    def __init__(self, *, once: bool) -> None:
        super().__init__()
        self._once = once
        self._results: dict[Any, Any] = {}

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if not self._once:
            return _run_on_meta(func, args, kwargs)
        # Other operations in place change values alone, of which there are none here.
        if getattr(func, "__name__", "") in _RESHAPES_IN_PLACE:
            # The tensor may stand for those of several equal layers. Who asked tries again without sharing.
            raise NotImplementedError
        key = func, _look(args), _look(kwargs or {})
        if key not in self._results:
            result = by_rule(func, args, kwargs or {})
            self._results[key] = _run_on_meta(func, args, kwargs) if result is None else result
        return self._results[key]


def _run_on_meta(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    # By hand: a mode that puts every argument on the device takes longer, 10 ms for a new size of Llama where this
    # takes 8.
    args, kwargs = fx.node.map_aggregate((args, kwargs or {}), _on_meta)
    with torch.device("meta"):
        if getattr(func, "__name__", "") in _MOVES:
            # ``x.cuda()`` would leave the meta device.
            return args[0].clone()
        return func(*args, **kwargs)


def _look(value: Any) -> Any:
    """A hashable that is equal for arguments with which an operation has results of equal sizes."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride(), value.dtype
    if isinstance(value, (tuple, list)):
        return type(value), tuple(map(_look, value))
    if isinstance(value, dict):
        return tuple((key, _look(entry)) for key, entry in value.items())
    if isinstance(value, slice):
        # A slice has no hash before Python 3.12.
        return repr(value)
    # With the type, as 1 equals True and 1.0.
    return type(value), value


def _on_meta(value: Any) -> Any:
    """The stand-in for an argument among tensors of the meta device, which have sizes and no values."""
    if isinstance(value, torch.Tensor):
        return value if value.is_meta else value.detach().to("meta")
    # A text may be a device, as in ``x.to("cuda:0")``, or anything else, as a mode of padding.
    is_device_name = isinstance(value, str) and _DEVICE.fullmatch(value)
    if isinstance(value, torch.device) or is_device_name:
        return torch.device("meta")
    return value


def _operations(nodes: Iterable[fx.Node], wanted: set[fx.Node]) -> list[fx.Node]:
    return [node for node in nodes if node in wanted and node.op not in ("placeholder", "get_attr")]


def ancestors(nodes: Iterable[fx.Node], *, sizes: bool = True) -> set[fx.Node]:
    """The nodes and everything that they are computed from, also by way of sizes if ``sizes``."""
    reached: set[fx.Node] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node in reached:
            continue
        reached.add(node)
        # What a size is computed from need not be computed where the size itself is given.
        if sizes or SIZE not in node.meta:
            pending.extend(node.all_input_nodes)
    return reached
