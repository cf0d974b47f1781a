"""A Checkpointable has the names, the signature, the attributes and the class of its module, as other packages ask."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from lightning_rotor import Checkpointable, ModelError


class Tower(nn.Module):
    """Layers, a parameter, buffers and a mode of its own: its normalization never trains."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.norm = nn.BatchNorm1d(16)
        self.gain = nn.Parameter(torch.ones(16))
        self.register_buffer("offset", torch.zeros(16), persistent=False)
        self.register_buffer("count", torch.zeros(()))
        self.config = {"width": 16}

    def forward(self, inputs: torch.Tensor, *, scale: float = 1.0, labels: torch.Tensor | None = None) -> Any:
        for layer in self.layers:
            inputs = torch.tanh(layer(inputs))
        output = self.norm(inputs) * self.gain * scale + self.offset
        return output if labels is None else (output - labels).square().mean()

    def train(self, mode: bool = True) -> Tower:
        super().train(mode)
        self.norm.eval()
        return self


def sequential() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 16), nn.Sequential(nn.BatchNorm1d(16), nn.Tanh()), nn.Linear(16, 16))


def with_a_child_of_that_name() -> nn.Module:
    outer = Tower()
    outer.module = nn.Linear(2, 2)
    return outer


def compiled() -> nn.Module:
    return torch.compile(Tower(), backend="eager")


MAKERS = [Tower, sequential, with_a_child_of_that_name, compiled]
NAMES = ["named_parameters", "named_buffers", "named_children", "named_modules"]


def names(module: nn.Module, which: str) -> list[str]:
    return [name for name, _ in getattr(module, which)()]


@pytest.mark.parametrize("make", MAKERS)
def test_names_are_those_of_the_module_also_inside_of_another(make: Callable[[], nn.Module]) -> None:
    module = make()
    net = Checkpointable(module, mem_limit="1GiB")
    around, plain = nn.ModuleDict({"net": net}), nn.ModuleDict({"net": module})
    for ours, theirs in ((net, module), (around, plain)):
        for which in NAMES:
            assert names(ours, which) == names(theirs, which), which
        assert list(ours.state_dict()) == list(theirs.state_dict())
        assert ours.state_dict()._metadata == theirs.state_dict()._metadata
        assert all(one is other for one, other in zip(ours.parameters(), theirs.parameters(), strict=True))
        assert len(list(ours.modules())) == len(list(theirs.modules()))
        assert ours.load_state_dict(theirs.state_dict()).missing_keys == []
    assert list(net.children()) == list(module.children())
    assert next(iter(net.modules())) is around.get_submodule("net") is net
    for name in names(module, "named_parameters"):
        assert net.get_parameter(name) is module.get_parameter(name)
        if not name.startswith("module."):  # of the wrapper, this is the module itself
            assert around.get_parameter(f"net.{name}") is module.get_parameter(name)


def test_a_state_dict_that_does_not_fit_is_reported_in_the_modules_names() -> None:
    net = nn.ModuleDict({"net": Checkpointable(sequential())})
    state = net.state_dict()
    state["net.4.weight"] = state.pop("net.0.weight")
    found = net.load_state_dict(state, strict=False)
    assert (found.missing_keys, found.unexpected_keys) == (["net.0.weight"], ["net.4.weight"])
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "net.0.weight"'):
        net.load_state_dict(state)


def test_what_is_set_or_removed_is_the_modules() -> None:
    module = Tower()
    net = Checkpointable(module)
    net.extra = nn.Linear(2, 2)
    net.add_module("more", nn.Linear(2, 2))
    net.register_buffer("mask", torch.ones(1))
    net.register_parameter("bias", nn.Parameter(torch.ones(1)))
    net.gain = nn.Parameter(torch.zeros(16))
    net.level = 3
    assert names(net, "named_modules") == names(module, "named_modules")
    assert list(net.state_dict()) == list(module.state_dict())
    assert net.extra is module.extra
    assert module.level == net.level == 3
    del net.level, net.extra, net.mask
    assert not hasattr(module, "level")
    assert not hasattr(module, "extra")
    assert not hasattr(net, "mask")
    assert {"extra.weight", "mask"}.isdisjoint(net.state_dict())
    assert {"plan", "config", "forward"} <= set(dir(net))


