"""Estimates from shapes alone, against the allocator and against what the formulas say."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable

import pytest
import torch
import torchvision
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from lightning_rotor import sequentialize
from lightning_rotor.chain import Chain
from lightning_rotor.errors import ModelError
from lightning_rotor.planning import minimum_budget
from lightning_rotor.profiling import profile_chain
from lightning_rotor.profiling.accelerators import GPUS, Accelerator
from lightning_rotor.profiling.estimates import estimate_profile
from lightning_rotor.profiling.input_spec import InputSpec
from lightning_rotor.profiling.models_without_memory import build_on_meta
from lightning_rotor.schedule import Schedule
from lightning_rotor.simulator import simulate
from tests.grids import few
from tests.imported_python import ROOT, ImportedPython

A100 = GPUS["A100-80GB"]
EXACT = ("saved_bytes", "saved_input_bytes", "saved_output_bytes", "input_gradient_bytes", "parameter_gradient_bytes")
PEAKS = ("forward_peak_bytes", "replay_peak_bytes", "backward_peak_bytes")
CONVOLUTIONS = ("resnet18", "mobilenet", "regnet")
# By how much a peak may be below the allocator's, where kernels need little memory of their own.
TOLERANCE = 0.03


class Attention(nn.Module):
    """A block of a transformer with a mask and a residual stream, written by hand."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.mix, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.mix(self.norms[0](x)).unflatten(-1, (3, 4, -1)).transpose(1, 3).unbind(2)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.dropout(self.project(mixed.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norms[1](x)))))


class Transformer(nn.Module):
    def __init__(self, width: int = 64, depth: int = 3, dropout: float = 0.0, vocabulary: int = 100) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Attention(width, dropout) for _ in range(depth))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


IMAGES = InputSpec((4, 3, 64, 64))
MODELS: dict[str, tuple[Callable[[], nn.Module], InputSpec]] = {
    "resnet18": (lambda: torchvision.models.resnet18(num_classes=10), IMAGES),
    "mobilenet": (lambda: torchvision.models.mobilenet_v3_small(num_classes=10), IMAGES),
    "regnet": (lambda: torchvision.models.regnet_y_400mf(num_classes=10), IMAGES),  # reads tensors when it is built
    "transformer": (Transformer, InputSpec((2, 32), torch.int64)),
    "dropout": (lambda: Transformer(dropout=0.1), InputSpec((2, 32), torch.int64)),
    "sequential": (
        lambda: nn.Sequential(nn.Linear(32, 64), nn.ReLU(inplace=True), nn.LayerNorm(64), nn.Tanh(), nn.Flatten()),
        InputSpec((64, 32)),
    ),
}


def measured(make: Callable[[], nn.Module], spec: InputSpec) -> Chain:
    net, sample = make().train(), spec.make("cpu")
    cut = sequentialize(net, (sample,))
    return profile_chain(cut.stages, cut.bind((sample,), {}), repeats=1).chain


@pytest.mark.parametrize("name", few(MODELS, "dropout", "sequential"))
def test_what_autograd_saves_is_exact_and_peaks_are_close(name: str) -> None:
    make, spec = MODELS[name]
    estimated, real = estimate_profile(build_on_meta(make), [spec], A100, like="cpu").chain, measured(make, spec)
    assert estimated.names == real.names
    assert estimated.input_bytes == real.input_bytes
    assert [skip.size_bytes for skip in estimated.skips] == [skip.size_bytes for skip in real.skips]
    for mine, theirs in zip(estimated, real, strict=True):
        assert mine.output_bytes == theirs.output_bytes, mine.name
        assert mine.recomputable == theirs.recomputable, mine.name
        assert mine.draws_random == theirs.draws_random, mine.name
        different = {
            field: (getattr(mine.keep, field), getattr(theirs.keep, field))
            for field in EXACT
            if getattr(mine.keep, field) != getattr(theirs.keep, field)
        }
        assert not different, mine.name
    # Convolutions take tens of megabytes for themselves under some instructions, and nothing under others.
    pairs = [(mine.keep, theirs.keep) for mine, theirs in zip(estimated, real, strict=True)]
    of_kernels = max(getattr(theirs, peak) - getattr(mine, peak) for mine, theirs in pairs for peak in PEAKS)
    for schedule in (Schedule.keep_all(len(real)), minimum_budget(real).schedule):
        mine, theirs = simulate(estimated, schedule).peak_bytes, simulate(real, schedule).peak_bytes
        assert (1 - TOLERANCE) * theirs - of_kernels <= mine <= theirs, str(schedule)
        if name not in CONVOLUTIONS:
            assert (1 - TOLERANCE) * theirs <= mine, str(schedule)


def test_what_kernels_take_for_themselves_is_missing() -> None:
    """BatchNorm's backward on the CPU makes a copy of a gradient, which only the allocator sees."""

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Linear(64, 8))

    spec = InputSpec((256, 32))
    mine = estimate_profile(build_on_meta(make), [spec], A100, like="cpu").chain.stages[1].keep
    theirs = measured(make, spec).stages[1].keep
    assert theirs.backward_peak_bytes - mine.backward_peak_bytes == 256 * 64 * 4
    assert mine.saved_bytes == theirs.saved_bytes


