"""Models and optimizers by name."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_rotor.command_line.options import assignment
from lightning_rotor.errors import ModelError


def model_maker(path: str, arguments: dict[str, Any]) -> Callable[[], nn.Module]:
    """What makes a model.

    Args:
        path: ``package.module.name`` or ``file.py:name``.
        arguments: For the class or function of that name.
    Returns:
        A function that makes it; raises :class:`ModelError` if what it makes is no module.
    Raises:
        ModelError: There is nothing of that name.
    """
    make = _in_file(path) if ".py:" in path else _in_package(path)
    if not callable(make):
        raise ModelError(f"{path} is {type(make).__name__}: expected a class or function that makes a module")
    return partial(_made, path, make, arguments)


def optimizer_maker(text: str) -> Callable[[nn.Module], torch.optim.Optimizer | None]:
    """What makes an optimizer: ``adamw``, ``sgd:momentum=0.9`` or ``none``.

    Raises:
        ModelError: There is none of that name.
    """
    name, _, given = text.partition(":")
    known: dict[str, type[torch.optim.Optimizer]] = {
        key.lower(): value
        for key, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer
    }
    if name.lower() == "none":
        return lambda model: None
    if name.lower() not in known:
        raise ModelError(f"optimizer {name!r} is unknown: expected one of {', '.join(sorted(known))}, or none")
    arguments = {"lr": 1e-3} | dict(assignment(part) for part in given.split(",") if part)

    def make(model: nn.Module) -> torch.optim.Optimizer | None:
        learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
        try:
            return known[name.lower()](learning, **arguments) if learning else None
        except (TypeError, ValueError) as error:
            raise ModelError(f"optimizer {text!r} cannot be made: {error}") from error

    return make


def _made(path: str, make: Callable[..., Any], arguments: dict[str, Any]) -> nn.Module:
    try:
        model = make(**arguments)
    except TypeError as error:
        raise ModelError(
            f"{path} cannot be called: {error}. Expected its arguments as --model-arg name=value"
        ) from error
    if not isinstance(model, nn.Module):
        raise ModelError(f"{path} makes {type(model).__name__}: expected a torch.nn.Module")
    return model


def _in_package(path: str) -> Any:
    parts = path.split(".")
    # The user's own modules are where the command is run.
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    for length in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:length])
        try:
            found: Any = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if f"{name}.".startswith(f"{error.name}."):
                continue
            raise _needs(name, error) from error
        for place, part in enumerate(parts[length:], length):
            if not hasattr(found, part):
                raise ModelError(
                    f"{'.'.join(parts[:place])} has no {part!r}: expected a class or function that makes a module"
                )
            found = getattr(found, part)
        return found
    remedy = f"pip install {parts[0]} if that is a package. Expected" if len(parts) > 1 else "expected"
    raise ModelError(
        f"there is no module for {path!r}: {remedy} package.module.name, such as torchvision.models.resnet101, or file.py:name"
    )


def _needs(name: str, error: ModuleNotFoundError) -> ModelError:
    """What a module imports is not installed."""
    remedy = f". Try pip install {error.name.partition('.')[0]}" if error.name else ""
    return ModelError(f"{name} cannot be imported: {error}{remedy}")


def _in_file(path: str) -> Any:
    file, _, name = path.rpartition(":")
    place = Path(file)
    if not place.is_file():
        raise ModelError(f"there is no file {file!r}: expected file.py:name with the name of a class or function in it")
    spec = importlib.util.spec_from_file_location(place.stem, place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(place.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except ModuleNotFoundError as error:
        raise _needs(file, error) from error
    if not hasattr(module, name):
        raise ModelError(f"{file} has no {name!r}: expected a class or function that makes a module")
    return getattr(module, name)
