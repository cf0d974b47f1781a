"""From a module to the stages of a chain.

Stages share the user's own modules and parameters: nothing is copied, renamed or rewritten.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from lightning_rotor.errors import InverseError, ModelError
from lightning_rotor.private import torch_names as private
from lightning_rotor.private.values import address_of, attribute_of, tree_leaves
from lightning_rotor.skip import Key, Skippable, verify_layers

# ----------------------------------------------------------------------------------------------------
# Which values a step takes and which it makes, by number, and what that means for several steps in a row.


@dataclass(frozen=True, slots=True)
class Wire:
    """Numbers of the values that a step takes, and of those that it makes."""

    reads: tuple[int, ...]
    writes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Wiring:
    """Steps in a row, and for each the values that are ``dead`` after it. The caller owns what they take together."""

    wire: Wire
    steps: tuple[Wire, ...]
    dead: tuple[tuple[int, ...], ...]
    _is_row: bool = field(init=False, compare=False)

    def __post_init__(self) -> None:
        # Nearly every chain: each step takes the one value that the step before has made, and nothing else is wanted.
        made = [self.wire.reads, *(step.writes for step in self.steps)]
        taken = [*(step.reads for step in self.steps), self.wire.writes]
        object.__setattr__(self, "_is_row", made == taken and all(len(numbers) == 1 for numbers in made))

    @classmethod
    def of(cls, steps: Iterable[Wire], wanted: Collection[int]) -> Wiring:
        """Wire steps up; ``wanted`` are the values that are needed afterwards, whoever makes them."""
        steps, wanted = tuple(steps), set(wanted)
        made = dict.fromkeys(number for step in steps for number in step.writes)
        taken = dict.fromkeys(number for step in steps for number in step.reads if number not in made)
        given = dict.fromkeys(number for number in made if number in wanted)
        last = {number: index for index, step in enumerate(steps) for number in (*step.writes, *step.reads)}
        dead: list[list[int]] = [[] for _ in steps]
        for number in made:
            if number not in given:
                dead[last[number]].append(number)
        return cls(Wire(tuple(sorted(taken)), tuple(given)), steps, tuple(map(tuple, dead)))

    def run(self, value: Any, functions: Sequence[Callable[[Any], Any]]) -> Any:
        """Run the steps, one function for each."""
        if self._is_row:
            for function in functions:
                value = function(value)
            return value
        values = dict(zip(self.wire.reads, unpacked(value, len(self.wire.reads)), strict=True))
        del value
        for function, step, dead in zip(functions, self.steps, self.dead, strict=True):
            made = function(packed([values[number] for number in step.reads]))
            values.update(zip(step.writes, unpacked(made, len(step.writes)), strict=True))
            del made
            for number in dead:
                del values[number]
        return packed([values[number] for number in self.wire.writes])


def packed(values: Sequence[Any]) -> Any:
    """One value as it is, several as a tuple."""
    return values[0] if len(values) == 1 else tuple(values)


def unpacked(value: Any, count: int) -> Sequence[Any]:
    """The values that :func:`packed` made one of."""
    return (value,) if count == 1 else value


# -------------------------------------------------------------------- Skip connections as values of a chain.


class ThreadedLayer(nn.Module):
    """A skippable layer that takes what it pops after its input, and gives what it stashes after its output."""

    def __init__(self, layer: Skippable) -> None:
        super().__init__()
        self.layer = layer
        self._pops, self._stashes = layer.poppable(), layer.stashable()

    def forward(self, value: Any) -> Any:
        """Run the layer with its hooks."""
        input, *popped = unpacked(value, 1 + len(self._pops))
        given = dict(zip(self._pops, popped, strict=True))
        del value, popped
        output, stashed = self.layer.threaded(input, given)
        return packed([output, *(stashed[key] for key in self._stashes)])


def thread_skips(layers: Sequence[tuple[str, nn.Module]]) -> list[tuple[nn.Module, Wire]]:
    """What runs each layer, and which values it takes and makes.

    Layers without skips stay as they are. Value ``i`` is the input of layer ``i``; skips have the numbers behind those.
    Raises ``SkipDeclarationError`` if stashes and pops do not match.
    """
    threaded: list[tuple[nn.Module, Wire]] = []
    if any(isinstance(layer, Skippable) for _, layer in layers):
        verify_layers(layers)
    numbers: dict[Key, int] = {}
    for index, (_, layer) in enumerate(layers):
        if not isinstance(layer, Skippable):
            threaded.append((layer, Wire((index,), (index + 1,))))
            continue
        reads = tuple(numbers[key] for key in layer.poppable())
        writes = tuple(numbers.setdefault(key, len(layers) + 1 + len(numbers)) for key in layer.stashable())
        threaded.append((ThreadedLayer(layer), Wire((index, *reads), (index + 1, *writes))))
    return threaded


DRAWING = (
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout),
    *(nn.MultiheadAttention, nn.RNNBase, nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d),
)
NORMALIZATIONS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)
"""Torch's layers with running statistics."""


