"""Another forward in the place of a module's own."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from lightning_rotor.errors import ModelError
from lightning_rotor.planned.attachment import attach, detach, inactive, is_attached


class Doubled:
    """Runs a module, and doubles what it returns."""

    active = True
    compiled = None

    def __reduce__(self) -> tuple[Any, ...]:
        return inactive, ()

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return 2 * type(module).forward(module, *args, **kwargs)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor, *, offset: float = 0.0) -> torch.Tensor:
        return x * self.weight + offset


def test_it_runs_in_the_place_of_the_modules_own_and_goes_without_a_trace() -> None:
    module, x = Scaled(), torch.arange(3.0)
    before, signature = dict(vars(module)), inspect.signature(module.forward)
    attach(module, Doubled())
    assert is_attached(module)
    assert torch.equal(module(x, offset=1.0), 2 * (x + 1))
    assert inspect.signature(module.forward) == signature
    detach(module)
    assert not is_attached(module)
    assert vars(module) == before
    detach(module)  # once more does nothing


def test_hooks_and_other_instances_are_left_alone() -> None:
    module, other, x = Scaled(), Scaled(), torch.ones(3)
    seen = []
    module.register_forward_hook(lambda _, inputs, output: seen.append(output))
    attach(module, Doubled())
    assert torch.equal(seen[0] if seen else module(x), 2 * x)
    assert torch.equal(other(x), x)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_copy_runs_its_own_weights_plainly(copied: Any) -> None:
    module, x = Scaled(), torch.ones(3)
    attach(module, Doubled())
    other = copied(module)
    with torch.no_grad():
        other.weight.fill_(5.0)
    assert not is_attached(other)
    assert torch.equal(other(x), 5 * x)
    assert torch.equal(module(x), 2 * x)
    attach(other, Doubled())  # a copy may be planned itself
    assert torch.equal(other(x), 10 * x)


def test_a_forward_that_somebody_else_has_replaced_is_not_touched() -> None:
    module = Scaled()
    module.forward = lambda x: x  # type: ignore[method-assign]
    with pytest.raises(ModelError, match="has been replaced already"):
        attach(module, Doubled())
    assert module(3) == 3


def test_detaching_names_whose_forward_goes() -> None:
    module, mine, other = Scaled(), Doubled(), Doubled()
    attach(module, mine)
    detach(module, other)
    assert is_attached(module)
    detach(module, mine)
    assert not is_attached(module)


def test_a_forward_tells_itself_from_another() -> None:
    """One that is called while it is still attached, and cannot plan, must not call itself."""
    module, mine, other = Scaled(), Doubled(), Doubled()
    attach(module, mine)
    assert not is_attached(module, besides=mine)
    assert is_attached(module, besides=other)
