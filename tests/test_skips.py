"""What outlives a boundary: shortcuts, dense features, masks, auxiliary outputs. Measured, planned and run like the rest."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torchvision
import transformers
from torch import nn
from torch.utils._pytree import tree_leaves

from benchmarks.reference import best_by_budget, judge_all
from lightning_rotor.capture.sequentialize import sequentialize
from lightning_rotor.chain import Chain, Option, Skip, StageCost
from lightning_rotor.errors import BudgetError, ScheduleError
from lightning_rotor.execution.executor import Executor
from lightning_rotor.planning import minimum_budget, plan
from lightning_rotor.planning.solver import Solver
from lightning_rotor.profiling import Profile, StepMeter, profile_chain
from lightning_rotor.schedule import Schedule
from lightning_rotor.simulator import simulate
from tests.grids import examples, few
from tests.strategies import random_chain, random_schedule, with_skips

# ---------------------------------------------------------------------------------------------------- models


def conv(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))


class UNet(nn.Module):
    """Skips from one end to the other."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        sizes = [width, 2 * width, 4 * width]
        self.down = nn.ModuleList(
            nn.Sequential(conv(before, size), conv(size, size))
            for before, size in zip([3, *sizes], sizes, strict=False)
        )
        self.middle = conv(sizes[-1], 2 * sizes[-1])
        self.lift = nn.ModuleList(nn.ConvTranspose2d(2 * size, size, 2, 2) for size in reversed(sizes))
        self.up = nn.ModuleList(nn.Sequential(conv(2 * size, size), nn.Dropout(0.1)) for size in reversed(sizes))
        self.head = nn.Conv2d(width, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = nn.functional.max_pool2d(x, 2)
        x = self.middle(x)
        for lift, block in zip(self.lift, self.up, strict=True):
            x = block(torch.cat([lift(x), skips.pop()], 1))
        return self.head(x)


class Dense(nn.Module):
    """Each layer reads what all before it made."""

    def __init__(self, width: int = 8, layers: int = 5) -> None:
        super().__init__()
        self.layers = nn.ModuleList(conv(3 + index * width, width) for index in range(layers))
        self.head = nn.Linear(3 + layers * width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = [x]
        for layer in self.layers:
            features.append(layer(torch.cat(features, 1)))
        return self.head(torch.cat(features, 1).mean((2, 3)))


class Auxiliary(nn.Module):
    """A head in the middle, whose output is one of the module's, and which counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.early, self.late = nn.Sequential(conv(3, 8), conv(8, 8)), nn.Sequential(conv(8, 8), conv(8, 8))
        self.side, self.head = nn.Conv2d(8, 2, 1), nn.Conv2d(8, 2, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.early(x)
        side = self.side(x)
        return {"out": self.head(self.late(x)), "side": side}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor, bias: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(self.norm(x)) * scale + bias)


class Biased(nn.Module):
    """A list of blocks that share a learned bias and an input beside the activations, and code that looks at shapes."""

    def __init__(self, width: int = 32, layers: int = 5) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.make_bias, self.head = nn.Linear(width, width), nn.Linear(width, 4)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        assert x.shape[1] < 100
        bias = self.make_bias(x)
        for block in self.blocks:
            x = block(x, bias, scale)
        return self.head(x)


class Llama(nn.Module):
    """A transformer of Hugging Face's, unmodified: rotary embeddings and a mask beside the activations, shortcuts around every half of a block."""

    def __init__(self) -> None:
        super().__init__()
        config = transformers.LlamaConfig(
            num_hidden_layers=2,
            hidden_size=32,
            intermediate_size=64,
            num_attention_heads=2,
            num_key_value_heads=1,
            vocab_size=50,
            use_cache=False,
        )
        self.inner = transformers.LlamaForCausalLM(config)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.inner(input_ids=ids, attention_mask=mask).logits


class Scaled(nn.Module):
    """Shortcuts around blocks that begin with what saves nothing of its input, so that nobody but a segment needs it in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 64)) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block((0.5 * x).cos())
        return self.last(x)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
        self.inner = nn.TransformerEncoder(layer, 5, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.inner(x, mask=mask)


def vision_transformer() -> nn.Module:
    """Its class token makes the gradient of the patches a slice, which the backward of their convolution copies at the peak of the step."""
    return torchvision.models.VisionTransformer(
        64, 16, num_layers=1, num_heads=2, hidden_dim=64, mlp_dim=64, num_classes=8
    )


class Joined(nn.Module):
    """A skip that only a concatenation reads: the convolution that made it copies the slice that it gets for a gradient."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first, self.left = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.right = nn.Sequential(conv(width, width), nn.Conv2d(width, width, 3, padding=1))
        self.last = nn.Conv2d(2 * width, 8, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.last(torch.cat([self.left(x), self.right(x)], 1))


class Branches(nn.Module):
    """Slices of one gradient for several skips, which all of them keep alive."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, width, 1), nn.Conv2d(4 * width, 8, 1)
        self.branches = nn.ModuleList(
            nn.Sequential(conv(width, width), nn.Conv2d(width, width, 1), nn.Tanh()) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.last(torch.cat([branch(x) for branch in self.branches], 1))


def mixer() -> nn.Module:
    """Its shortcuts, and so their gradients, have their entries in another order."""
    import timm

    made: nn.Module = timm.models.mlp_mixer.MlpMixer(
        num_classes=10, img_size=32, patch_size=4, num_blocks=3, embed_dim=16
    )
    return made


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[torch.Tensor, ...]]]] = {
    "unet": (UNet, lambda: (torch.randn(2, 3, 32, 32),)),
    "dense": (Dense, lambda: (torch.randn(2, 3, 16, 16),)),
    "auxiliary": (Auxiliary, lambda: (torch.randn(2, 3, 16, 16),)),
    "biased": (Biased, lambda: (torch.randn(4, 8, 32), torch.randn(8, 32, requires_grad=True))),
    "scaled": (Scaled, lambda: (torch.randn(512, 64),)),
    "llama": (Llama, lambda: (torch.randint(0, 50, (3, 16)), torch.ones(3, 16, dtype=torch.long).triu(-9))),
    "joined": (Joined, lambda: (torch.randn(2, 3, 32, 32),)),
    "branches": (Branches, lambda: (torch.randn(2, 3, 32, 32),)),
    "mixer": (mixer, lambda: (torch.randn(4, 3, 32, 32),)),
    "vision_transformer": (vision_transformer, lambda: (torch.randn(4, 3, 64, 64),)),
    "encoder": (Encoder, lambda: (torch.randn(3, 16, 32), nn.Transformer.generate_square_subsequent_mask(16))),
}


def measured(name: str) -> tuple[nn.Module, Any, Profile]:
    make, sample = MODELS[name]
    net, args = make().train(), sample()
    cut = sequentialize(net, args)
    value = cut.bind(args, {})
    return net, (args, value), profile_chain(cut.stages, value, repeats=1)


def step(
    net: nn.Module, forward: Callable[[], Any], inputs: tuple[torch.Tensor, ...]
) -> tuple[int, list[torch.Tensor]]:
    """The allocator's peak in one step from the same seed and buffers, and everything that the step leaves."""
    buffers = [buffer.clone() for buffer in net.buffers()]
    net.zero_grad()
    for tensor in inputs:
        tensor.grad = None
    torch.manual_seed(3)
    gc.disable()  # the release of older garbage would count as this step's
    meter = StepMeter(torch.device("cpu"))
    meter.start()
    output = forward()
    sum(leaf.mul(1).sum() for leaf in tree_leaves(output)).backward()
    trace = meter.stop()
    gc.enable()
    left = [leaf.detach() for leaf in tree_leaves(output)] + [torch.get_rng_state()]
    left += [torch.zeros(0) if each.grad is None else each.grad.clone() for each in (*net.parameters(), *inputs)]
    left += [buffer.clone() for buffer in net.buffers()]
    with torch.no_grad():
        for buffer, value in zip(net.buffers(), buffers, strict=True):
            buffer.copy_(value)
    return trace.peak_bytes, left


@pytest.mark.parametrize("name", few(MODELS, "dense", "auxiliary", "biased", "scaled", "joined", "branches"))
def test_any_schedule_has_the_bits_and_the_simulated_peak(name: str) -> None:
    net, (args, value), profile = measured(name)
    chain = profile.chain
    assert len(chain) >= 5
    assert chain.skips
    _, expected = step(net, lambda: net(*args), args)
    losses = len(tree_leaves(net.eval()(*args)))
    net.train()
    rng = random.Random(5)
    schedules = [random_schedule(rng, chain) for _ in range(examples(5, 12))]
    for schedule in (Schedule.keep_all(len(chain)), minimum_budget(chain).schedule, *schedules):
        executor = Executor(profile.stages, chain, schedule, profile.states)
        peak, received = step(net, lambda run=executor: run(value), args)  # type: ignore[misc]
        assert len(expected) == len(received), schedule
        assert all(map(torch.equal, expected, received)), schedule
        simulated = simulate(chain, schedule).peak_bytes
        assert 0.98 * simulated <= peak <= simulated + 16 * losses, schedule


@pytest.mark.parametrize(
    "make",
    [
        lambda: torchvision.models.DenseNet(8, (3, 6, 8, 4), 16, num_classes=10),
        pytest.param(torchvision.models.densenet121, marks=pytest.mark.wide),
    ],
    ids=["small", "densenet121"],
)
@pytest.mark.wide
def test_dense_blocks_are_cut_between_their_layers(make: Callable[[], nn.Module]) -> None:
    net = make().train()
    cut = sequentialize(net, (torch.randn(2, 3, 32, 32),))
    assert len(cut.stages) > 40
    chain = profile_chain(cut.stages, cut.bind((torch.randn(2, 3, 32, 32),), {}), repeats=1).chain
    keep_all = simulate(chain, Schedule.keep_all(len(chain)), gradients_exist=True)
    assert minimum_budget(chain, gradients_exist=True).peak_bytes < 0.8 * keep_all.peak_bytes


def test_what_several_stages_read_is_measured_once() -> None:
    _, _, profile = measured("biased")
    born, sizes = [skip.born for skip in profile.chain.skips], [skip.size_bytes for skip in profile.chain.skips]
    assert -1 in born  # the scale
    assert 4 * 8 * 32 * 4 in sizes  # the bias
    bias = profile.chain.skips[sizes.index(4 * 8 * 32 * 4)]
    assert len(bias.uses) == 5
    assert set(bias.gradient_bytes) == {4 * 8 * 32 * 4}


def test_slices_of_one_gradient_count_once_and_for_the_skip_that_is_needed_longest() -> None:
    _, _, profile = measured("branches")
    chain = profile.chain
    joining = max(skip.last_use for skip in chain.skips)
    branches = [skip for skip in chain.skips if skip.uses[-1] == joining]
    size = 2 * 16 * 32 * 32 * 4
    assert [skip.gradient_bytes[-1] for skip in branches] == [4 * size, 0, 0]
    # The first branch is given all of it, the others what is counted there already; the last one ends in the stage that joins them.
    assert [chain.stages[skip.born].skip_gradient_bytes for skip in branches] == [4 * size, 0, 0]


# ---------------------------------------------------------------------------------------------------- planning


def test_plan_is_nearly_always_as_fast_as_the_best_of_all_schedule_trees() -> None:
    rng = random.Random(1)
    ratios: list[float] = []
    for _ in range(examples(25, 60)):
        chain = with_skips(
            rng, random_chain(rng, rng.randint(3, 6), rng.choice(("cnn", "transformer", "heterogeneous")))
        )
        solver = Solver(chain, slots=5000)
        for budget, best in best_by_budget(judge_all(chain)).items():
            ratios.append(solver.plan(budget).simulation.seconds / best.seconds)
    assert min(ratios) > 1 - 1e-9
    assert sum(ratio < 1 + 1e-9 for ratio in ratios) >= 0.98 * len(ratios)
    assert max(ratios) < 1.25


def test_more_budget_is_never_slower_and_the_minimum_is_the_minimum() -> None:
    rng = random.Random(2)
    for _ in range(examples(8, 20)):
        chain = with_skips(rng, random_chain(rng, rng.randint(3, 9), "heterogeneous"))
        least, most = minimum_budget(chain).peak_bytes, simulate(chain, Schedule.keep_all(len(chain))).peak_bytes
        with pytest.raises(BudgetError, match="minimum"):
            plan(chain, least * 99 // 100)
        plans = [plan(chain, least + part * (most - least) // 4) for part in range(5)]
        assert all(each.peak_bytes <= each.budget_bytes for each in plans)
        seconds = [each.simulation.seconds for each in plans]
        assert seconds == sorted(seconds, reverse=True)


# ---------------------------------------------------------------------------------------------------- the simulator

KEEP = Option("keep", 0, 10, 0, 1, 10, 10, 10, 10, 20, 20, 20, 10, 0, 1.0, 1.0, 2.0)
STAGE = StageCost("stage", output_bytes=10, discard_peak_bytes=10, discard_seconds=1.0, options=(KEEP,))


def levels(schedule: str, *skips: Skip, stages: int = 4) -> list[int]:
    chain = Chain(tuple(replace(STAGE, name=str(index)) for index in range(stages)), skips=skips)
    return [event.after_bytes for event in simulate(chain, Schedule.parse(schedule)).events]


def test_skip_is_held_from_its_birth_to_its_last_reader() -> None:
    plain = levels("0-3")
    forward = [more - less for more, less in zip(levels("0-3", Skip(0, (3,), 7, (0,))), plain, strict=True)]
    # Nobody saves it, so it dies with the forward of its reader.
    assert forward == [7, 7, 7, 7, 0, 0, 0, 0]


def test_gradient_of_a_skip_waits_for_the_stage_that_made_it() -> None:
    plain = levels("0-3")
    both = [more - less for more, less in zip(levels("0-3", Skip(0, (3,), 7, (7,))), plain, strict=True)]
    assert both == [7, 7, 7, 7, 7, 7, 7, 0]  # backward of 3, 2, 1: the gradient is alive; that of 0 consumes it


def test_gradient_that_the_peaks_of_a_backward_count_is_not_counted_twice() -> None:
    def last_peak(counted: int | None) -> int:
        stages = replace(STAGE, name="0", skip_gradient_bytes=counted), STAGE, STAGE
        chain = Chain(stages, skips=(Skip(0, (2,), 10, (40,)),))
        return simulate(chain, Schedule.keep_all(3)).events[-1].peak_bytes

    # A slice of 40 bytes for a skip of 10: what the peaks do not count is alive beside them.
    assert last_peak(None) == last_peak(10)
    assert last_peak(10) - last_peak(30) == 20
    assert last_peak(10) - last_peak(99) == 30


def test_segment_that_reads_a_skip_holds_it_until_it_is_recomputed() -> None:
    plain = levels("0 (1-2) 3")
    more = [more - less for more, less in zip(levels("0 (1-2) 3", Skip(0, (2,), 7, (0,))), plain, strict=True)]
    # forward 0 1 2 3, backward 3, recompute 1 2, backward 2 1 0
    assert more == [7] * 7 + [0] * 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"born": 2, "uses": (2,)}, "expected one or more later stages"),
        ({"uses": ()}, "expected one or more later stages"),
        ({"uses": (3, 2), "gradient_bytes": (0, 0)}, "expected one or more later stages"),
        ({"gradient_bytes": (1, 2)}, "expected one for each"),
        ({"size_bytes": -1}, "never negative"),
        ({"born": -1}, "take 0 bytes"),
    ],
)
def test_impossible_skips_are_refused(change: dict[str, Any], message: str) -> None:
    fields: dict[str, Any] = {"born": 0, "uses": (2,), "size_bytes": 5, "gradient_bytes": (5,), **change}
    with pytest.raises(ScheduleError, match=message):
        Skip(**fields)


def test_a_skip_must_fit_its_chain() -> None:
    with pytest.raises(ScheduleError, match="read by stage 9"):
        Chain((STAGE, STAGE), skips=(Skip(0, (9,), 1, (0,)),))
    with pytest.raises(ScheduleError, match="saves a skip that the chain does not have"):
        Chain((replace(STAGE, options=(replace(KEEP, saved_skips=(0,)),)),))
