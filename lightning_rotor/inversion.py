"""One inverted stage: it drops its input when it has run, and rebuilds it from its output in the backward.

Nothing is freed under anybody's feet: references are dropped, storages never shrink. Who may hold the input is known::

    item before ──x──► stage ──y──► item behind

    the running forward         lets go of ``x`` when the stage is done, as of any boundary
    a stage before that saved   runs under hooks (:class:`SavedOutput`). Its saved tensors that show ``x`` become references to
    ``x``, its own output       the boundary (:class:`Boundary`), which is empty until it is rebuilt. Not ReLU's: a rebuilt zero
                                may be no zero, see :attr:`lightning_rotor.chain.Option.needs_exact_output`
    an inverted stage before    refers to ``x`` in the same way (:class:`Output`): it needs it to rebuild its own input

In the backward the first tensor that the stage asks for makes it run again, like a recomputed segment of one stage, from
``inverse(y)``: generators, autocast and buffers are those of its first run both for the inverse and for the forward that follows. A few
elements that were noted in the forward say whether the inverse has drifted, see :mod:`lightning_rotor.invertible.guard`.
Inside a segment all this happens for real only when the segment is recomputed: what is saved for the backward goes through the hooks of the
segment, under which its first pass drops it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import Node, saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_rotor.errors import ExecutionError
from lightning_rotor.generators import GeneratorStates
from lightning_rotor.invertible.guard import Guard
from lightning_rotor.invertible.protocol import require_like
from lightning_rotor.recomputation import is_checkpointing, is_last_backward_through, recomputed
from lightning_rotor.state import FirstPass, Replay, SegmentState

_NO_STATE = SegmentState()


class Boundary:
    """A tensor that was dropped, for those who refer to it.

    Args:
        name: Of the stage that rebuilds it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._tensor: torch.Tensor | None = None
        self._is_referred_to = False

    def refer(self) -> None:
        """Somebody will ask for it."""
        self._is_referred_to = True

    def fill(self, tensor: torch.Tensor) -> None:
        """It is rebuilt."""
        if self._is_referred_to:
            self._tensor = tensor

    def get(self) -> torch.Tensor:
        """The tensor.

        Raises:
            ExecutionError: The backward has not rebuilt it.
        """
        if self._tensor is None:
            raise ExecutionError(
                f"a backward asks for the input of {self._name!r}, which was dropped and is not rebuilt: expected a backward that "
                "passes through all of that stage. Do not invert it, or differentiate with respect to what comes before it as well"
            )
        return self._tensor

    def take(self) -> torch.Tensor:
        """The tensor, for the one who refers to it."""
        tensor, self._tensor = self.get(), None
        return tensor