def test_modes_and_conversions_are_the_modules_own() -> None:
    module = Tower()
    net = Checkpointable(module)
    assert net.train() is net
    assert net.training is module.training is True
    assert not module.norm.training  # as its own train() says
    nn.Sequential(net).eval()
    assert net.training is module.training is False
    net.training = True
    assert module.training
    assert net.double() is net
    assert net.to(torch.float64).gain.dtype == torch.float64
    seen: list[nn.Module] = []
    assert net.apply(seen.append) is net
    assert seen[-1] is module
    net.requires_grad_(False)
    assert not any(parameter.requires_grad for parameter in module.parameters())
    assert bool(net)
    assert bool(Checkpointable(sequential()))


@pytest.mark.parametrize("make", MAKERS)
def test_the_signature_is_the_modules(make: Callable[[], nn.Module]) -> None:
    module = make()
    plain = module._orig_mod if make is compiled else module
    net = Checkpointable(module)
    assert inspect.signature(net.forward) == inspect.signature(plain.forward)


def test_it_is_of_the_modules_class_to_whoever_asks() -> None:
    net = Checkpointable(Tower())
    assert isinstance(net, Tower)
    assert isinstance(net, Checkpointable)
    assert isinstance(net, nn.Module)
    assert net.__class__ is Tower
    assert type(net) is Checkpointable
    assert not isinstance(net, nn.Sequential)


def test_a_trainer_refuses_a_wrapped_lightning_module_whose_step_would_run_without_a_plan() -> None:
    import lightning as L

    net = Checkpointable(L.LightningModule())
    assert not isinstance(net, L.LightningModule)
    with pytest.raises(TypeError, match="must be a `LightningModule`"):
        L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False).fit(net)


@pytest.mark.parametrize("make", [Tower, sequential])
def test_copies_hold_modules_of_their_own(make: Callable[[], nn.Module]) -> None:
    net, x = Checkpointable(make(), mem_limit="1GiB"), torch.randn(8, 16)
    net(x).sum().backward()
    for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert type(twin) is Checkpointable
        assert names(twin, "named_parameters") == names(net, "named_parameters")
        assert all(one is not other for one, other in zip(twin.parameters(), net.parameters(), strict=True))
        assert all(one is other for one, other in zip(twin.parameters(), twin.module.parameters(), strict=True))
        twin(x).sum().backward()
        assert twin.plan is not None


def test_parametrizations_and_pruning_find_the_modules_weights() -> None:
    module, x = Tower(), torch.randn(8, 16)
    net = Checkpointable(module, mem_limit="1GiB")
    parametrizations.weight_norm(net.layers[0])
    prune.l1_unstructured(net, "gain", 0.5)
    assert names(net, "named_parameters") == names(module, "named_parameters")
    assert "gain_orig" in names(net, "named_parameters")
    assert torch.equal(net(x), module(x))


def test_a_call_of_the_function_uses_the_modules_names() -> None:
    module, x = Tower(), torch.randn(8, 16)
    net = Checkpointable(module, mem_limit="1GiB")
    others = {name: torch.randn_like(each) for name, each in module.named_parameters()}
    expected = torch.func.functional_call(module, others, (x,))
    assert torch.equal(torch.func.functional_call(net, others, (x,)), expected)


class Sharing(nn.Module):
    """Code that asks for the truth of modules, as ``self.head or self.body``."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = Checkpointable(Tower(), mem_limit="1GiB"), nn.ModuleList()
        self.last = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last((self.head or self.body)(x))


def test_one_inside_of_another_is_one_stage_and_reads_its_attributes_anew() -> None:
    net, x = Sharing(), torch.randn(8, 16)
    outer = Checkpointable(copy.deepcopy(net), mem_limit="1GiB")
    for scale in (1.0, 2.0):
        for model in (net, outer):
            model.zero_grad()
            model.body.offset = torch.full((16,), scale)
            model(x).square().sum().backward()
        for one, other in zip(net.parameters(), outer.parameters(), strict=True):
            assert torch.equal(one.grad, other.grad)


@pytest.mark.filterwarnings("ignore:`torch.jit.* is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:stage '0' gives other bits:lightning_rotor.RotorWarning")
def test_a_scripted_module_is_refused_as_a_whole_and_a_stage_inside_of_another() -> None:
    x = torch.randn(8, 16)
    for whole in (torch.jit.script(sequential()), torch.jit.trace(sequential().eval(), x)):
        with pytest.raises(ModelError, match=r"was scripted or traced \(torch.jit\)"):
            Checkpointable(whole.train(), mem_limit="1GiB")(x)
    net = Checkpointable(nn.Sequential(torch.jit.script(nn.Linear(16, 16)), nn.Linear(16, 16)), mem_limit="1GiB")
    net(x).sum().backward()
    assert len(net.chain) == 2