_CALLED = "called_modules"  # an attribute of slices of a graph, see capture


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """A step of a chain: modules that run one after the other.

    Attributes:
        name: Where it is in the user's model: ``"layer1.0"``, or ``"conv1 … relu"`` for a merged run of modules.
        modules: The user's own modules, or slices of a graph that call them.
        wiring: Which values each module takes and makes. By default a single module makes value 1 of value 0.
        variants: Other ways to compute the same, one for each of its options but the first.
    """

    name: str
    modules: tuple[nn.Module, ...]
    wiring: Wiring = field(default_factory=lambda: Wiring.of([Wire((0,), (1,))], (1,)))
    variants: tuple[Callable[[Any], Any], ...] = ()

    def __call__(self, value: Any) -> Any:
        """Run the stage. One value comes and goes as it is, several as a tuple."""
        if len(self.modules) == 1:
            return self.modules[0](value)
        return self.wiring.run(value, self.modules)

    @property
    def invertible(self) -> nn.Module | None:
        """The only module that the stage runs if it has an inverse, else None."""
        module: nn.Module | None = attribute_of(self.modules[0], "only_module", self.modules[0])
        return module if len(self.modules) == 1 and is_invertible(module) else None

    @property
    def reads(self) -> tuple[int, ...]:
        """Numbers of the values that it takes."""
        return self.wiring.wire.reads

    @property
    def writes(self) -> tuple[int, ...]:
        """Numbers of the values that it makes."""
        return self.wiring.wire.writes

    def parameters(self) -> Iterator[nn.Parameter]:
        """Parameters of the stage, each once."""
        yield from dict.fromkeys(parameter for module in self.modules for parameter in module.parameters())

    def learning(self) -> list[nn.Parameter]:
        """Parameters that require gradients, each once."""
        return [parameter for parameter in self.parameters() if parameter.requires_grad]

    def calls(self) -> Iterator[nn.Module]:
        """The user's modules that it calls by itself, each once."""
        yield from dict.fromkeys(each for module in self.modules for each in attribute_of(module, _CALLED, (module,)))

    def called_modules(self) -> Iterator[nn.Module]:
        """The user's modules that it calls and all below them, each once."""
        yield from dict.fromkeys(each for called in self.calls() for each in called.modules())

    def direct_reads(self) -> Iterator[tuple[nn.Module, str]]:
        """Parameters, buffers and attributes that it reads without calling their module: who has them, and the name."""
        for module in self.modules:
            if attribute_of(module, _CALLED) is not None:
                yield from module.reads  # type: ignore[misc]

    def submodules(self) -> Iterator[tuple[str, nn.Module]]:
        """Every module in the stage with a name that is unique in it."""
        for index, module in enumerate(self.modules):
            yield from module.named_modules(prefix=str(index))


def merge(stages: Sequence[Stage], wanted: Collection[int]) -> Stage:
    """One stage that runs several which cannot be cut apart (views, operations in place) and returns ``wanted``."""
    if len(stages) == 1:
        return stages[0]
    first, last = stages[0].name.partition(" … ")[0], stages[-1].name.rpartition(" … ")[2]
    modules = tuple(module for stage in stages for module in stage.modules)
    return Stage(
        f"{first} … {last}", modules, Wiring.of((wire for stage in stages for wire in stage.wiring.steps), wanted)
    )