def test_on_a_gpu_dropout_keeps_a_byte_and_attention_with_dropout_is_fused() -> None:
    spec = InputSpec((2, 64), torch.int64)
    saved = {}
    for dropout in (0.0, 0.1):
        profile = estimate_profile(
            build_on_meta(lambda dropout=dropout: Transformer(depth=1, dropout=dropout)), [spec], A100
        )
        saved[dropout] = sum(stage.keep.saved_bytes for stage in profile.chain)
    masks = 2 * 2 * 64 * 64  # dropouts, tokens, width
    assert 0 < saved[0.1] - saved[0.0] <= 1.5 * masks  # the sums that they are added to are no longer saved alone
    probe = torch.nn.functional.dropout(torch.ones(4, requires_grad=True), 0.5)
    assert type(probe.grad_fn).__name__ == "MulBackward0", "torch's own dropout is back"


def test_sizes_are_multiples_of_a_gpus_blocks() -> None:
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 7))
    chain = estimate_profile(build_on_meta(lambda: net.to("meta")), [InputSpec((3, 3))], A100).chain
    assert chain.stages[0].keep.forward_peak_bytes == 512
    assert chain.stages[2].keep.backward_peak_bytes % 512 == 0


# ---------------------------------------------------------------------------------------------------- seconds


def test_the_clock_counts_the_operations_of_forward_and_backward() -> None:
    only_arithmetic = Accelerator("some", 2**30, bandwidth=math.inf, flops=1e6, half_flops=1e6)
    net, sample = Transformer(), torch.ones(2, 32, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        net(sample).sum().backward()
    chain = estimate_profile(build_on_meta(Transformer), [InputSpec((2, 32), torch.int64)], only_arithmetic).chain
    attention = 3 * (4 + 10) * 2 * 4 * 32 * 32 * 16  # which torch's counter does not know on the CPU
    assert chain.step_seconds == pytest.approx((counter.get_total_flops() + attention) / 6e5, rel=0.02)
    # Two blocks of the same kind cost the same.
    assert len({stage.keep.forward_seconds for stage in chain if "norms.1" in stage.name}) <= 2


# ---------------------------------------------------------------------------------------------------- without memory


def test_a_model_of_seventy_gigabytes_is_planned_in_less_than_two(imported_python: ImportedPython) -> None:
    code = """
        import torch
        from pathlib import Path
        from test_estimates import Transformer
        from lightning_rotor.profiling.estimates import estimate_profile
        from lightning_rotor.profiling.input_spec import InputSpec
        from lightning_rotor.profiling.models_without_memory import build_on_meta
        from lightning_rotor.profiling.accelerators import GPUS
        from lightning_rotor.memory.held import parameter_bytes
        from lightning_rotor.units import in_blocks

        model = build_on_meta(lambda: Transformer(width=32768, depth=1, vocabulary=80_000))
        size = parameter_bytes(model)
        chain = estimate_profile(model, [InputSpec((4, 2048), torch.int64)], GPUS["H200"]).chain
        gradients = [in_blocks(parameter.nbytes, 512) for parameter in model.parameters()]
        assert sum(stage.keep.parameter_gradient_bytes for stage in chain) == sum(gradients)
        # Not getrusage: its maximum begins with what the process that started this one held.
        (peak,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
        print(size, int(peak.split()[1]) * 1024)
    """
    output = imported_python.run(textwrap.dedent(code), cwd=ROOT / "tests" / "profiling")
    model_bytes, resident_bytes = map(int, output.split())
    assert model_bytes > 70e9
    assert resident_bytes < 2e9


def test_shared_parameters_stay_shared() -> None:
    def tied() -> nn.Module:
        net = Transformer(depth=1)
        net.head.weight = net.embedding.weight
        return net

    model = build_on_meta(tied)
    estimate_profile(model, [InputSpec((2, 8), torch.int64)], A100)
    assert model.head.weight is model.embedding.weight
    assert not model.head.weight.is_meta


class Counting(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum().item() > 0 else x + 1


class Deciding(nn.Module):
    """Looks at values in its own forward, and not only in a layer, which would become one stage."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) if x.sum().item() > 0 else x


class Reading(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.layers[0].weight.sum().item()


def test_models_that_need_values_are_refused() -> None:
    with pytest.raises(ModelError, match=r"cannot be (planned|run on shapes alone)"):
        estimate_profile(build_on_meta(Deciding), [InputSpec((2, 4))], A100)
    counting = build_on_meta(lambda: nn.Sequential(nn.Linear(4, 4), Counting(), nn.Linear(4, 4)))
    with pytest.raises(ModelError, match=r"needs values of tensors .*use the device 'cpu' or 'cuda'"):
        estimate_profile(counting, [InputSpec((2, 4))], A100)
    with pytest.raises(ModelError, match=r"cannot be built without memory: .*use the device 'cpu'"):
        build_on_meta(Reading)


# ---------------------------------------------------------------------------------------------------- inputs
