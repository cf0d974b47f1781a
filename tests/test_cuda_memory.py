"""Bytes on a GPU: a step peaks where the plan says, as PyTorch's allocator counts it, and the process stays inside its limit."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from lightning_rotor import BudgetError, Checkpointable, RotorCallback, RotorWarning, Schedule, simulate
from lightning_rotor.planning import minimum_budget
from lightning_rotor.profiling.cuda_recording import await_autograd
from lightning_rotor.profiling.workspaces import take_workspaces
from tests.grids import few

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda", 0)
SCALARS = 2 * 512
"""The loss and the gradient that its backward starts from; each tensor takes a block of its own."""


class Attention(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.mix, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (each.unflatten(-1, (2, -1)).transpose(1, 2) for each in self.mix(self.norm(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU(inplace=True),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x + self.inner(x))


def mlp() -> nn.Module:
    """No size is a multiple of a block, and sums over the batch stage their parts."""
    layers = [[nn.Linear(51, 50), nn.GELU(), nn.Linear(50, 51), nn.Dropout(0.1)] for _ in range(3)]
    return nn.Sequential(*(layer for block in layers for layer in block), nn.Linear(51, 3))


def cnn() -> nn.Module:
    body = [nn.Conv2d(3, 7, 3), nn.BatchNorm2d(7), nn.ReLU(inplace=True), *(Residual(7) for _ in range(2))]
    return nn.Sequential(*body, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(7 * 25, 5))


def gpt() -> nn.Module:
    def block() -> nn.Module:
        width = 34
        feed = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1)
        )
        return nn.Sequential(Attention(width, 0.1), feed)

    return nn.Sequential(nn.Embedding(11, 34), *(block() for _ in range(3)), nn.LayerNorm(34), nn.Linear(34, 11))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "mlp": (mlp, lambda: torch.randn(301, 51, device=GPU)),
    "cnn": (cnn, lambda: torch.randn(3, 3, 12, 12, device=GPU)),
    "gpt": (gpt, lambda: torch.randint(0, 11, (3, 17), device=GPU)),
}


def step(net: nn.Module, forward: Callable[[Any], Any], batch: torch.Tensor) -> tuple[list[torch.Tensor], int]:
    """Gradients, and the peak above what was allocated before, without the loss."""
    net.zero_grad()
    torch.manual_seed(1)
    # Modules of earlier tests, which are in cycles with their plans: freed in the middle, they would lower its peak.
    gc.collect()
    # More than once: on a busy machine the thread may hold the last backward's gradients for a moment longer.
    for _ in range(3):
        await_autograd(GPU)
        time.sleep(0.01)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    output = forward(batch)  # the caller holds it
    Mean.apply(output).backward()
    peak = torch.cuda.max_memory_allocated() - before - SCALARS
    return [parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None], peak


class Mean(torch.autograd.Function):
    """A loss that holds nothing."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor) -> torch.Tensor:
        ctx.like = output.shape, output.dtype
        return output.new_zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        shape, dtype = ctx.like
        return torch.full(shape, 1e-2, dtype=dtype, device=GPU)


