"""Models and optimizers by the names that a command line gives them."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_rotor.errors import ModelError

_EXPECTED = "expected a class or function that makes a module"


def model_maker(path: str, arguments: dict[str, Any]) -> Callable[[], nn.Module]:
    """A function that makes a model, maker at ``package.module.name`` or ``file.py:name``, or ``ModelError``."""
    maker = _named(path)
    if not callable(maker):
        raise ModelError(f"{path} is {type(maker).__name__}: {_EXPECTED}")

    def make() -> nn.Module:
        try:
            model = maker(**arguments)
        except TypeError as error:
            remedy = "Expected its arguments as --model-arg name=value"
            raise ModelError(f"{path} cannot be called: {error}. {remedy}") from error
        if not isinstance(model, nn.Module):
            raise ModelError(f"{path} makes {type(model).__name__}: expected a torch.nn.Module")
        return model

    return make


def _named(path: str) -> Any:
    """The object called ``package.module.name`` or ``file.py:name``."""
    if ".py:" in path:
        place, _, name = path.rpartition(":")
        file = Path(place)
        if not file.is_file():
            raise ModelError(
                f"there is no file {place!r}: expected file.py:name with the name of a class or function in it"
            )
        # The user's own modules are beside the file, or where the command is run.
        folder = file.resolve().parent
        module_name = file.stem
        # A file that is called like a module of Python's, or of another folder, is not that one.
        sys.modules.pop(module_name, None)
    else:
        # With a colon, as entry points are written.
        place, _, name = path.replace(":", ".").rpartition(".")
        folder = Path.cwd()
        module_name = place
    sys.path.insert(0, str(folder))
    # A file that has just been written may be newer than what Python remembers of its folder.
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(module_name)
    except (ModuleNotFoundError, ValueError) as error:
        missing = str(getattr(error, "name", None) or path)
        raise ModelError(
            f"{place or path} cannot be imported: {error}. Expected package.module.name, such as "
            f"torchvision.models.resnet101, or file.py:name. {_remedy(missing)}"
        ) from error
    if not hasattr(module, name):
        found = [each for each in dir(module) if not each.startswith("_") and callable(getattr(module, each, None))]
        raise ModelError(f"{place} has no {name!r}: {_EXPECTED}{did_you_mean(name, found)}")
    return getattr(module, name)


def _remedy(missing: str) -> str:
    """A sentence about a module that was not found: its package is not there, or has modules of other names."""
    package, _, name = missing.rpartition(".")
    places = getattr(sys.modules.get(package), "__path__", None)
    if places is None:
        return f"Try pip install {missing.partition('.')[0]} if that is a package"
    modules = [each.name for each in pkgutil.iter_modules(places)]
    return did_you_mean(name, modules).removeprefix(". ") or f"{package} has no module {name!r}"


def optimizers_for(model: nn.Module, text: str) -> list[torch.optim.Optimizer]:
    """The optimizer called ``adamw``, ``sgd:momentum=0.9`` or ``none`` for what learns in a model, or ModelError."""
    name, _, given = text.partition(":")
    base = torch.optim.Optimizer
    # All that torch has, so that a new one needs no line here.
    kinds: dict[str, type[torch.optim.Optimizer]] = {}
    for kind in vars(torch.optim).values():
        if isinstance(kind, type) and issubclass(kind, base) and kind is not base:
            kinds[kind.__name__.lower()] = kind
    # Whatever the user's case: classes are AdamW and SGD, and command lines are written small.
    if name.lower() not in (*kinds, "none"):
        raise ModelError(
            f"optimizer {name!r} is unknown: expected one of {', '.join(sorted(kinds))}, or none"
            f"{did_you_mean(name.lower(), kinds)}"
        )
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if name.lower() == "none" or not learning:
        return []
    # A rate is required by some optimizers, and takes no memory.
    arguments: dict[str, Any] = {"lr": 1e-3}
    for part in given.split(","):
        if part:
            key, value = assignment(part)
            arguments[key] = value
    try:
        return [kinds[name.lower()](learning, **arguments)]
    except (TypeError, ValueError) as error:
        raise ModelError(f"optimizer {text!r} cannot be made: {error}") from error


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a message about a name that is unknown: the known one that is most like it, if any is."""
    by_lower = {each.lower(): each for each in known}
    close = get_close_matches(name.lower(), by_lower, n=1)
    return f". Did you mean {by_lower[close[0]]}?" if close else ""


def assignment(text: str) -> tuple[str, Any]:
    """The name and value of ``name=value``, a Python literal or else a string; ``ModelError`` if it is none."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise ModelError(f"{text!r} is no assignment: expected name=value, such as num_classes=10")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        # A word without quotes, as a command line has it.
        return name, value
