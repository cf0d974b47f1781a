"""Modules that are no nn.Sequential: traced, cut, and run under a plan with the bits of the plain module."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import lightning.pytorch as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, TensorDataset

from lightning_rotor import (
    BudgetError,
    Checkpointable,
    ModelError,
    RotorCallback,
    RotorWarning,
    sequentialize,
    simulate,
)
from lightning_rotor.capture.compiled import CompiledModules
from lightning_rotor.capture.graph_cut import GraphCut, cut_graph
from lightning_rotor.execution.passes import is_recomputing
from lightning_rotor.planned import known_cuts
from lightning_rotor.planning import minimum_budget
from lightning_rotor.profiling import StepMeter
from lightning_rotor.profiling.stage_identity import stage_identity
from lightning_rotor.schedule import Schedule

CPU = torch.device("cpu")


def step(
    net: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], state: dict[str, Any]
) -> tuple[list[torch.Tensor], int]:
    """One training step from a given state and seed: everything it leaves behind, and the allocator's peak."""
    with torch.no_grad():
        for key, value in net.state_dict().items():
            value.copy_(state[key])
    net.zero_grad()
    for value in (args, kwargs):
        for leaf in tree_leaves(value):
            if isinstance(leaf, torch.Tensor):
                leaf.grad = None
    torch.manual_seed(7)
    random.seed(7)
    meter = StepMeter(CPU)
    meter.start()
    try:
        output = forward(*args, **kwargs)
        loss = sum(leaf.float().square().sum() for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor))
        loss.backward()
    finally:
        peak = meter.stop().peak_bytes
    left = [leaf.detach().clone() for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    left += [torch.get_rng_state(), torch.tensor([random.random()])]
    left += [value.clone() for value in net.state_dict().values()]
    left += [torch.tensor([]) if p.grad is None else p.grad for p in net.parameters()]
    left += [
        leaf.grad for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor) and leaf.grad is not None
    ]
    return left, peak


