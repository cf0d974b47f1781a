"""Train reversible networks in three ways, and draw what a step takes against depth.

plain        everything is kept
recompute    the least memory in which no stage runs more than once again
invert       the same where couplings may rebuild their input from their output as well

python train.py                     scikit-learn's digits, no download
python train.py --depths 8 64 128   other depths
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_rotor import Plan, RotorCallback, RotorWarning
from lightning_rotor.invertible import AdditiveCoupling, InvertibleSequential, check_inverse
from lightning_rotor.profiling import StepMeter
from lightning_rotor.simulator import simulate
from lightning_rotor.units import format_bytes

HERE = Path(__file__).parent
PICTURE = HERE / "output" / "depth.png"
COLORS = {"plain": "#4a4a4a", "recompute": "#2c6fbb", "invert": "#c0392b"}
CHANNELS = 8
# Enough for a callback that measures the first steps, and for a meter in the last two.
STEPS = 6


class WithoutInverse(nn.Module):
    """A block whose inverse nobody sees."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The block's output."""
        return self.block(x)


class ReversibleClassifier(L.LightningModule):
    """A reversible residual network for images ``(1, 8, 8)`` and 10 classes.

    Args:
        depth: Number of couplings.
        channels: In each of them, an even number. Few, so that gradients of the weights, which grow with the depth, are small beside activations.
        show_inverses: Whether a plan may use that couplings are invertible.
    """

    def __init__(self, depth: int, channels: int = CHANNELS, *, show_inverses: bool = True) -> None:
        super().__init__()
        couplings = [AdditiveCoupling(_branch(channels // 2), _branch(channels // 2)) for _ in range(depth)]
        blocks = InvertibleSequential(*couplings) if show_inverses else nn.Sequential(*map(WithoutInverse, couplings))
        head = [nn.BatchNorm2d(channels), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(16 * channels, 10)]
        self.net = nn.Sequential(nn.Conv2d(1, channels, 3, padding=1), blocks, *head)
        check_inverse(couplings[0], torch.randn(16, channels, 8, 8))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Scores of the classes, ``(batch, 10)``."""
        return self.net(images)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:  # noqa: D102
        images, classes = batch
        return F.cross_entropy(self(images), classes)

    def configure_optimizers(self) -> torch.optim.Optimizer:  # noqa: D102
        return torch.optim.Adam(self.parameters(), 5e-3)


def _branch(channels: int) -> nn.Sequential:
    last = nn.BatchNorm2d(channels)
    nn.init.zeros_(last.weight)  # each coupling begins as the identity, so that any depth trains
    return nn.Sequential(
        nn.Conv2d(channels, channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.Conv2d(channels, channels, 3, padding=1, bias=False),
        last,
    )


class LastStep(L.Callback):
    """Measures the memory of the last forward and backward above what lives between steps, and notes its loss."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self.loss = float("nan")
        self._meter: StepMeter | None = None

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int) -> None:  # noqa: D102
        # The step before is watched too: torch sees gradients go only if it saw them come.
        if trainer.global_step >= trainer.estimated_stepping_batches - 2:
            self._meter = StepMeter(module.device)
            self._meter.start()

    def on_train_batch_end(  # noqa: D102
        self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.loss = float(outputs["loss"])
        if self._meter is not None:
            self.peak_bytes = self._meter.stop().peak_bytes
            self._meter = None


def digits() -> tuple[TensorDataset, TensorDataset]:
    """1,437 images ``(1, 8, 8)`` to learn from, and 360 that are left out."""
    images, classes = map(torch.tensor, load_digits(return_X_y=True))
    images = images.float().view(-1, 1, 8, 8) / 16
    held_out = torch.arange(len(images)) % 5 == 0
    return TensorDataset(images[~held_out], classes[~held_out]), TensorDataset(images[held_out], classes[held_out])


def fit(model: L.LightningModule, batch_size: int, *callbacks: L.Callback, steps: int = -1, epochs: int = -1) -> None:
    """Train on the digits."""
    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=steps,
        max_epochs=epochs,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(digits()[0], batch_size, shuffle=True, drop_last=True))


def train(depth: int, way: str, batch_size: int, **length: int) -> tuple[LastStep, float]:
    """Train from a fixed seed; returns what the last step took, and the accuracy on images that were left out."""
    callbacks: list[L.Callback] = []
    if way != "plain":
        trial = RotorCallback("1TiB", "net", show_table=False)
        fit(_model(depth, way), batch_size, trial, steps=1)
        # Beside the activations of the net: weights, optimizer, batch, loss.
        reserved_bytes = trial.budget_bytes - trial.plan.budget_bytes
        limit_bytes = reserved_bytes + peak_without_repetition(trial.plan)
        callbacks.append(RotorCallback(limit_bytes, "net", show_table=False, on_infeasible="warn"))
    model, last = _model(depth, way), LastStep()
    # First, for the callback leaves torch's one profiler to whoever has it when a step begins.
    fit(model, batch_size, last, *callbacks, **length)
    model.eval()
    images, classes = digits()[1].tensors
    with torch.no_grad():
        return last, float((model(images).argmax(1) == classes).float().mean())


def peak_without_repetition(plan: Plan) -> int:
    """The least peak, in bytes, of a plan for the same module in which no stage runs more than once again."""

    def again(point: Any) -> int:
        events = simulate(plan.chain, point.schedule).events
        return max(
            Counter(event.stage for event in events if event.phase == "recompute" or event.inverts).values(), default=0
        )

    return min(point.peak_bytes for point in plan.frontier() if again(point) <= 1)


def _model(depth: int, way: str) -> ReversibleClassifier:
    L.seed_everything(0, verbose=False)
    return ReversibleClassifier(depth, show_inverses=way == "invert")


def draw(peaks: dict[str, list[int]], depths: list[int], path: Path) -> None:
    """Peak memory of a step against depth, both on logarithmic axes."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for name, values in peaks.items():
        sizes = [value / 2**20 for value in values]
        axes.plot(depths, sizes, "o-", color=COLORS[name], label=name)
        axes.annotate(
            f"{name}\n{sizes[-1]:.3g} MiB",
            (depths[-1], sizes[-1]),
            xytext=(8, 0),
            textcoords="offset points",
            va="center",
            color=COLORS[name],
        )
    axes.set(xscale="log", xlabel="couplings", ylabel="peak memory of a step (MiB)")
    axes.set_yscale("log", base=2)
    axes.set_xlim(depths[0] * 0.9, depths[-1] * 1.6)
    axes.set_xticks(depths, map(str, depths))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.grid(axis="y", color="0.9")
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main() -> None:
    """Train, print, draw."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--depths", type=int, nargs="+", default=[4, 16, 64], help="numbers of couplings")
    parser.add_argument("--batch-size", type=int, default=256, help="of the steps that are measured")
    parser.add_argument("--train-depth", type=int, default=8, help="couplings of the networks that are trained")
    parser.add_argument("--epochs", type=int, default=8, help="of their training")
    parser.add_argument("--output", type=Path, default=PICTURE, help="picture")
    arguments = parser.parse_args()
    if min(arguments.epochs, arguments.batch_size, arguments.train_depth, *arguments.depths) < 1:
        sys.exit("Depths, epochs and the batch size are positive numbers.")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore", RotorWarning)
    warnings.filterwarnings("ignore", r".*LeafSpec", FutureWarning)  # what Lightning calls
    for name in COLORS:
        last, accuracy = train(arguments.train_depth, name, 64, epochs=arguments.epochs)
        print(
            f"{arguments.train_depth} couplings, {arguments.epochs} epochs, {name:9}  last loss {last.loss:.6f}  accuracy {accuracy:.1%}  "
            f"(chance: 10 %)",
            flush=True,
        )
    depths = sorted(arguments.depths)
    peaks: dict[str, list[int]] = {name: [] for name in COLORS}
    for depth in depths:
        for name, values in peaks.items():
            values.append(train(depth, name, arguments.batch_size, steps=STEPS)[0].peak_bytes)
        sizes = ", ".join(f"{name} {format_bytes(values[-1])}" for name, values in peaks.items())
        print(f"{depth:4d} couplings, peak of a step: {sizes}", flush=True)
    draw(peaks, depths, arguments.output)
    print(f"Peak against depth: {arguments.output.resolve()}")


if __name__ == "__main__":
    main()
