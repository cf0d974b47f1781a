"""Skip connections between layers of an ``nn.Sequential``, as torchgpipe's users write them.

::

    @skippable(stash=["skip"])                      @skippable(pop=["skip"])
    class Down(nn.Module):                          class Up(nn.Module):
        def forward(self, x):                           def forward(self, x):
            yield stash("skip", x)                          skip = yield pop("skip")
            return self.conv(x)                             return self.conv(x) + skip

    net = nn.Sequential(Down(), Middle(), Up())
    verify_skippables(net)

A decorated class is a subclass of the user's: state dictionaries, ``isinstance`` and pickling stay as they are. Called
plainly, an ``nn.Sequential`` hands tensors on by itself. Cut into a chain, every skip is a value of its own between two
stages: planners know its size (:class:`lightning_rotor.chain.Skip`), and recomputation hands it out again.
"""

import threading
import uuid
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias, TypeVar

from torch import Tensor, nn

from lightning_rotor.errors import RotorError

__all__ = [
    "Namespace",
    "SkipDeclarationError",
    "SkipError",
    "Skippable",
    "pop",
    "skippable",
    "stash",
    "verify_skippables",
]


class SkipDeclarationError(RotorError, TypeError):
    """Declarations of skip connections do not match: something is stashed and never popped, for one."""


class SkipError(RotorError, RuntimeError):
    """A layer did not do what it declared: it stashed or popped something else, or too little."""


@dataclass(frozen=True, order=True, slots=True)
class Namespace:
    """Isolates the skip connections of layers that share it: ``layer.isolate(Namespace())``.

    Layers of one class use the same names over and over; each pair gets a namespace of its own. A namespace equals its
    copies, those in other processes included; its sort order means nothing.
    """

    _id: uuid.UUID = field(default_factory=uuid.uuid4, init=False)


Key: TypeAlias = tuple[Namespace | None, str]
"""A skip connection: its namespace, or None, and its name."""
_ByKey: TypeAlias = dict[Key, Any]
_ByName: TypeAlias = dict[str, Any]
"""Tensors of one layer, which knows its skip connections by their names alone."""
_Commands: TypeAlias = Generator[Any, Any, Any]
_Module = TypeVar("_Module", bound=nn.Module)


@dataclass(frozen=True, slots=True, eq=False)
class stash:  # noqa: N801 - used like a statement: ``yield stash("skip", x)``
    """Command of a skippable layer: keep a tensor, or None, under a name for the layer that pops it."""

    name: str
    tensor: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class pop:  # noqa: N801 - used like a statement: ``skip = yield pop("skip")``
    """Command of a skippable layer: get what was stashed under a name."""

    name: str


class _Plainly(threading.local):
    """Tensors that plain calls have stashed and not popped yet, by thread, as each has its own forward."""

    def __init__(self) -> None:
        self.tensors: _ByKey = {}


_plainly = _Plainly()