def check(net: nn.Module, *args: Any, peaks: bool = True, **kwargs: Any) -> Checkpointable:
    """The planned module gives the bits of the plain one, whatever is recomputed, inside the simulated peak."""
    printed, keys, parameters = repr(net), list(net.state_dict()), list(net.parameters())
    attributes = {id(module): set(module.__dict__) for module in net.modules()}
    state = {key: value.clone() for key, value in net.state_dict().items()}
    expected, _ = step(net, net, args, kwargs, state)
    planned = Checkpointable(net)
    chain = planned.measure(kwargs or args)
    least = minimum_budget(chain).peak_bytes
    most = simulate(chain, Schedule.keep_all(len(chain))).peak_bytes
    for budget in (most, (most + least) // 2, least):
        plan = planned.compute_sequence(budget)
        received, peak = step(net, planned, args, kwargs, state)
        assert len(received) == len(expected)
        assert all(map(torch.equal, received, expected))
        if peaks:
            assert peak <= 1.01 * plan.peak_bytes + 4096  # what the loss of this test holds
    assert (repr(net), list(net.state_dict())) == (printed, keys)
    assert all(mine is theirs for mine, theirs in zip(net.parameters(), parameters, strict=True))
    assert attributes == {id(module): set(module.__dict__) for module in net.modules()}
    return planned


IMAGES = (2, 3, 64, 64)


def small_resnet(classes: int) -> nn.Module:
    """A ResNet-10: each stage of a ResNet-18 has one block of its two."""
    return torchvision.models.ResNet(torchvision.models.resnet.BasicBlock, [1, 1, 1, 1], num_classes=classes)


def torchvision_model(name: str) -> nn.Module:
    models = torchvision.models
    torch.manual_seed(0)
    if name == "vit":
        return models.VisionTransformer(32, 8, 3, 2, 32, 64, dropout=0.1, num_classes=10)
    if name == "swin":
        return models.SwinTransformer(
            [2, 2], 16, [2, 2, 2], [2, 2, 2], [4, 4], stochastic_depth_prob=0.3, num_classes=10
        )
    if name in ("googlenet", "inception_v3"):
        net = getattr(models, name)(num_classes=10, init_weights=False)
        if name == "inception_v3":  # its auxiliary head wants images of 299 x 299
            net.AuxLogits.conv1 = nn.Conv2d(128, 768, 1)
        return net
    return getattr(models, name)(num_classes=10)


@pytest.mark.parametrize(
    ("name", "stages"),
    [
        pytest.param("resnet18", 13, marks=pytest.mark.wide),
        pytest.param("densenet121", 19, marks=pytest.mark.wide),
        pytest.param("googlenet", 10, marks=pytest.mark.wide),
        pytest.param("inception_v3", 15, marks=pytest.mark.wide),
        pytest.param("mobilenet_v3_small", 20, marks=pytest.mark.wide),
        pytest.param("efficientnet_b0", 25, marks=pytest.mark.wide),
        pytest.param("vit", 8, marks=pytest.mark.wide),
        pytest.param("swin", 8, marks=pytest.mark.wide),
        pytest.param("convnext_tiny", 20, marks=pytest.mark.wide),
        pytest.param("shufflenet_v2_x0_5", 6, marks=pytest.mark.wide),
        pytest.param("regnet_y_400mf", 15, marks=pytest.mark.wide),
    ],
)
def test_models_of_torchvision(name: str, stages: int) -> None:
    size = {"inception_v3": (2, 3, 112, 112), "vit": (2, 3, 32, 32), "swin": (2, 3, 32, 32)}.get(name, IMAGES)
    planned = check(torchvision_model(name), torch.randn(size))
    assert planned.chain is not None
    assert len(planned.chain) >= stages


@pytest.fixture(scope="module")
def bottlenecks() -> GraphCut:
    """The cut of a ResNet of the blocks of the large ones, of which one stage has several."""
    resnet = torchvision.models.resnet
    return cut_graph(resnet.ResNet(resnet.Bottleneck, [1, 1, 3, 1]), (torch.randn(IMAGES),))


def test_equal_blocks_are_recognised(bottlenecks: GraphCut) -> None:
    cut, compiled = bottlenecks, CompiledModules()

    def identities(block: str) -> list[Any]:
        return [stage_identity(stage, compiled) for stage in cut.stages if stage.name.startswith(f"{block}.")]

    assert identities("layer3.1") == identities("layer3.2") != identities("layer3.0")
    assert [stage.name for stage in cut.stages][:3] == ["conv1", "bn1 … relu", "maxpool"]


def test_stages_that_do_something_else_between_the_same_places_are_not_equal() -> None:
    class Functions(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.tanh().sin().tanh().sin().sum()

    x = torch.randn(64, 64, requires_grad=True)
    cut, compiled = cut_graph(Functions(), (x,)), CompiledModules()
    tanh, sin, again = (stage_identity(stage, compiled) for stage in cut.stages[:3])
    assert tanh == again != sin
    chain = Checkpointable(Functions()).measure((x,))
    assert [stage.keep.saved_output_bytes for stage in chain][:3] == [64 * 64 * 4, 0, 64 * 64 * 4]


def test_cuts_are_between_any_two_operations_that_save_something(bottlenecks: GraphCut) -> None:
    assert [stage.name for stage in bottlenecks.stages if stage.name.startswith("layer3.1.")] == [
        "layer3.1.conv1",
        "layer3.1.bn1 … layer3.1.relu",
        "layer3.1.conv2",
        "layer3.1.bn2 … layer3.1.relu",
        "layer3.1.conv3",
        "layer3.1.bn3 … layer3.1.relu",
    ]


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Net(nn.Module):
    """Three blocks that a loop runs; subclasses set a trap."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


X = (64, 16)


def opaque(net: nn.Module, *args: Any) -> list[str]:
    return list(cut_graph(net, args).opaque)


def test_a_mask_that_may_be_none_takes_the_right_branch() -> None:
    class Masked(Net):
        def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None, *, scale: float = 1.0) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
                if mask is not None:
                    x = x * mask
            return self.head(x) * scale

    net, x, mask = Masked(), torch.randn(X, requires_grad=True), (torch.rand(X) > 0.5).float()
    check(net, x)
    check(net, x, mask)
    check(net, x=x, mask=mask, scale=2.0)
    planned = Checkpointable(net, x, "1GiB")
    for args, kwargs in (((x,), {}), ((x, mask), {}), ((x,), {"scale": 3.0}), ((), {"mask": mask, "x": x})):
        assert torch.equal(planned(*args, **kwargs), net(*args, **kwargs))


def test_a_call_with_wrong_arguments_fails_as_without_a_plan() -> None:
    with pytest.raises(TypeError, match=r"missing a required argument|unexpected"):
        Checkpointable(Net())(torch.randn(X), unknown=torch.ones(1))

    class Holder:
        tensor = torch.ones(1)

    class Takes(Net):
        def forward(self, x: torch.Tensor, holder: Any) -> torch.Tensor:
            return super().forward(x + holder.tensor)

    with pytest.raises(ModelError, match=r"takes Holder as 'holder': expected tensors"):
        Checkpointable(Takes())(torch.randn(X), Holder())


def test_a_counter_in_a_submodule_counts_on_and_one_in_the_root_is_refused() -> None:
    class Counting(Block):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not is_recomputing():
                self.calls += 1
            return super().forward(x)

    net = Net()
    net.blocks[1] = Counting()
    planned = check(net, torch.randn(X))
    before = net.blocks[1].calls
    planned(torch.randn(X))
    assert net.blocks[1].calls == before + 1
    assert opaque(net, torch.randn(X)) == ["blocks.1"]

    class CountingNet(Net):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return super().forward(x)

    counting = CountingNet()
    with pytest.raises(ModelError, match=r"cannot be planned: .* changes attributes of the module"):
        Checkpointable(counting)(torch.randn(X))
    assert counting.calls == 0


def test_a_block_that_is_skipped_at_random_keeps_its_choice_when_recomputed() -> None:
    class Skipping(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if random.random() < 0.5:
                return x * 1.0
            return super().forward(x)

    net = Net()
    for index in (0, 1, 2):
        net.blocks[index] = Skipping()
    assert opaque(net, torch.randn(X)) == ["blocks.0", "blocks.1"]  # and the type with them
    state = random.getstate()
    planned = check(net, torch.randn(X), peaks=False)
    random.setstate(state)
    chain = planned.measure(torch.randn(X))
    assert random.getstate() == state
    assert planned.compute_sequence(minimum_budget(chain).peak_bytes).recomputed
    seen = set()
    for seed in range(8):
        results = []
        for forward in (net, planned):
            random.seed(seed)
            net.zero_grad()
            output = forward(torch.ones(X))
            output.sum().backward()
            results.append([output, *(torch.zeros(1) if p.grad is None else p.grad.clone() for p in net.parameters())])
        assert all(map(torch.equal, *results))
        seen.add(results[0][0].sum().item())
    assert len(seen) > 2


def test_a_branch_on_data_becomes_one_stage_and_in_the_root_an_error_that_names_the_line() -> None:
    class Branching(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) if x.sum() > 0 else super().forward(-x)

    net = Net()
    net.blocks[2] = Branching()
    check(net, torch.randn(X))
    assert opaque(net, torch.randn(X)) == ["blocks.2"]

    class BranchingNet(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) if self.head(x).mean() > 0 else x

    with pytest.raises(ModelError, match=r"test_graph_cuts\.py, line \d+: return .* if self\.head\(x\)\.mean\(\) > 0"):
        Checkpointable(BranchingNet())(torch.randn(X))


def test_hooks_on_submodules_fire() -> None:
    net = Net()
    planned = Checkpointable(net, torch.randn(X), "1GiB")
    calls: list[str] = []
    net.blocks[0].register_forward_hook(lambda module, args, output: output * 2)
    net.blocks[1].register_forward_pre_hook(lambda *_: calls.append("before"))
    net.blocks[2].linear.register_full_backward_hook(lambda *_: calls.append("backward"))
    x = torch.randn(X)
    assert torch.equal(planned(x), net(x))  # the hooks came after the trace
    calls.clear()
    planned(x).sum().backward()
    assert calls == ["before", "backward"]
    check(net, torch.randn(X))


def test_a_shared_submodule_called_twice() -> None:
    class Shared(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.blocks[0](self.blocks[0](x))
            return self.head(self.norm(self.norm(x)))

        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(16)

    check(Shared(), torch.randn(X))


def test_what_changes_after_tracing_is_followed() -> None:
    class Configured(Net):
        def __init__(self) -> None:
            super().__init__()
            self.scale = 1.0
            self.options = {"twice": False}
            self.table = np.ones(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = super().forward(x) * self.scale * float(self.table[1])
            return x + x if self.options["twice"] else x

    net, x = Configured(), torch.randn(X)
    planned = Checkpointable(net, x, "1GiB")

    def agree() -> None:
        planned(x).sum().backward()
        found = [parameter.grad for parameter in net.parameters()]
        net.zero_grad()
        net(x).sum().backward()
        assert all(map(torch.equal, found, [parameter.grad for parameter in net.parameters()]))
        assert torch.equal(planned(x), net(x))
        net.zero_grad()

    agree()
    net.scale = 3.0
    agree()
    net.options["twice"] = True
    agree()
    net.table[1] = 0.5
    agree()
    net.blocks[1] = Block()
    agree()
    net.blocks[0].linear = nn.Linear(16, 16, bias=False)
    net.blocks[0].linear.bias = None
    agree()
    net.head.weight = nn.Parameter(torch.randn(4, 16))
    agree()
    before = planned.plan
    net.remark = "nobody reads this"
    agree()
    assert planned.plan is before


def test_settings_of_a_layer_that_the_forward_reads_but_does_not_call_are_watched() -> None:
    class Attending(Net):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout(0.5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(F.dropout(x, self.drop.p if self.training else 0.0))

    net, x = Attending(), torch.randn(X)
    planned = Checkpointable(net, x, "1GiB")
    net.drop.p = 0.0
    assert torch.equal(planned(x), net(x))
    net.drop.p = 1.0
    assert torch.equal(planned(x), net(x))


def test_modes_are_watched() -> None:
    class Dropping(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(F.dropout(x, 0.5, training=self.training) + torch.zeros(16))

    net, x = Dropping(), torch.randn(X)
    check(net, x)
    planned = Checkpointable(net, x, "1GiB")
    net.eval()
    assert torch.equal(planned(x), net(x))
    net.train()
    net.blocks.eval()
    assert planned(x).shape == (64, 4)


def test_parameters_and_buffers_of_the_root() -> None:
    class Rooted(Net):
        def __init__(self) -> None:
            super().__init__()
            self.token = nn.Parameter(torch.randn(1, 16))
            self.register_buffer("mean", torch.zeros(16))
            self.register_buffer("steps", torch.zeros((), dtype=torch.long))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.cat([self.token.expand(x.shape[0], -1), x])
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
            self.steps += 1
            x = super().forward(x - self.mean)
            return x * self.token.sum()

    net = Rooted()
    planned = check(net, torch.randn(X))
    net.token = nn.Parameter(torch.ones(1, 16))  # a stage reads it where it is
    before = net.steps.item()
    planned(torch.randn(X)).sum().backward()
    assert net.steps.item() == before + 1
    assert net.token.grad is not None


def test_operations_that_fx_would_change_without_a_word() -> None:
    class Aliased(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.blocks[0](x)
            same = x
            x += 1
            x[:, 0] = 0
            return self.head(same + x)

    check(Aliased(), torch.randn(X))

    class Flip(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return -gradient

    flip = Flip.apply

    class Hidden(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(flip(x))

    class Flipped(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(Flip.apply(x))

    net = Flipped()
    net.blocks[1] = Hidden()
    check(net, torch.randn(X, requires_grad=True))
    assert opaque(net, torch.randn(X)) == ["blocks.1"]

    class Detached(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                y = self.linear(x)
            return super().forward(x) + y

    net.blocks[2] = Detached()
    check(net, torch.randn(X, requires_grad=True))
    assert opaque(net, torch.randn(X)) == ["blocks.1"]


def test_a_trace_that_computes_something_else_is_found_out() -> None:
    class Asking(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x * 2 if torch.overrides._len_torch_function_stack() else x)

    with pytest.raises(
        ModelError, match="does not compute what the module does: outputs, buffers or random numbers differ"
    ):
        Checkpointable(Asking())(torch.randn(X))


class Outputs(NamedTuple):
    logits: torch.Tensor
    extra: dict[str, Any]


def test_attributes_that_a_trace_changes_are_set_back() -> None:
    class Keeping(Block):
        def __init__(self) -> None:
            super().__init__()
            self.history: list[Any] = []
            self.register_buffer("state", torch.ones(16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.history.append(x.shape[0])
            self.last = x
            self.state = torch.zeros(16)
            return super().forward(x)

    net = Net()
    net.blocks[3] = Keeping()
    state = net.blocks[3].state
    assert opaque(net, torch.randn(X)) == ["blocks.3"]
    assert net.blocks[3].history == []
    assert not hasattr(net.blocks[3], "last")
    assert net.blocks[3].state is state


def test_no_grad_and_autocast_hold_for_their_operations() -> None:
    class Mixed(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                y = self.blocks[0](x)
                with torch.enable_grad():
                    x = self.blocks[1](x)
            with torch.autocast("cpu", torch.bfloat16):
                for block in self.blocks:
                    y = block(y)
                with torch.autocast("cpu", enabled=False):
                    y = self.head(y.float())
            return y + self.head(x)

    net = Mixed()
    check(net, torch.randn(X, requires_grad=True))
    assert len(sequentialize(net, (torch.randn(X),)).stages) > 8
    assert opaque(net, torch.randn(X)) == []


def test_torchs_checkpoint_in_the_root_is_refused() -> None:
    class Own(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
            return self.head(x)

    with pytest.raises(ModelError, match="torch's checkpoint"):
        Checkpointable(Own())(torch.randn(X))


def test_nested_outputs_and_inputs() -> None:
    class Nested(Net):
        def forward(self, pair: tuple[torch.Tensor, dict[str, torch.Tensor]], flag: bool = True) -> Outputs:
            x, rest = pair
            return Outputs(super().forward(x * rest["scale"]), {"flag": flag, "none": None, "list": [1, "two"]})

    pair = (torch.randn(X), {"scale": torch.rand(1, requires_grad=True)})
    planned = check(Nested(), pair)
    assert isinstance(planned(pair), Outputs)
    assert planned(pair).extra["none"] is None
    with pytest.raises(ValueError, match="too many values to unpack"):
        # A single argument that is a tuple must be wrapped: a bare tuple holds the positional arguments.
        Checkpointable(Nested(), (torch.randn(X), {"scale": torch.ones(1)}))


def test_sizes_may_cross_a_cut() -> None:
    class Sized(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            batch, rest = x.shape[0], x.shape[1:]
            return super().forward(x).reshape(batch, 2, -1).expand(batch, 2, 2) + rest[0]

    planned = check(Sized(), torch.randn(X))
    assert planned.chain is not None
    assert len(planned.chain) >= 5
    planned(torch.randn(10, 16)).sum().backward()  # a smaller batch runs under the same plan


def test_autocast() -> None:
    net, x = small_resnet(10), torch.randn(IMAGES)
    with torch.autocast("cpu", torch.bfloat16):
        check(net, x, peaks=False)


def test_copies_compute_with_their_own_weights() -> None:
    planned = Checkpointable(Net(), torch.randn(X), "1GiB")
    duplicate = copy.deepcopy(planned)
    with torch.no_grad():
        duplicate.module.head.weight.zero_()
        duplicate.module.head.bias.zero_()
    assert duplicate(torch.randn(X)).abs().sum() == 0
    assert planned(torch.randn(X)).abs().sum() > 0


def test_which_way_was_taken() -> None:
    assert sequentialize(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), (torch.ones(1, 2),)).way == "sequential"
    cut = sequentialize(Net(), (torch.randn(X),))
    assert cut.way == "graph"
    assert isinstance(cut, GraphCut)
    names = [stage.name for stage in cut.stages]
    assert names[-1] == "head"
    assert list(dict.fromkeys(name[: len("blocks.0")] for name in names[:-1])) == [
        f"blocks.{index}" for index in range(4)
    ]

    class Short(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(x)

    with pytest.raises(ModelError, match="no point between its operations where little is alive"):
        sequentialize(Short(), (torch.randn(X),))


def test_an_argument_that_changes_in_every_step_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_cuts, "_MANY_CUTS", 4)

    class Stepped(Net):
        def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
            return super().forward(x) * step

    planned = Checkpointable(Stepped(), mem_limit="1GiB")
    with pytest.warns(RotorWarning, match="keeps changing"):
        [planned(torch.randn(2, 16), number) for number in range(4)]


# -------------------------------------------------------------------- the callback


class Classifier(L.LightningModule):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        images, labels = batch
        return F.cross_entropy(self.model(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.01)


def fit(model: L.LightningModule, callback: L.Callback | None, shape: tuple[int, ...], tmp_path: Any) -> None:
    torch.manual_seed(5)
    data = DataLoader(TensorDataset(torch.randn(12, *shape), torch.randint(4, (12,))), 12)
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path, callbacks=[callback] if callback else [],
    )  # fmt: skip
    trainer.fit(model, data)


@pytest.mark.wide
def test_a_resnet_is_planned_by_default_as_a_whole(tmp_path: Any) -> None:
    with pytest.raises(BudgetError, match="Raise mem_limit") as caught:
        fit(Classifier(small_resnet(4)), RotorCallback("1MiB"), (3, 32, 32), tmp_path)
    least = int(1.01 * caught.value.minimum_bytes)
    models = []
    for callback in (None, RotorCallback(show_table=False), RotorCallback(least, show_table=False)):
        torch.manual_seed(2)
        models.append(Classifier(small_resnet(4)))
        fit(models[-1], callback, (3, 32, 32), tmp_path)
        if callback is not None:
            assert callback.plan is not None
            assert callback.plan.chain.names[0] == "conv1"
            assert callback.plan.chain.names[-1] == "fc"
            assert "forward" not in models[-1].model.__dict__
    assert callback.plan.recomputed
    for model in models[1:]:
        states = zip(models[0].state_dict().values(), model.state_dict().values(), strict=True)
        assert all(torch.equal(mine, theirs) for mine, theirs in states)


def test_the_callback_goes_inside_where_the_whole_cannot_be_traced(tmp_path: Any) -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Net()
            self.calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return self.inner(x)

    model, callback = Classifier(Wrapper()), RotorCallback(show_table=False)
    fit(model, callback, (16,), tmp_path)
    assert callback.plan is not None
    assert callback.plan.chain.names[-1] == "head"
    assert all(name.startswith("blocks.") for name in callback.plan.chain.names[:-1])
    assert "forward" not in model.model.__dict__
    assert "forward" not in model.model.inner.__dict__
    with pytest.raises(ModelError, match="changes attributes of the module"):
        fit(Classifier(Wrapper()), RotorCallback(module="model"), (16,), tmp_path)


def test_a_module_that_is_never_called_is_a_warning(tmp_path: Any) -> None:
    class Unused(Classifier):
        def __init__(self) -> None:
            super().__init__(nn.Linear(16, 4))
            self.big = Net()

    with pytest.warns(RotorWarning, match="planned nothing"):
        fit(Unused(), RotorCallback(module="big", show_table=False), (16,), tmp_path)


def test_planning_warns_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Checkpointable(Net(), torch.randn(X), "1GiB")(torch.randn(X)).sum().backward()
