"""The two packages that Lightning is published as; neither is required.

Both have the same code, and their classes are different ones. A Trainer takes callbacks, strategies and models of its
own package alone, and programs of others are written for either. So a class of ours derives from both.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

LIGHTNINGS = ("lightning.pytorch", "pytorch_lightning")
_OLDEST = (2, 6)
_SPEAKER = "lightning_utilities.core.rank_zero"


@cache
def installed() -> tuple[ModuleType, ...]:
    """Packages of Lightning that are installed, and new enough. The second one costs a quarter of a second."""
    packages = []
    for name in LIGHTNINGS:
        top_name, _, _ = name.partition(".")
        try:
            with _same_logger():
                package = import_module(name)
        except ModuleNotFoundError as error:
            # Something else is missing, which the user must hear of.
            if error.name not in (name, top_name):
                raise
            continue
        version = import_module(top_name).__version__
        if tuple(int(part) for part in version.split(".")[:2]) >= _OLDEST:
            packages.append(package)
    return tuple(packages)


@contextmanager
def _same_logger() -> Iterator[None]:
    """Lets the Lightning that the user has imported go on under its logger's name, by which users silence it.

    Each of the two takes over all messages when it is imported (``rank_zero_module.log``).
    """
    speaker = sys.modules.get(_SPEAKER) if any(name in sys.modules for name in LIGHTNINGS) else None
    log = getattr(speaker, "log", None)
    yield
    if log is not None:
        vars(speaker)["log"] = log


@cache
def from_each(path: str) -> tuple[Any, ...]:
    """Objects of each installed Lightning under a path, such as the classes ``"loggers.TensorBoardLogger"``."""
    module, _, name = path.rpartition(".")
    objects = []
    for package in installed():
        objects.append(getattr(import_module(f".{module}", package.__name__), name))
    return tuple(objects)


def function(path: str) -> Any:
    """A function of Lightning by its path, of either package: one that asks for no object's class."""
    return from_each(path)[0]


@cache
def joined(path: str, first: str = LIGHTNINGS[0]) -> Any:
    """A class to derive from that is one of each installed Lightning; the code that runs is the ``first`` one's."""
    # Sorting keeps the order of equals: the first one's class leads, and the others follow.
    classes = sorted(from_each(path), key=lambda kind: not _is_of(kind, first))
    if len(classes) == 1:
        return classes[0]
    name = f"_{classes[0].__name__}_of_{first.partition('.')[0]}_first"
    made = type(classes[0])(name, tuple(classes), {"__module__": __name__})
    # LightningCLI looks for classes below those that can be imported.
    globals()[name] = made
    return made


def follow(kind: type, path: str, part: Any) -> None:
    """Let a class that derives from :func:`joined` run the code of the Lightning that a part of the Trainer is of.

    Strategies assert that models are of their own Lightning. Trainers of both in one process take turns.
    """
    bases = (joined(path, _package_of(type(part))),)
    # Setting the bases of a class, even to the same ones, throws away what Python has cached of its attributes.
    if kind.__bases__ != bases:
        kind.__bases__ = bases


def _package_of(kind: type) -> str:
    """Name of the Lightning that a class derives from."""
    for name in LIGHTNINGS:
        if any(_is_of(base, name) for base in kind.__mro__):
            return name
    return LIGHTNINGS[0]


def _is_of(kind: type, package: str) -> bool:
    return kind.__module__.startswith(f"{package}.")


def _is_of_any(kind: type) -> bool:
    return any(_is_of(kind, package) for package in LIGHTNINGS)


def lightning_module_class(module: Any) -> type | None:
    """The LightningModule that an object's class derives from, or None. No Lightning is imported for the answer."""
    # By name: importing Lightning takes seconds, which a script without it must not pay.
    for kind in type(module).__mro__:
        if kind.__name__ == "LightningModule" and _is_of_any(kind):
            return kind
    return None


def is_overridden(name: str, module: Any) -> bool:
    """True if a LightningModule has a method of its own."""
    from lightning_utilities.core.overrides import is_overridden as differs

    parent = lightning_module_class(module)
    return parent is not None and bool(differs(name, module, parent))


def overrides_hook(callback: Any, name: str) -> bool:
    """True if a callback has a hook of its own, whichever Lightning its class is from."""
    owner = next(kind for kind in type(callback).__mro__ if name in vars(kind))
    return not _is_of_any(owner) or owner.__name__ != "Callback"