class Skippable(nn.Module):
    """Base of the classes that :func:`skippable` makes. Not for direct use."""

    stashable_names: ClassVar[frozenset[str]] = frozenset()
    poppable_names: ClassVar[frozenset[str]] = frozenset()
    _skip_namespaces: Mapping[str, Namespace] = {}

    def isolate(self: _Module, namespace: Namespace, *, only: Iterable[str] | None = None) -> _Module:
        """Give skip connections of this layer a namespace, and return the layer.

        Args:
            namespace: Shared by the layers at both ends.
            only: Names that it is for; by default all.
        Raises:
            SkipDeclarationError: A name is not one of this layer.
        """
        assert isinstance(self, Skippable)
        own_names = self.stashable_names | self.poppable_names
        names = own_names
        if only is not None:
            names = frozenset(only)
        unknown = names - own_names
        if unknown:
            raise SkipDeclarationError(
                f"{type(self).__name__} does not declare {_listed(unknown)}: expected some of {_listed(own_names)}"
            )
        # A new mapping: the one before may be the class's own, or that of a shallow copy.
        self._skip_namespaces = {**self._skip_namespaces, **dict.fromkeys(names, namespace)}
        return self

    def stashable(self) -> tuple[Key, ...]:
        """Keys that the layer stashes, in a fixed order."""
        return self._keys(self.stashable_names)

    def poppable(self) -> tuple[Key, ...]:
        """Keys that the layer pops, in a fixed order."""
        return self._keys(self.poppable_names)

    def _keys(self, names: Iterable[str]) -> tuple[Key, ...]:
        # Sorted, since processes order sets of strings by hashes of their own.
        return tuple((self._skip_namespaces.get(name), name) for name in sorted(names))

    def forward(self, input: Any) -> Any:
        """Run the user's forward; what it stashes waits for another plain call in this thread."""
        tensors = _plainly.tensors
        keys = self.poppable()
        missing = [name for namespace, name in keys if (namespace, name) not in tensors]
        if missing:
            raise SkipError(
                f"{type(self).__name__} pops {_listed(missing)}, which no layer has stashed: run the layers that do "
                "before it, and check with verify_skippables(module)"
            )
        # Before the layer runs: the table must not hold what the layer is done with, as a plan would not either.
        popped = {key: tensors.pop(key) for key in keys}
        output, stashed = self.threaded(input, popped)
        tensors.update(stashed)
        return output

    def threaded(self, input: Any, popped: _ByKey) -> tuple[Any, _ByKey]:
        """Output of the user's forward and all that it stashes; a SkipError if the layer breaks its declaration."""
        waiting = {name: tensor for (_, name), tensor in popped.items()}
        stashed: _ByName = {}
        # The next class in the order of resolution is the user's.
        running = super().forward(input)
        output = running
        # A forward that yields nothing returns its output. If it has declared something, that is missed below.
        if isinstance(running, Generator):
            output = self._follow(running, waiting, stashed)
        # The generator's frame may hold what the forward computed.
        del running
        _require_none_left(self.stashable_names - set(stashed), "stashed")
        _require_none_left(set(waiting), "popped")
        stashed_by_key = {}
        for name, tensor in stashed.items():
            stashed_by_key[self._skip_namespaces.get(name), name] = tensor
        return output, stashed_by_key

    def _follow(self, running: _Commands, waiting: _ByName, stashed: _ByName) -> Any:
        """Carry out the forward's commands until it returns; returns its result."""
        answer: Any = None
        while True:
            try:
                command = running.send(answer)
            except StopIteration as stop:
                # A generator's result travels in the exception that ends it.
                return stop.value
            answer = None
            match command:
                case stash(name, tensor):
                    if name not in self.stashable_names:
                        raise SkipError(f"{name!r} has not been declared as stashable: @skippable(stash=[{name!r}])")
                    stashed[name] = tensor
                case pop(name):
                    if name not in self.poppable_names:
                        raise SkipError(f"{name!r} has not been declared as poppable: @skippable(pop=[{name!r}])")
                    if name not in waiting:
                        raise SkipError(f"{name!r} has been popped already: keep the tensor in a variable")
                    answer = waiting.pop(name)
                case _:
                    raise SkipError(f"{command!r} is no command of a skippable layer: yield stash(...) or pop(...)")


