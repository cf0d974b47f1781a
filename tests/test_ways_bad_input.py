"""What models should not do, and do: either the same bits as plain training, or an error that names the place and the remedy."""

from __future__ import annotations

import cProfile
import gc
import logging
import random
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attr
import lightning.pytorch as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules import module as every_module
from torch.utils._pytree import tree_leaves

from lightning_rotor import Checkpointable, ModelError, RotorCallback, sequentialize
from lightning_rotor.execution.passes import is_recomputing
from lightning_rotor.planning import minimum_budget
from tests.grids import few
from tests.training import appearance, assert_same_bits, assert_same_training, train

X = (32, 16)
Forward = Callable[..., Any]


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(16, 16), nn.BatchNorm1d(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.norm(self.linear(x)))


class Net(nn.Module):
    """Blocks in a loop."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def traced(forward: Forward) -> nn.Module:
    """A model with this forward."""
    return type("Traced", (Net,), {"forward": forward})()


def recorded(forward: Forward) -> nn.Module:
    """The same behind a question about sizes."""

    def ask(net: Net, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if x.shape[0] > 1000:
            raise ValueError("too long")
        return forward(net, x, *args, **kwargs)

    return type("Recorded", (Net,), {"forward": ask})()


def chained() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(*layers, nn.Linear(16, 16))


BOTH = pytest.mark.parametrize("build", [traced, recorded])
# What takes longer is shown of one of them in `make test`: tests of each have the other.
TRACED = pytest.mark.parametrize("build", few([traced, recorded], traced))
RECORDED = pytest.mark.parametrize("build", few([traced, recorded], recorded))
EVERY = pytest.mark.parametrize(
    "make",
    [
        pytest.param(chained, id="sequential"),
        pytest.param(lambda: traced(Net.forward), id="graph", marks=pytest.mark.wide),
        pytest.param(lambda: recorded(Net.forward), id="looking"),
    ],
)
Call = tuple[tuple[Any, ...], dict[str, Any]]


def planned_module(net: nn.Module) -> Checkpointable:
    """Coarse plans are quick to make, and as good to compare bits."""
    return Checkpointable(net, mem_limit="1GiB", slots=50)


def trained(
    net: nn.Module, forward: Forward, calls: list[Call], before_step: Callable[[nn.Module, int], None]
) -> list[torch.Tensor]:
    """Every output of a short training, and the state that it ends in."""
    torch.manual_seed(7), random.seed(7), np.random.seed(7)  # noqa: NPY002
    left: list[torch.Tensor] = []
    for number, (args, kwargs) in enumerate(calls):
        before_step(net, number)
        net.zero_grad()
        output = forward(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        sum(tensor.square().sum() for tensor in tensors).backward()
        left += [tensor.detach().clone() for tensor in tensors]
        with torch.no_grad():
            for parameter in net.parameters():
                if parameter.grad is not None:
                    parameter -= 0.01 * parameter.grad
    return [*left, torch.get_rng_state(), *(value.clone() for value in net.state_dict().values())]


def nothing(net: nn.Module, number: int) -> None:
    pass


def agree(
    make: Callable[[], nn.Module],
    *calls: Call,
    before_step: Callable[[nn.Module, int], None] = nothing,
    tight: bool = True,
) -> Checkpointable:
    """A planned training has the bits of a plain one; at first with as little memory as possible, unless what is trained changes."""
    plain = make()
    expected = trained(plain, plain, list(calls), before_step)
    net = make()
    planned = planned_module(net)
    if tight:
        args, kwargs = calls[0]
        sample: Any = args[0] if isinstance(net, nn.Sequential) else kwargs or args
        if not (args and kwargs):
            planned.compute_sequence(minimum_budget(planned.measure(sample)).peak_bytes)
            assert planned.plan is not None
            assert planned.plan.recomputed
    assert_same_bits(expected, trained(net, planned, list(calls), before_step))
    return planned


def refused(net: nn.Module, match: str, *args: Any) -> None:
    """It is an error that says where and what to do; the module is as it was."""
    before, values = appearance(net), {key: value.clone() for key, value in net.state_dict().items()}
    generator = torch.get_rng_state()
    with pytest.raises(ModelError, match=match) as caught:
        Checkpointable(net)(*args)
    assert "test_ways_bad_input.py, line" in str(caught.value) or "outside of modules" in str(caught.value)
    assert "move that part into a submodule" in str(caught.value)
    assert appearance(net) == before
    assert_same_bits(values, dict(net.state_dict()))
    assert torch.equal(generator, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in net.parameters())


def call(*args: Any, **kwargs: Any) -> Call:
    return args, kwargs


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(X)


# -------------------------------------------------------------------- arguments


@RECORDED
def test_a_tensor_that_is_given_twice(build: Callable[[Forward], nn.Module], x: torch.Tensor) -> None:
    def forward(net: Net, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return Net.forward(net, left * 3 if left is right else left + right)

    same, different = call(x, x), call(x, torch.randn(X))
    agree(lambda: build(forward), same, different, same, tight=False)
    agree(lambda: build(forward), different, same, different, tight=False)


@RECORDED
def test_plain_arguments_that_change_from_call_to_call(build: Callable[[Forward], nn.Module], x: torch.Tensor) -> None:
    def forward(net: Net, x: torch.Tensor, scale: Any = 1, *, mask: torch.Tensor | None = None) -> torch.Tensor:
        x = x * scale + (scale is True)
        return Net.forward(net, x if mask is None else x * mask)

    mask = (torch.rand(X) > 0.5).float()
    agree(
        lambda: build(forward), call(x, 2), call(x, 1), call(x, True), call(x=x, scale=2.0), call(x, mask=None), call(mask=mask, x=x),
        tight=False,
    )  # fmt: skip


@dataclass
class Batch:
    """A batch as users write one: what is computed at the start is no field."""

    x: torch.Tensor
    scale: float = 2.0
    more: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.shift = 3 * self.scale


@attr.s(auto_attribs=True, slots=True, frozen=True)
class Pair:
    """An object without a dictionary, whose fields cannot be set."""

    left: Batch
    right: torch.Tensor


def test_dataclasses_and_attrs_objects(x: torch.Tensor) -> None:
    def forward(net: Net, pair: Pair) -> torch.Tensor:
        left = pair.left
        return Net.forward(net, left.x * left.scale + left.shift + pair.right)

    def returns_one(net: Net, pair: Pair) -> Batch:
        return Batch(forward(net, pair), 1.0, {"pair": pair})

    calls = call(Pair(Batch(x), x)), call(Pair(Batch(x + 1), x)), call(Pair(Batch(x, 4.0), x))
    agree(lambda: traced(forward), *calls[:2])
    agree(lambda: traced(forward), *calls, tight=False)
    pair = Pair(Batch(x), x)
    plain, planned = traced(returns_one)(pair), planned_module(traced(returns_one))(pair)
    assert_same_bits([plain.x, plain.shift], [planned.x, planned.shift])
    assert vars(planned).keys() == {"x", "scale", "more", "shift"}
    assert_same_bits(planned.more["pair"].left.x, x)


class Adding(nn.Module):
    """A layer that hands on the very dict that it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        batch["x"] = self.layer(batch["x"])
        return batch