def wiring_of(stages: Sequence[Stage]) -> Wiring:
    """Wiring of stages in a chain: its input is what nobody writes, its output what the last one does."""
    return Wiring.of((stage.wiring.wire for stage in stages), stages[-1].writes)


def sequential_stages(module: nn.Module) -> tuple[Stage, ...]:
    """Stages of an ``nn.Sequential``, nested ones flattened.

    A nested ``nn.Sequential`` is the same computation as its members in a row, unless it has hooks or a ``forward`` of
    its own; then it stays one stage.

    Raises:
        ModelError: The module is no ``nn.Sequential``, has a ``forward`` of its own, or is empty.
    """
    if not isinstance(module, nn.Sequential):
        raise ModelError(f"{type(module).__name__} is none: expected an nn.Sequential (nested ones are flattened)")
    if not runs_members_in_a_row(module):
        raise ModelError(
            f"{type(module).__name__} is an nn.Sequential with a forward of its own, so its members may not "
            "run one after the other: expected a plain nn.Sequential"
        )
    members = tuple(_flatten(module, ""))
    stages = tuple(
        Stage(name, (member,), Wiring.of([wire], wire.writes))
        for (name, _), (member, wire) in zip(members, thread_skips(members), strict=True)
    )
    if not stages:
        raise ModelError("the nn.Sequential is empty: expected at least one layer")
    return stages


def sequential_members(module: nn.Module) -> list[nn.Module]:
    """The members of an ``nn.Sequential`` that :func:`sequential_stages` makes stages of; none if it refuses."""
    if not isinstance(module, nn.Sequential) or not runs_members_in_a_row(module):
        return []
    return [member for _, member in _flatten(module, "")]


def is_plain_stock(module: nn.Module) -> bool:
    """True if a module is one of torch's own layers, unhooked and not parametrized, so that its behaviour is known."""
    return (
        type(module).__module__.startswith("torch.nn.modules.")
        and not private.has_forward_hooks(module)
        and "forward" not in module.__dict__
    )


def has_own_code(module: nn.Module) -> bool:
    """True if calling a module runs code that is neither torch's nor ours, not counting hooks."""
    return not type(module).__module__.startswith(("torch.nn.modules.", "lightning_rotor.")) or (
        "forward" in module.__dict__ and "_lightning_rotor" not in module.__dict__
    )


def has_own_call(module: nn.Module) -> bool:
    """True if calling a module does more than its class's forward: hooks, also for all modules, or compiled code."""
    return (
        any(module.__dict__[name] for name in private.HOOKS)
        or private.any_hooks_of_all()
        or "forward" in module.__dict__
        or private.is_compiled_in_place(module)
    )


