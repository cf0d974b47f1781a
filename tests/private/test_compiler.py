"""Ways in which a user compiles a module as a whole, each with what runs and what was given to the compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_rotor import Checkpointable
from lightning_rotor.private.compiler import compiled_call_of, is_compiled, is_compiler_wrapper, module_inside


def in_place(net: nn.Module) -> nn.Module:
    net.compile(backend="eager")
    return net


def forward_replaced(net: nn.Module) -> nn.Module:
    net.forward = torch.compile(net.forward, backend="eager")
    return net


WAYS: dict[str, Callable[[nn.Module], Any]] = {
    "wrapped": lambda net: torch.compile(net, backend="eager"),
    "in place": in_place,
    "forward replaced": forward_replaced,
}


@pytest.mark.parametrize("way", list(WAYS))
def test_what_runs_and_what_was_compiled_give_the_same(way: str) -> None:
    net = nn.Linear(3, 2)
    assert compiled_call_of(net) is None
    compiled = WAYS[way](net)
    call = compiled_call_of(compiled)
    assert call is not None
    x = torch.ones(1, 3)
    expected = nn.functional.linear(x, net.weight, net.bias)
    assert torch.equal(call.uncompiled(x), expected)
    assert torch.equal(call.run(x), expected)
    assert call.slot in compiled.__dict__


def test_what_the_compiler_returns_has_the_module_inside() -> None:
    net = nn.Linear(3, 2)
    wrapper: Any = torch.compile(net, backend="eager")
    assert is_compiler_wrapper(wrapper)
    assert module_inside(wrapper) is net
    assert is_compiled(wrapper)
    assert not is_compiled(net)


def test_frames_of_this_library_between_a_users_graphs_are_not_compiled() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x).tanh()
                torch._dynamo.graph_break()
                # Saved between two graphs, under whatever hooks there are.
                x = aside(x)
            return x

    @torch.compiler.disable
    def aside(x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    net = Broken()
    net.compile(backend="aot_eager")
    torch._dynamo.utils.clear_compilation_metrics()
    x = torch.randn(16, 8)
    for _ in range(2):
        Checkpointable(net, mem_limit="1GiB", show_progress=False)(x).sum().backward()
    compiled = [str(each.co_filename) for each in torch._dynamo.utils.get_compilation_metrics()]
    assert compiled
    assert not [name for name in compiled if "lightning_rotor" in name and not name.endswith("compiler.py")]