def test_a_forward_that_changes_a_container_of_the_callers_is_refused(x: torch.Tensor) -> None:
    """The caller would not see that under a recomputation, which is given containers of its own."""

    def forward(net: Net, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        batch["hidden"] = net.blocks[0](batch["x"])
        return net.head(batch["hidden"])

    def replaces(net: Net, batch: Batch) -> torch.Tensor:
        batch.x = net.blocks[0](batch.x)
        return net.head(batch.x)

    for function, given in ((forward, {"x": x}), (replaces, Batch(x))):
        with pytest.raises(ModelError, match="changes a container that it is called with: let it return a new one"):
            planned_module(traced(function))(given)
        assert given == {"x": x} if isinstance(given, dict) else given.x is x
    with pytest.raises(ModelError, match="stage '0' changes a container that the module is called with"):
        planned_module(nn.Sequential(Adding(), Adding()))({"x": x})


@TRACED
def test_keywords_alone(build: Callable[[Forward], nn.Module], x: torch.Tensor) -> None:
    agree(lambda: build(Net.forward), call(x=x), call(x=x))


def test_keywords_alone_for_a_sequential(x: torch.Tensor) -> None:
    agree(chained, call(input=x), call(x), call(input=x), tight=False)


@TRACED
def test_a_mask_whose_type_is_asked_for(build: Callable[[Forward], nn.Module], x: torch.Tensor) -> None:
    def forward(net: Net, x: torch.Tensor, mask: Any = None) -> torch.Tensor:
        if isinstance(mask, torch.Tensor) and torch.is_tensor(mask) and not hasattr(mask, "tensors"):
            x = x * mask
        return Net.forward(net, x)

    ones = torch.ones(X)  # makes no difference at first
    agree(lambda: build(forward), call(x, ones), call(x, torch.rand(X)), call(x), tight=False)


@pytest.mark.parametrize(
    "compute",
    [
        lambda net, x: net.head(x),
        pytest.param(lambda net, x: F.gelu(x) + 1, marks=pytest.mark.wide),
        pytest.param(lambda net, x: x.transpose(0, 1)[0].sum() * x, marks=pytest.mark.wide),
        lambda net, x: 2 * net.head.weight,
    ],
)
def test_a_computed_value_whose_type_is_asked_for(compute: Callable[[Net, torch.Tensor], Any], x: torch.Tensor) -> None:
    def forward(net: Net, x: torch.Tensor) -> torch.Tensor:
        value, size = compute(net, x), x.shape[0] + 1
        if not isinstance(value, torch.Tensor) or isinstance(size, torch.Tensor) or hasattr(value, "tensors"):
            return net.head(x)
        return Net.forward(net, x * value.sum())

    assert sequentialize(traced(forward), (x,)).way == "graph"
    agree(lambda: traced(forward), call(x), call(x), tight=False)


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor", "ignore:Converting a tensor with requires_grad")
@pytest.mark.parametrize("make", [torch.as_tensor, lambda x: torch.tensor([x.sum()]), torch.ones(()).new_tensor])
def test_tensors_in_the_hands_of_torchs_own_code(make: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> None:
    def forward(net: Net, x: torch.Tensor) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        return Net.forward(net, x + make(x))

    assert sequentialize(traced(forward), (x,)).way == "graph"


def test_the_class_of_a_parameter(x: torch.Tensor) -> None:
    def forward(net: Net, x: torch.Tensor) -> torch.Tensor:
        assert isinstance(net.head.weight, nn.Parameter)
        assert isinstance(x, (list, torch.Tensor))
        assert not isinstance(x, nn.Parameter)
        return Net.forward(net, x)

    assert sequentialize(traced(forward), (x,)).way == "graph"


# -------------------------------------------------------------------- the course of the forward


@RECORDED
def test_an_index_decides_what_a_loop_does_and_hidden_states_are_collected(
    build: Callable[[Forward], nn.Module], x: torch.Tensor
) -> None:
    def forward(net: Net, x: torch.Tensor) -> Any:
        hidden = []
        for index, block in enumerate(net.blocks):
            x = block(x) * (index + 1) if index % 2 else block(x)
            hidden.append(x)
        return {"output": net.head(x), "hidden": tuple(hidden), "count": len(hidden)}

    agree(lambda: build(forward), call(x), call(x))


@TRACED
def test_a_submodule_called_twice_and_parameters_of_several_stages(
    build: Callable[[Forward], nn.Module], x: torch.Tensor
) -> None:
    def forward(net: Net, x: torch.Tensor) -> torch.Tensor:
        x = F.linear(x, net.head.weight.T)  # tied, as an embedding and a head are
        return net.head(net.blocks[1](net.blocks[0](net.blocks[1](x))))

    agree(lambda: build(forward), call(x), call(x))


def test_a_layer_twice_and_tied_weights_in_a_sequential(x: torch.Tensor) -> None:
    def make() -> nn.Module:
        net = chained()
        net.append(net[0])
        net[-2].weight = net[1][0].weight
        return net

    agree(make, call(x), call(x))


@EVERY
def test_the_target_is_called_twice_per_step(make: Callable[[], nn.Module], x: torch.Tensor) -> None:
    def steps(net: nn.Module, forward: Forward) -> list[torch.Tensor]:
        return trained(net, lambda x: (forward(x), forward(forward(-x))), [call(x)] * 2, nothing)

    plain, net = make(), make()
    planned = planned_module(net)
    # An input that requires a gradient, as the inner call's output does, needs a little more.
    planned.compute_sequence(int(1.2 * minimum_budget(planned.measure(x)).peak_bytes))
    assert_same_bits(steps(plain, plain), steps(net, planned))


def test_a_branch_on_activations_in_the_root_is_refused(x: torch.Tensor) -> None:
    def forward(net: Net, x: torch.Tensor) -> torch.Tensor:
        x = net.blocks[0](x)
        return net.head(x) if x.sum() > 0 else x

    for build in (traced, recorded):
        refused(build(forward), r"its course depends on .* which depends on the output of 'blocks\.0\.", x)


@RECORDED
def test_a_branch_in_a_submodule_is_one_stage(build: Callable[[Forward], nn.Module], x: torch.Tensor) -> None:
    class Branching(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x if x.sum() > 0 else -x)

    def make() -> nn.Module:
        net = build(Net.forward)
        net.blocks[1] = Branching()
        return net

    planned = agree(make, call(x), call(-x))
    assert planned.chain is not None
    assert any("blocks.1" in name for name in planned.chain.names)


RNG = {"numpy": np.random.default_rng(0), "python": random.Random(0)}
GENERATOR = torch.Generator()


@pytest.mark.parametrize(
    ("draw", "match"),
    [
        (lambda: bool(torch.rand(()) < 0.05), "random numbers"),
        (lambda: random.random() < 0.05, "random numbers"),
        (lambda: RNG["numpy"].random() < 0.05, "changes 'RNG', which is outside of modules"),
        (lambda: RNG["python"].random() < 0.05, "changes 'RNG', which is outside of modules"),
        (lambda: bool(torch.rand((), generator=GENERATOR) < 0.05), "changes 'GENERATOR', which is outside of modules"),
    ],
)
@BOTH
def test_blocks_skipped_at_random_in_the_root_are_refused(
    build: Callable[[Forward], nn.Module], draw: Callable[[], bool], match: str, x: torch.Tensor
) -> None:
    def forward(net: Net, x: torch.Tensor) -> torch.Tensor:
        for block in net.blocks:
            if not draw():
                x = block(x)
        return net.head(x)

    states = (
        RNG["numpy"].bit_generator.state,
        RNG["python"].getstate(),
        GENERATOR.get_state().tolist(),
        random.getstate(),
    )
    refused(build(forward), match, x)
    after = (
        RNG["numpy"].bit_generator.state,
        RNG["python"].getstate(),
        GENERATOR.get_state().tolist(),
        random.getstate(),
    )
    assert after == states


# -------------------------------------------------------------------- what is outside of modules


SCALE = 1.0
TABLE = {"scale": 1.0}
COUNTS = [0]


class Settings:
    scale = 1.0


ARGS = SimpleNamespace(scale=1.0)
CACHE: dict[int, torch.Tensor] = {}


def scale_of_globals(kept: list[float]) -> Forward:
    def forward(net: Net, x: torch.Tensor) -> torch.Tensor:
        return Net.forward(net, x * SCALE * TABLE["scale"] * Settings.scale * kept[0] * getattr(ARGS, "scale", 1))

    return forward


@RECORDED
def test_what_changes_outside_of_modules_is_followed(
    build: Callable[[Forward], nn.Module], x: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, plain = [1.0], Block.forward

    def doubled(block: Block, x: torch.Tensor) -> torch.Tensor:
        return 2 * plain(block, x)

    def change(net: nn.Module, number: int) -> None:
        """One more thing in each step."""
        monkeypatch.setitem(globals(), "SCALE", 2.0 if number >= 1 else 1.0)
        monkeypatch.setitem(TABLE, "scale", 2.0 if number >= 2 else 1.0)
        monkeypatch.setattr(Settings, "scale", 2.0 if number >= 3 else 1.0)
        monkeypatch.setattr(ARGS, "scale", 2.0 if number >= 4 else 1.0)
        monkeypatch.setattr(Block, "forward", doubled if number >= 5 else plain)
        kept[0] = 2.0 if number >= 6 else 1.0

    agree(lambda: build(scale_of_globals(kept)), *[call(x)] * 7, before_step=change, tight=False)


@RECORDED
def test_a_counter_is_noticed_while_a_profiler_follows_pythons_calls(
    build: Callable[[Forward], nn.Module], x: torch.Tensor
) -> None:
    def forward(net: Net, x: torch.Tensor) -> torch.Tensor:
        COUNTS[0] += 1
        return Net.forward(net, x)

    with cProfile.Profile() as profiler:
        refused(build(forward), "changes 'COUNTS', which is outside of modules", x)
        afterwards()
    assert any(entry.code is afterwards.__code__ for entry in profiler.getstats())


def afterwards() -> None:
    """Something that a profiler sees."""


@RECORDED
def test_a_counter_is_noticed_after_a_profiler_has_become_garbage(
    build: Callable[[Forward], nn.Module], x: torch.Tensor
) -> None:
    def forward(net: Net, x: torch.Tensor) -> torch.Tensor:
        leave_garbage(cProfile.Profile())
        gc.collect()
        count()
        return Net.forward(net, x)

    refused(build(forward), "changes 'COUNTS', which is outside of modules", x)


def leave_garbage(profiler: cProfile.Profile) -> None:
    """A profiler that nobody disables, in a cycle, and the profile function that was there before."""
    before, cycle = sys.getprofile(), [profiler]
    cycle.append(cycle)
    profiler.enable()
    sys.setprofile(before)


def count() -> None:
    COUNTS[0] += 1


@TRACED
def test_a_counter_outside_of_modules_is_refused_and_set_back(
    build: Callable[[Forward], nn.Module], x: torch.Tensor
) -> None:
    def forward(net: Net, x: torch.Tensor) -> torch.Tensor:
        COUNTS[0] += 1
        return Net.forward(net, x)  # the trace would be right, the counter would not

    refused(build(forward), "changes 'COUNTS', which is outside of modules", x)
    assert COUNTS == [0]


blocks = 0
LOG = logging.getLogger("a model")


@lru_cache
def warn_once(text: str) -> None:
    """As Hugging Face's loggers do."""
    LOG.debug(text)


@RECORDED
def test_what_cannot_change_a_forward_does_not_make_it_be_traced_again(
    build: Callable[[Forward], nn.Module], x: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forward(net: Net, x: torch.Tensor) -> torch.Tensor:
        warn_once("slow")
        if LOG.isEnabledFor(logging.DEBUG):
            LOG.debug("a step")
        return Net.forward(net, x)

    net = build(forward)
    cut = sequentialize(net, (x,))
    monkeypatch.setitem(globals(), "blocks", 5)  # a global named as an attribute that the code names
    monkeypatch.setitem(globals(), "COUNTS", [7])
    warn_once("fast")
    net(x)
    assert cut.bind((x,), {}) is not None
    monkeypatch.setitem(globals(), "LOG", logging.getLogger("another model"))
    assert cut.bind((x,), {}) is None


@RECORDED
def test_a_trace_keeps_nothing_alive_that_is_not_its_models(
    build: Callable[[Forward], nn.Module], x: torch.Tensor
) -> None:
    other = torch.ones(3)
    watched, cut = weakref.ref(other), sequentialize(build(Net.forward), (x,))
    del other
    gc.collect()
    assert watched() is None
    assert cut.bind((x,), {}) is not None


@TRACED
def test_a_cache_that_is_filled_once(
    build: Callable[[Forward], nn.Module], x: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "CACHE", {})

    def forward(net: Net, x: torch.Tensor) -> torch.Tensor:
        if 16 not in CACHE:
            CACHE[16] = torch.arange(16).float()
        return Net.forward(net, x + CACHE[16])

    planned = agree(lambda: build(forward), call(x), call(x), tight=False)
    assert sequentialize(planned.module, (x,)).way == "graph"
    assert list(CACHE) == [16]


def test_a_cache_of_activations_is_refused_and_emptied(x: torch.Tensor) -> None:
    def forward(net: Net, x: torch.Tensor) -> torch.Tensor:
        x = net.blocks[0](x)
        CACHE[16] = x
        return net.head(x)

    for build in (traced, recorded):
        refused(build(forward), "changes 'CACHE', which is outside of modules", x)
        assert CACHE == {}


class Model(L.LightningModule):
    """Its forward asks the Trainer how far it is."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x) * (1 + self.global_step)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def test_a_forward_that_asks_its_trainer(tmp_path: Path) -> None:
    tensors = (torch.randn(24, 16),)
    with pytest.raises(ModelError, match=r"asks the Trainer for 'global_step' .* name a submodule that can be planned"):
        train(Model, tensors, tmp_path, callback=RotorCallback(module="", show_table=False))
    plain = train(Model, tensors, tmp_path)
    assert_same_training(plain, train(Model, tensors, tmp_path, callback=RotorCallback(show_table=False)))


# -------------------------------------------------------------------- what changes after planning


def change_the_model(net: nn.Module, number: int) -> None:
    """A replaced submodule, one less, frozen parameters, trained again, and a parametrization."""
    members: Any = net if isinstance(net, nn.Sequential) else net.blocks
    match number:
        case 1:
            torch.manual_seed(5)
            layers = nn.Linear(16, 16), nn.BatchNorm1d(16)
            members[1] = nn.Sequential(*layers) if isinstance(net, nn.Sequential) else Block()
        case 2:
            del members[0]
        case 3 | 4:
            members[1].requires_grad_(number == 4)
        case 5:
            nn.utils.parametrizations.weight_norm(net[-1] if isinstance(net, nn.Sequential) else net.head)


@EVERY
def test_a_model_that_changes_after_planning(make: Callable[[], nn.Module], x: torch.Tensor) -> None:
    agree(make, *[call(x)] * 6, before_step=change_the_model, tight=False)


# -------------------------------------------------------------------- hooks


def layers(net: nn.Module) -> list[nn.Module]:
    """A container and a layer in it."""
    block = net[1] if isinstance(net, nn.Sequential) else net.blocks[1]
    return [block, block[0] if isinstance(net, nn.Sequential) else block.linear]


Note = Callable[..., None]


def forward_hooks(net: nn.Module, note: Note) -> list[Any]:
    return [
        layer.register_forward_hook(lambda _, args, output: (note(*args, output), 2 * output)[1])
        for layer in layers(net)
    ]


def pre_hooks(net: nn.Module, note: Note) -> list[Any]:
    return [layer.register_forward_pre_hook(lambda _, args: (note(*args), (2 * args[0],))[1]) for layer in layers(net)]


def backward_hooks(net: nn.Module, note: Note) -> list[Any]:
    def double(module: nn.Module, inputs: Any, outputs: Any) -> Any:
        note(*inputs, *outputs)
        return tuple(2 * gradient for gradient in inputs)

    return [layer.register_full_backward_hook(double) for layer in layers(net)]


def parameter_hooks(net: nn.Module, note: Note) -> list[Any]:
    return [layers(net)[1].weight.register_hook(lambda gradient: (note(gradient), 2 * gradient)[1])]


def hooks_for_all(net: nn.Module, note: Note) -> list[Any]:
    kind = type(layers(net)[0])
    return [
        every_module.register_module_forward_hook(
            lambda module, args, output: (note(*args, output), 2 * output)[1] if type(module) is kind else None
        ),
        every_module.register_module_full_backward_hook(
            lambda module, inputs, outputs: note(*outputs) if type(module) is kind and len(list(module.children())) < 4 else None
        ),
    ]  # fmt: skip


@pytest.fixture
def handles() -> Iterator[list[Any]]:
    made: list[Any] = []
    yield made
    for handle in made:
        handle.remove()


REGISTER = [forward_hooks, pre_hooks, backward_hooks, parameter_hooks, hooks_for_all]


@BOTH
@pytest.mark.parametrize("register", REGISTER)
def test_hooks_after_planning_are_noticed(
    build: Callable[[Forward], nn.Module], register: Callable[[nn.Module, Note], list[Any]], x: torch.Tensor, handles: list[Any]
) -> None:  # fmt: skip
    net = build(Net.forward)
    cut = sequentialize(net, (x,))
    assert cut.bind((x,), {}) is not None
    handles += register(net, lambda *_: None)
    # Hooks of parameters are autograd's business, and work as they are.
    assert (cut.bind((x,), {}) is not None) == (register is parameter_hooks)


def several_hooks(net: nn.Module, note: Note) -> list[Any]:
    return [handle for register in REGISTER if register is not hooks_for_all for handle in register(net, note)]


@pytest.mark.parametrize(
    ("make", "register", "after"),
    [
        # Each kind by itself, and all of them with others: of a recorded forward before planning, of a chain behind it.
        *(pytest.param(lambda: traced(Net.forward), register, False, marks=pytest.mark.wide) for register in REGISTER),
        *(
            pytest.param(make, register, after, marks=[] if after == (make is chained) else pytest.mark.wide)
            for make in (chained, lambda: recorded(Net.forward))
            for register in (several_hooks, hooks_for_all)
            for after in (False, True)
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:Full backward hook is firing when gradients are computed")
def test_hooks_see_what_they_would_see_plainly(
    make: Callable[[], nn.Module],
    register: Callable[[nn.Module, Note], list[Any]],
    after: bool,
    x: torch.Tensor,
    handles: list[Any],
) -> None:
    x.requires_grad_()
    seen: list[float] = []

    def note(*tensors: torch.Tensor) -> None:
        if not is_recomputing():
            seen.extend(tensor.detach().double().sum().item() for tensor in tensors)

    outcomes = []
    for plan in (False, True):
        net = make()
        forward: Forward = planned_module(net) if plan else net
        if not after:
            handles += register(net, note)
        if isinstance(forward, Checkpointable):
            chain = forward.measure(x)
            if not after:
                forward.compute_sequence(minimum_budget(chain).peak_bytes)
                assert forward.plan is not None
                assert forward.plan.recomputed
        if after:
            handles += register(net, note)
        seen.clear()
        left = trained(net, forward, [call(x)] * 2, nothing)
        outcomes.append((left, list(seen)))
        while handles:
            handles.pop().remove()
    assert_same_bits(*outcomes)
    assert seen


@pytest.mark.parametrize("make", [traced, recorded])
def test_what_others_do_when_garbage_is_collected_is_no_part_of_a_forward(make: Callable[[Forward], nn.Module]) -> None:
    collected: list[str] = []

    def count(phase: str, _: Any) -> None:
        collected.append(phase)

    def forward(net: Net, x: torch.Tensor) -> torch.Tensor:
        gc.collect()
        return Net.forward(net, x)

    gc.callbacks.append(count)
    try:
        cut = sequentialize(make(forward), (torch.randn(X),))
    finally:
        gc.callbacks.remove(count)
    assert collected
    assert len(cut.stages) > 4
