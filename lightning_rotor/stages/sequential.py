"""From a module to the stages of a chain.

Stages share the user's own modules and parameters: nothing is copied, renamed or rewritten.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from lightning_rotor.errors import ModelError
from lightning_rotor.private.values import attribute_of
from lightning_rotor.stages.inverses import is_invertible
from lightning_rotor.stages.known_layers import does_more_than_forward, runs_members_in_a_row
from lightning_rotor.stages.threaded_skips import thread_skips
from lightning_rotor.stages.wiring import Wire, Wiring

_CALLED = "called_modules"
"""An attribute of slices of a graph: the user's modules that they call, see ``capture.graph_stage``."""


def _one_in_one_out() -> Wiring:
    """Wiring of a single module that makes value 1 of value 0."""
    return Wiring.of([Wire((0,), (1,))], (1,))


# Compared by identity: two stages of equal modules are two stages.
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
    wiring: Wiring = field(default_factory=_one_in_one_out)
    variants: tuple[Callable[[Any], Any], ...] = ()

    def __call__(self, value: Any) -> Any:
        """Run the stage. One value comes and goes as it is, several as a tuple."""
        # Nearly every stage, at every step.
        if len(self.modules) == 1:
            return self.modules[0](value)
        return self.wiring.run(value, self.modules)

    @property
    def invertible(self) -> nn.Module | None:
        """The only module that the stage runs if it has an inverse, else None."""
        if len(self.modules) != 1:
            return None
        # A slice of a graph says which module it runs, and None if it does anything else.
        module: nn.Module | None = attribute_of(self.modules[0], "only_module", self.modules[0])
        return module if is_invertible(module) else None

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
        # A dict in the place of a set that keeps its order: modules may share parameters.
        parameters: dict[nn.Parameter, None] = {}
        for module in self.modules:
            parameters.update(dict.fromkeys(module.parameters()))
        yield from parameters

    def learning(self) -> list[nn.Parameter]:
        """Parameters that require gradients, each once."""
        return [parameter for parameter in self.parameters() if parameter.requires_grad]

    def calls(self) -> Iterator[nn.Module]:
        """The user's modules that it calls by itself, each once."""
        called: dict[nn.Module, None] = {}
        for module in self.modules:
            called.update(dict.fromkeys(attribute_of(module, _CALLED, (module,))))
        yield from called

    def called_modules(self) -> Iterator[nn.Module]:
        """The user's modules that it calls and all below them, each once."""
        modules: dict[nn.Module, None] = {}
        for called in self.calls():
            modules.update(dict.fromkeys(called.modules()))
        yield from modules

    def direct_reads(self) -> Iterator[tuple[nn.Module, str]]:
        """Parameters, buffers and attributes that it reads without calling their module: who has them, and the name."""
        for module in self.modules:
            # Slices of a graph alone: a module of the user's reads what it has when it is called.
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
    # One that was merged before has such a name already.
    first, _, _ = stages[0].name.partition(" … ")
    _, _, last = stages[-1].name.rpartition(" … ")
    modules: list[nn.Module] = []
    wires: list[Wire] = []
    for stage in stages:
        modules += stage.modules
        # Step by step, so that values are let go inside of the merged stage, too.
        wires += stage.wiring.steps
    return Stage(f"{first} … {last}", tuple(modules), Wiring.of(wires, wanted))


def wiring_of(stages: Sequence[Stage]) -> Wiring:
    """Wiring of stages in a chain: its input are the values that nobody writes, its output those of the last one."""
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
    if not members:
        raise ModelError("the nn.Sequential is empty: expected at least one layer")
    stages = []
    for (name, _), (member, wire) in zip(members, thread_skips(members), strict=True):
        stages.append(Stage(name, (member,), Wiring.of([wire], wire.writes)))
    return tuple(stages)


def sequential_members(module: nn.Module) -> list[nn.Module]:
    """The members of an ``nn.Sequential`` that :func:`sequential_stages` makes stages of; none if it refuses."""
    if not isinstance(module, nn.Sequential) or not runs_members_in_a_row(module):
        return []
    return [member for _, member in _flatten(module, "")]


def _flatten(module: nn.Sequential, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    # Not named_children: it lists a module that appears twice (a shared activation) only once.
    members: Mapping[str, nn.Module | None] = module._modules
    for name, child in members.items():
        if child is None:
            continue
        full_name = f"{prefix}.{name}" if prefix else name
        # Hooks on a container fire when the container is called, which the flat chain never does.
        if isinstance(child, nn.Sequential) and runs_members_in_a_row(child) and not does_more_than_forward(child):
            yield from _flatten(child, full_name)
        else:
            yield full_name, child