class _Kept:
    """Tensors that are saved for the backward through whatever hooks are set: a segment around drops them and brings them back."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        # Without their graph: it would hold the node that holds them.
        self._node: Any = _Save.apply(_root(), *(tensor.detach() for tensor in tensors)).grad_fn

    def __getitem__(self, index: int) -> torch.Tensor:
        tensor: torch.Tensor = self._node.saved_tensors[index]
        return tensor


class _Save(torch.autograd.Function):
    """Saves tensors and computes nothing."""

    @staticmethod
    def forward(ctx: Any, root: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise AssertionError("nobody differentiates it")


def _root() -> torch.Tensor:
    return torch.empty(0, requires_grad=True)


# -------------------------------------------------------------------- a stage before that saves its own output


@dataclass(slots=True, eq=False)
class _Saved:
    """One saved tensor of a stage: itself, or where it is.

    Attributes:
        storage: Its memory, not held.
        shape: Its size.
        stride: Its layout.
        offset: Its place in its memory.
        dtype: Its type.
        device: Where it is.
        tensor: The tensor, unless it is dropped or somewhere else.
        kept: What holds it, and its place there.
        boundary: What it shows.
    """

    storage: StorageWeakRef
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    tensor: torch.Tensor | None
    kept: tuple[_Kept, int] | None = None
    boundary: Boundary | None = None

    def shows(self, tensor: torch.Tensor) -> bool:
        """Whether it is the same memory, read as the same numbers."""
        return self.storage.cdata == tensor.untyped_storage()._cdata and self.dtype == tensor.dtype

    def get(self) -> torch.Tensor:
        if self.boundary is not None:
            return self.boundary.get().as_strided(self.shape, self.stride, self.offset)
        if self.kept is not None:
            kept, index = self.kept
            return kept[index]
        assert self.tensor is not None
        return self.tensor


class SavedOutput:
    """What a stage saves while :meth:`watching`, until it is known which of it is its output."""

    def __init__(self) -> None:
        self._saved: list[_Saved] = []

    def watching(self) -> saved_tensors_hooks:
        """Context in which the stage runs."""
        return saved_tensors_hooks(self._pack, _Saved.get)

    def _pack(self, tensor: torch.Tensor) -> _Saved:
        saved = _Saved(
            StorageWeakRef(tensor.untyped_storage()),
            tensor.shape,
            tensor.stride(),
            int(tensor.storage_offset()),
            tensor.dtype,
            tensor.device,
            # The first pass of a segment keeps nothing.
            None if is_checkpointing() else tensor,
        )
        self._saved.append(saved)
        return saved

    def refer(self, boundary: Boundary, output: torch.Tensor) -> None:
        """What shows the output refers to the boundary from now on; the rest goes where it would have gone without the watch."""
        found, self._saved = self._saved, []  # whoever holds the hooks must not hold these
        shown = [saved for saved in found if is_whole(output) and saved.shows(output)]
        for saved in shown:
            saved.tensor, saved.boundary = None, boundary
            boundary.refer()
        others = [saved for saved in found if saved.boundary is None]
        if others and _has_hooks():
            kept = _Kept(
                [torch.empty(0, device=each.device) if each.tensor is None else each.tensor for each in others]
            )
            for index, saved in enumerate(others):
                saved.tensor, saved.kept = None, (kept, index)


def is_whole(tensor: torch.Tensor) -> bool:
    """Whether a tensor is dense and all of its memory, so that a copy of its numbers can stand for it."""
    memory = tensor.untyped_storage().nbytes()
    return tensor.nbytes == memory and torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def _has_hooks() -> bool:
    # Before torch 2.8 nobody can tell whether there are any.
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return top is None or top(True) is not None


# -------------------------------------------------------------------- an inverted stage


class Output:
    """How an inverted stage gets its output back."""

    def __init__(self) -> None:
        self._source: _Kept | Boundary | None = None

    def refer(self, boundary: Boundary, output: torch.Tensor) -> None:
        """The stage behind rebuilds it."""
        self._source = boundary
        boundary.refer()

    def keep(self, output: torch.Tensor) -> None:
        """It stays until the backward."""
        self._source = _Kept([output])

    def get(self, name: str, input_nodes: Sequence[Node]) -> torch.Tensor:
        """The output, given up if no other backward needs it."""
        match self._source:
            case Boundary() as boundary:
                return boundary.take()
            case None:
                raise ExecutionError(
                    f"{name} is rebuilt again after a backward that did not keep the graph: "
                    "pass retain_graph=True to all but the last backward"
                )
            case kept:
                output = kept[0]
                if is_last_backward_through(input_nodes):
                    self._source = None
                return output


@dataclass(frozen=True, slots=True, eq=False)
class Way:
    """How a stage runs and how it is inverted.

    Attributes:
        name: Of the stage.
        forward: Maps its input to its output.
        inverse: Maps its output to its input.
        draws_random: Remember the random number generators, from whose states forward, inverse and the second forward start.
        state: What the forward changes besides.
    """

    name: str
    forward: Callable[[torch.Tensor], torch.Tensor]
    inverse: Callable[[torch.Tensor], torch.Tensor]
    draws_random: bool = True
    state: SegmentState = _NO_STATE


class Inversion:
    """One run of an inverted stage.

    Args:
        way: How the stage runs.
        value: Its input. Whoever calls lets go of it afterwards.

    Attributes:
        boundary: The input, for those before who refer to it.
        output: The output, to be told whether it stays.
    """

    def __init__(self, way: Way, value: torch.Tensor) -> None:
        self.boundary = Boundary(way.name)
        self.output = Output()
        self._way = way
        self._value: torch.Tensor | None = value
        self._nodes = [value.grad_fn] if value.grad_fn is not None else []
        self._requires_grad = value.requires_grad
        self._like = torch.empty_strided((0,), (1,), dtype=value.dtype, device=value.device)
        self._shape, self._stride, self._dtype = value.shape, value.stride(), value.dtype
        self._guard = Guard.of([value], name=way.name)

    def run(self) -> torch.Tensor:
        """Run the stage; its output belongs to the caller."""
        way, value = self._way, self._value
        assert value is not None
        version = value._version
        output: torch.Tensor = recomputed(
            self._run, self._like, name=repr(way.name), draws_random=way.draws_random, state=way.state
        )
        if value._version != version:
            raise ExecutionError(
                f"{way.name!r} changes its input in place, so it cannot be inverted: expected an untouched input. "
                "Use an operation that is not in place there, or measure again if the model has changed since"
            )
        return output

    def _run(self, _: torch.Tensor) -> torch.Tensor:
        """Called in the forward, and again in the backward. The argument says on which device."""
        if self._value is not None:
            value, self._value = self._value, None
            return self._way.forward(value)
        return self._way.forward(self._rebuilt().requires_grad_(self._requires_grad))

    def _rebuilt(self) -> torch.Tensor:
        with torch.no_grad():
            states = GeneratorStates(self._like.device) if self._way.draws_random else None
            before = FirstPass(self._way.state)
            with before:
                pass
            before.generators = None  # they are among the states
            with Replay(before):
                value = self._way.inverse(self.output.get(repr(self._way.name), self._nodes))
            if states is not None:
                states.restore()
            require_like(value, [(self._shape, self._dtype)], name=self._way.name)
            self._guard.check([value])
            if value.stride() != self._stride:
                value = torch.empty_strided(self._shape, self._stride, dtype=value.dtype, device=value.device).copy_(
                    value
                )
        self.boundary.fill(value)
        return value.detach()