@pytest.mark.parametrize(
    ("model", "autocast"),
    [
        pytest.param("mlp", True, id="mlp-bf16", marks=pytest.mark.wide),
        pytest.param("cnn", False, id="cnn-fp32"),
        pytest.param("gpt", True, id="gpt-bf16"),
        pytest.param("mlp", False, id="mlp-fp32", marks=pytest.mark.wide),
        pytest.param("cnn", True, id="cnn-bf16", marks=pytest.mark.wide),
        pytest.param("gpt", False, id="gpt-fp32", marks=pytest.mark.wide),
    ],
)
def test_peaks_are_predicted_to_the_byte(model: str, autocast: bool) -> None:
    torch.backends.cudnn.deterministic = True
    make, data = MODELS[model]
    net, batch = make().to(GPU), data()
    planned = Checkpointable(net)
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        chain = planned.measure(batch)

    def under_autocast(forward: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def run(value: Any) -> Any:
            with torch.autocast("cuda", torch.bfloat16, enabled=autocast, cache_enabled=False):
                return forward(value)

        return run

    least = minimum_budget(chain).peak_bytes
    most = simulate(chain, Schedule.keep_all(len(chain))).peak_bytes
    assert least < most
    expected, _ = step(net, under_autocast(net), batch)
    for limit in (most, (least + most) // 2, least):
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            plan = planned.compute_sequence(limit)
        received, peak = step(net, under_autocast(planned), batch)
        assert all(map(torch.equal, expected, received))
        # Under autocast the order in which gradients are cast may save a block of 512 bytes or two.
        assert plan.peak_bytes - 1024 * autocast <= peak <= plan.peak_bytes <= limit


# -------------------------------------------------------------------- the whole process, on devices of any size

MiB = 2**20
ROWS = 8192


class Classifier(L.LightningModule):
    """Activations of 2 MiB, so that they outweigh the segments of the allocator, and little to compute."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        blocks = [[nn.Linear(64, 64), nn.Tanh(), nn.Dropout(0.1)] for _ in range(12)]
        self.body = nn.Sequential(*(layer for block in blocks for layer in block), nn.Linear(64, 3))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return F.cross_entropy(self.body(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Device(L.Callback):
    """A device of some size, and what a training takes of it.

    Attributes:
        size_bytes: Of the device, without what CUDA's context takes; None for the real one.
        shrinks: By the name of a hook, the number of the batch and how much is left there beyond what is allocated then.
        peaks: Of each step, in bytes allocated and reserved.
        failed: Allocations that failed, be it that one after giving back what was cached did not.
    """

    def __init__(self, size_bytes: int | None = None, **shrinks: tuple[int, int]) -> None:
        self.size_bytes, self.shrinks, self.peaks, self.failed = size_bytes, shrinks, [], 0
        self._ballast: list[torch.Tensor] = []

    def setup(self, *_: Any, **__: Any) -> None:
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()
        self.resize(self.size_bytes)
        torch.cuda.reset_accumulated_memory_stats()

    def resize(self, size_bytes: int | None) -> None:
        self._ballast.clear()
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(1.0 if size_bytes is None else size_bytes / total)

    def _shrink(self, hook: str, trainer: L.Trainer) -> None:
        batch, left = self.shrinks.get(hook, (None, 0))
        if trainer.global_step == batch:
            torch.cuda.empty_cache()
            self.resize(torch.cuda.memory_reserved() + left)
            with suppress(torch.OutOfMemoryError):
                while not left:  # nor in segments that are there
                    self._ballast.append(torch.empty(2 * MiB, dtype=torch.uint8, device=GPU))

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self._shrink("forward", trainer)
        torch.cuda.reset_peak_memory_stats()

    def on_before_backward(self, trainer: L.Trainer, *_: Any) -> None:
        self._shrink("backward", trainer)

    def on_train_batch_end(self, *_: Any) -> None:
        self.peaks.append((torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()))
        statistics = torch.cuda.memory_stats()
        self.failed = statistics["num_alloc_retries"] + statistics["num_ooms"]


def fit(device: Device, *callbacks: L.Callback, model: L.LightningModule | None = None) -> dict[str, Any]:
    """Weights after four steps."""
    model = model or Classifier()
    generator = torch.Generator().manual_seed(1)
    batches = [
        (torch.randn(ROWS, 64, generator=generator), torch.randint(0, 3, (ROWS,), generator=generator))
        for _ in range(4)
    ]
    trainer = L.Trainer(
        accelerator="gpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[device, *callbacks],
    )  # fmt: skip
    torch.manual_seed(3)
    try:
        trainer.fit(model, DataLoader(batches, batch_size=None))
    finally:
        device.resize(None)
    return {name: tensor.cpu() for name, tensor in model.state_dict().items()}


@pytest.fixture(scope="module")
def roomy() -> tuple[dict[str, Any], RotorCallback, Device]:
    """Weights of a plain training, and the callback after one in which everything fits."""
    rotor, device = RotorCallback(None, "body", show_table=False), Device()
    plain = fit(Device())
    assert_same(plain, fit(device, rotor))
    return plain, rotor, device


def assert_same(left: dict[str, Any], right: dict[str, Any]) -> None:
    assert all(torch.equal(left[name], right[name]) for name in left)


def least_and_most(rotor: RotorCallback) -> tuple[int, int]:
    """Peaks of the process with everything recomputed that can be, and with nothing."""
    assert rotor.plan is not None
    assert rotor.predicted_peak_bytes is not None
    least = minimum_budget(rotor.plan.chain, lingering_bytes=rotor.plan.lingering_bytes).peak_bytes
    return rotor.predicted_peak_bytes - rotor.plan.peak_bytes + least, rotor.predicted_peak_bytes


def room_for(limit_bytes: int) -> int:
    """Size of a device on which that much is usable, roughly. A real one rounds what it reserves more coarsely."""
    return int((limit_bytes + 56 * MiB) / 0.95) + is_real() * 12 * MiB


def is_real() -> bool:
    """True on a device that is not simulated."""
    return "Simulated" not in torch.cuda.get_device_name()


@pytest.mark.filterwarnings("ignore:nvmlDeviceGetGpuFabricInfoV failed:UserWarning")  # simulated devices have none
@pytest.mark.parametrize(
    ("share", "expandable"),
    [
        (0.0, True),  # other tests have segments that are not expandable, and limits in between
        *(
            pytest.param(*each, marks=pytest.mark.wide)
            for each in ((0.0, False), (0.4, False), (0.4, True), (1.0, False), (1.0, True))
        ),
    ],
)
def test_without_a_limit_no_allocation_fails_on_a_device_of_any_size(
    roomy: tuple[dict[str, Any], RotorCallback, Device], share: float, expandable: bool
) -> None:
    plain, rotor, _ = roomy
    least, most = least_and_most(rotor)
    device = Device(room_for(int(least + share * (most - least))))
    rotor = RotorCallback(None, "body", show_table=False)
    torch.cuda.empty_cache()
    torch._C._accelerator_setAllocatorSettings(f"expandable_segments:{expandable}")
    try:
        assert_same(plain, fit(device, rotor))
    finally:
        torch.cuda.empty_cache()
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
    assert device.failed == 0
    assert rotor.plan is not None
    assert rotor.predicted_peak_bytes is not None
    assert bool(rotor.plan.recomputed) == (share < 1)
    for allocated, reserved in device.peaks:
        assert 0.98 * rotor.predicted_peak_bytes <= allocated <= rotor.budget_bytes
        assert reserved <= (device.size_bytes or 0)
    assert rotor.measured_reserved_bytes == device.peaks[-1][1]


@pytest.mark.parametrize("limit", few(["bytes", "share"], "share"))
def test_a_limit_bounds_what_is_allocated(
    roomy: tuple[dict[str, Any], RotorCallback, Device], limit: str, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, rotor, _ = roomy
    wanted = sum(least_and_most(rotor)) // 2
    total = torch.cuda.get_device_properties(0).total_memory
    rotor = RotorCallback(wanted if limit == "bytes" else wanted / total, "body")
    device = Device()
    assert_same(plain, fit(device, rotor))
    table = capsys.readouterr().out
    assert "Peak with this plan" in table
    assert "Reserved by PyTorch" in table
    assert abs(rotor.budget_bytes - wanted) <= 1
    assert rotor.plan is not None
    assert rotor.plan.recomputed
    assert all(allocated <= wanted for allocated, _ in device.peaks)
    assert device.peaks[-1][0] == rotor.measured_peak_bytes


@pytest.mark.wide
def test_a_share_of_a_device_that_others_use_is_what_they_leave(
    roomy: tuple[dict[str, Any], RotorCallback, Device],
) -> None:
    plain, rotor, _ = roomy
    device = Device(room_for(sum(least_and_most(rotor)) // 2))
    rotor = RotorCallback("100%", "body", show_table=False)
    assert_same(plain, fit(device, rotor))
    assert device.failed == 0
    assert rotor.budget_bytes < (device.size_bytes or 0)


def workspaces() -> int:
    """Bytes that matrix products keep on this device: 32 MiB for each of two threads on Hopper, a quarter before."""
    torch._C._cuda_clearCublasWorkspaces()
    before = torch.cuda.memory_allocated()
    take_workspaces(GPU)
    return torch.cuda.memory_allocated() - before


def test_a_device_that_is_too_small_is_refused_before_anything_fails() -> None:
    device = Device(48 * MiB + workspaces())
    with pytest.raises(BudgetError, match=r"is below the minimum .* for parameters .* workspaces"):
        fit(device, RotorCallback(None, "body", show_table=False))
    assert torch.cuda.memory_stats()["num_ooms"] == 0


def test_a_device_without_room_for_workspaces_is_refused_by_name() -> None:
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    device = Device()
    device.resize(2 * MiB)
    try:
        with pytest.raises(BudgetError, match="no room left for the workspaces of matrix products"):
            take_workspaces(GPU)
    finally:
        device.resize(None)


class Towers(Classifier):
    """Two modules that ``training_step`` calls, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.other = Classifier().body

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) + F.cross_entropy(self.other(batch[0]), batch[1])


@pytest.mark.wide
def test_two_modules_on_one_device_keep_one_limit() -> None:
    device = Device()
    plain = fit(device, model=Towers())
    limit = int(0.9 * device.peaks[-1][0])
    rotors = [RotorCallback(limit, name, show_table=False) for name in ("body", "other")]
    device = Device()
    assert_same(plain, fit(device, *rotors, model=Towers()))
    assert all(allocated <= limit for allocated, _ in device.peaks)
    assert any(rotor.plan is not None and rotor.plan.recomputed for rotor in rotors)


@pytest.mark.wide
def test_another_process_that_takes_memory_makes_the_forward_run_again(
    roomy: tuple[dict[str, Any], RotorCallback, Device], caplog: pytest.LogCaptureFixture
) -> None:
    plain, rotor, _ = roomy
    # What is left is what the second step's forward and backward may take beyond weights and workspaces.
    most = rotor.plan.peak_bytes
    least = minimum_budget(rotor.plan.chain, lingering_bytes=rotor.plan.lingering_bytes).peak_bytes
    device = Device(forward=(2, room_for((least + most) // 2) - 30 * MiB - is_real() * 24 * MiB))
    rotor = RotorCallback(None, "body", show_table=False)
    with caplog.at_level("WARNING", "lightning_rotor"):
        assert_same(plain, fit(device, rotor))
    assert "the forward runs again" in caplog.text
    assert rotor.plan is not None
    assert rotor.plan.recomputed


def test_a_backward_that_fails_ends_training_and_the_next_plans_with_less(
    roomy: tuple[dict[str, Any], RotorCallback, Device],
) -> None:
    _, known, _ = roomy
    rotor = RotorCallback(sum(least_and_most(known)) // 2, "body", show_table=False)
    with (
        pytest.warns(RotorWarning, match="A step cannot run again from where it failed, but the next training"),
        pytest.raises(torch.OutOfMemoryError),
    ):
        fit(Device(backward=(2, 0)), rotor)
    before = rotor.plan
    assert before is not None
    fit(Device(), rotor)
    assert rotor.plan is not None
    assert rotor.plan.peak_bytes < before.peak_bytes


class Littering(nn.Module):
    """Each forward makes garbage of a cycle that holds older memory, as an exception's frames do."""

    def __init__(self, memory: Iterator[torch.Tensor]) -> None:
        super().__init__()
        self.memory = memory

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept: list[Any] = [next(self.memory)]
        kept.append(kept)
        return x.tanh()


@pytest.mark.parametrize("threshold", [1, 7, 40])
def test_garbage_that_goes_meanwhile_is_not_counted(threshold: int) -> None:
    thresholds = gc.get_threshold()

    def measured(threshold: int) -> list[int]:
        memory = iter([torch.empty(128, 64, device=GPU) for _ in range(2000)].pop, None)  # gives up what it gives
        net = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(64, 64), Littering(memory)))).to(GPU)
        batch = torch.randn(128, 64, device=GPU)
        gc.collect()
        gc.set_threshold(threshold)
        try:
            chain = Checkpointable(net).measure(batch)
        finally:
            gc.set_threshold(*thresholds)
        return [stage.keep.backward_peak_bytes for stage in chain] + [stage.keep.saved_bytes for stage in chain]

    assert measured(threshold) == measured(10**9)