def skippable(stash: Iterable[str] = (), pop: Iterable[str] = ()) -> Callable[[type[_Module]], type[_Module]]:
    """Declare which skip connections a class of layers stashes and pops, as a decorator.

    Its ``forward`` is a generator that yields :class:`.stash` and :class:`.pop` commands and returns the output. The
    decorator makes a subclass under the same name.

    Args:
        stash: Names that each forward stashes.
        pop: Names that each forward pops.
    Raises:
        SkipDeclarationError: A string is given for a list of names, or the class is no ``nn.Module``.
    """
    for argument, names in (("stash", stash), ("pop", pop)):
        # A string is a list of its letters, and would declare each of them.
        if isinstance(names, str):
            raise SkipDeclarationError(
                f"{argument}={names!r} is a string: expected a list of names, {argument}=[{names!r}]"
            )
    # Once, as they may be generators, and the decorator may be used for several classes.
    stashable, poppable = frozenset(stash), frozenset(pop)

    def extend(module_class: type[_Module]) -> type[_Module]:
        given: object = module_class
        if not (isinstance(given, type) and issubclass(given, nn.Module)):
            raise SkipDeclarationError(
                f"{module_class!r} is no class of nn.Module: expected @skippable above a class of layers"
            )
        names = {"stashable_names": stashable, "poppable_names": poppable}
        # Pickles and messages find the subclass where the user's class was, whose name it takes over.
        described = {}
        for attribute in ("__doc__", "__module__", "__qualname__"):
            described[attribute] = getattr(module_class, attribute)
        return type(module_class.__name__, (Skippable, module_class), names | described)

    return extend


def _require_none_left(names: AbstractSet[str], done: str) -> None:
    """``SkipError`` if names are left that a forward has declared and not ``done``."""
    if names:
        has = "has" if len(names) == 1 else "have"
        raise SkipError(f"{_listed(names)} must be {done} but {has} not been")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, sorted(names)))


def verify_skippables(module: nn.Sequential) -> None:
    """Check that every skip connection is stashed once, and popped once by a later layer.

    Args:
        module: Its layers may be sequential containers themselves.
    Raises:
        SkipDeclarationError: They do not match; says all that is wrong.
    Example:
        >>> verify_skippables(nn.Sequential(Layer1(), Layer2()))  # doctest: +SKIP
    """
    verify_layers(list(_layers(module, "")))


def verify_layers(layers: Sequence[tuple[str, nn.Module]]) -> None:
    """:func:`verify_skippables` for layers in a row, with their names."""
    complaints = _complaints(layers)
    if complaints:
        # All at once: who mends one at a time runs the check many times.
        listed = "\n".join(f"* {complaint}" for complaint in complaints)
        raise SkipDeclarationError(f"one or more pairs of stash and pop do not match:\n\n{listed}")


def _layers(module: nn.Sequential, prefix: str) -> Iterable[tuple[str, nn.Module]]:
    # Not named_children, which names a layer once that stands in two places.
    for name, child in module._modules.items():
        # A container with a forward of its own is one layer: only it knows in which order its children run.
        if isinstance(child, nn.Sequential) and type(child).forward is nn.Sequential.forward:
            yield from _layers(child, f"{prefix}{name}.")
        elif child is not None:
            yield f"{prefix}{name}", child


def _complaints(layers: Sequence[tuple[str, nn.Module]]) -> list[str]:
    stashed: set[Key] = set()
    popped: set[Key] = set()
    complaints = []
    for layer_name, layer in layers:
        if not isinstance(layer, Skippable):
            continue
        # One name of one namespace is one value of the chain, which is made once.
        both = layer.stashable_names & layer.poppable_names
        for name in sorted(both):
            complaints.append(f"{layer_name!r} declared {name!r} both as stashable and as poppable")
        for key in layer.stashable():
            _, name = key
            if name in both:
                continue
            if key in stashed:
                complaints.append(f"{layer_name!r} redeclared {name!r} as stashable but not isolated by namespace")
            stashed.add(key)
        for key in layer.poppable():
            _, name = key
            if name in both:
                continue
            if key in popped:
                complaints.append(f"{layer_name!r} redeclared {name!r} as poppable but not isolated by namespace")
            elif key not in stashed:
                complaints.append(f"{layer_name!r} declared {name!r} as poppable but it was not stashed")
                continue
            popped.add(key)
    # Plain calls would hold what nobody pops until it is stashed again, through the whole step.
    # Namespaces have no order that means anything, so names alone decide.
    left = sorted(name for _, name in stashed - popped)
    complaints += [f"no module declared {name!r} as poppable but stashed" for name in left]
    return complaints