def _flatten(module: nn.Sequential, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    # Not named_children: it lists a module that appears twice (a shared activation) only once.
    members: Mapping[str, nn.Module | None] = module._modules
    for name, child in members.items():
        if child is None:
            continue
        full_name = f"{prefix}.{name}" if prefix else name
        # Hooks on a container fire when the container is called, which the flat chain never does.
        if isinstance(child, nn.Sequential) and runs_members_in_a_row(child) and not has_own_call(child):
            yield from _flatten(child, full_name)
        else:
            yield full_name, child


def runs_members_in_a_row(module: nn.Sequential) -> bool:
    """True if an ``nn.Sequential`` has no forward of its own."""
    return type(module).forward is nn.Sequential.forward and type(module).__call__ is nn.Module.__call__


# --------------------------------------- What an invertible module is: one with an ``inverse``. There is no base class.

# Forward, inverse and each repetition start from the same state of the generators and of the module's buffers, so a
# module that draws in several places must draw the same numbers whichever place comes first (see ``AdditiveCoupling``).


DRAWS = (
    "The module draws random numbers (RNG): forward and inverse start from the same state of the generators, "
    "and each part must draw the same numbers in both, though the inverse may run the parts in another order"
)
"""Part of the message where an inverse is off."""


@runtime_checkable
class Invertible(Protocol):
    """A module that can rebuild its input.

    Input and output are a tensor, or tensors in a tuple, list or dict. The output takes at least as many bytes as the
    input. What it shows of the input's memory (a reshape, a part that is handed through) is held with it.
    """

    def inverse(self, output: Any, /) -> Any:
        """The input that made an output: same structure, shapes and dtypes."""


@runtime_checkable
class Reversible(Invertible, Protocol):
    """An invertible module with a fused backward, which evaluates what forward and inverse have in common once."""

    def reversible_backward(self, output: Any, gradient: Any, /) -> tuple[Any, Any]:
        """Rebuild the input and run the backward.

        Called without gradient recording; accumulates the gradients of the module's parameters in their ``grad``, as
        ``loss.backward()`` does.

        Args:
            output: Of the forward, detached.
            gradient: Of the loss for the output.
        Returns:
            The input, and the gradient of the loss for it.
        """


def is_invertible(module: object) -> bool:
    """True if a module has an ``inverse``, right or not: see :func:`~lightning_rotor.invertible.check_inverse`."""
    inverse = attribute_of(module, "inverse")
    return callable(inverse) and not isinstance(inverse, torch.nn.Module)  # a layer may have that name


def has_fused_backward(module: object) -> bool:
    """True if a module has a ``reversible_backward`` besides its ``inverse``."""
    return is_invertible(module) and callable(attribute_of(module, "reversible_backward"))


def require_invertible(module: object, *, name: str) -> None:
    """Raise ``InverseError`` if a module has no inverse."""
    if not is_invertible(module):
        raise InverseError(
            f"{name!r} ({type(module).__name__}) has no inverse: expected a method inverse(output) that "
            "returns the input. Write one, or run the module plainly",
            stage=name,
        )


def shares_memory(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> bool:
    """True if outputs show memory of inputs."""
    return bool(
        {address_of(tensor) for tensor in inputs if tensor.numel()} & {address_of(tensor) for tensor in outputs}
    )


def require_own_output(
    inputs: Sequence[torch.Tensor], versions: Sequence[int], output: Any, *, name: str
) -> list[torch.Tensor]:
    """The tensors of an output for which the input can be dropped, or ``InverseError``.

    ``versions`` are those of the inputs before the forward, which must not change them.
    """
    made = require_tensors(output, name=name, what="output")
    if [private.version_of(tensor) for tensor in inputs] != list(versions):
        raise InverseError(
            f"{name!r} changes its input in place: expected an untouched input, which its other readers rely on. "
            "Use an operation that is not in place",
            stage=name,
        )
    taken_bytes, made_bytes = (sum(tensor.nbytes for tensor in tensors) for tensors in (inputs, made))
    if made_bytes < taken_bytes:
        raise InverseError(
            f"{name!r} returns less than it takes, {made_bytes} of {taken_bytes} bytes: expected an output from which "
            "the input can be rebuilt. Keep what is left out in a second output, or run the module plainly",
            stage=name,
        )
    return made


def require_like(
    rebuilt: Any, shapes: Sequence[tuple[torch.Size, torch.dtype]], *, name: str, what: str = "inverse"
) -> list[torch.Tensor]:
    """The tensors that an inverse returned; ``InverseError`` if number, shapes or dtypes are not the forward's."""
    leaves = require_tensors(rebuilt, name=name, what=what)
    if len(leaves) != len(shapes):
        raise InverseError(
            f"the {what} of {name!r} returns {len(leaves)} tensors: expected {len(shapes)}, which the "
            "forward took. Return them all",
            stage=name,
        )
    for leaf, (shape, dtype) in zip(leaves, shapes, strict=True):
        if leaf.shape != shape or leaf.dtype != dtype:
            raise InverseError(
                f"the {what} of {name!r} returns a tensor of shape {tuple(leaf.shape)} and {leaf.dtype}: "
                f"expected {tuple(shape)} and {dtype}, which the forward took. Return what it took",
                stage=name,
            )
    return leaves


def require_tensors(value: Any, *, name: str, what: str) -> list[torch.Tensor]:
    """The leaves of a value; ``InverseError`` if there is none, or one that is no tensor."""
    leaves = tree_leaves(value)
    if not leaves or not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
        raise InverseError(
            f"the {what} of {name!r} is {type(value).__name__}: expected a tensor, or tensors in a tuple, list or dict",
            stage=name,
        )
    return leaves
