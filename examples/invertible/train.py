"""Train reversible networks of growing depth in three ways, and draw what a step takes.

plain        everything is kept
recompute    the least that recomputation alone can do with
invert       the least where couplings may rebuild their input from their output as well

python train.py                     scikit-learn's digits, no download
python train.py --depths 8 64 256   other depths
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_rotor import RotorCallback, RotorWarning
from lightning_rotor.invertible import AdditiveCoupling, InvertibleSequential, check_inverse
from lightning_rotor.profiling import StepMeter
from lightning_rotor.units import format_bytes

HERE = Path(__file__).parent
BATCH_SIZE = 256
COLORS = {"plain": "#4a4a4a", "recompute": "#2c6fbb", "invert": "#c0392b"}


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
        channels: In each of them, an even number.
        show_inverses: Whether a plan may use that couplings are invertible.
    """

    def __init__(self, depth: int, channels: int = 32, *, show_inverses: bool = True) -> None:
        super().__init__()
        couplings = [AdditiveCoupling(_branch(channels // 2), _branch(channels // 2)) for _ in range(depth)]
        blocks = InvertibleSequential(*couplings) if show_inverses else nn.Sequential(*map(WithoutInverse, couplings))
        head = [nn.BatchNorm2d(channels), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10)]
        self.net = nn.Sequential(nn.Conv2d(1, channels, 3, padding=1), blocks, *head)
        check_inverse(couplings[0], torch.randn(16, channels, 8, 8))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Scores of the classes, ``(batch, 10)``."""
        return self.net(images)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:  # noqa: D102
        images, classes = batch
        return F.cross_entropy(self(images), classes)

    def configure_optimizers(self) -> torch.optim.Optimizer:  # noqa: D102
        return torch.optim.Adam(self.parameters(), 2e-3)


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


def train(depth: int, epochs: int, way: str) -> tuple[LastStep, float]:
    """Train from a fixed seed; returns what the last step took, and the accuracy on images that were left out."""
    L.seed_everything(0, verbose=False)
    images, classes = map(torch.tensor, load_digits(return_X_y=True))
    images = images.float().view(-1, 1, 8, 8) / 16
    held_out = torch.arange(len(images)) % 5 == 0
    model = ReversibleClassifier(depth, show_inverses=way == "invert")
    last = LastStep()
    # No plan takes a single byte: the callback says so, and trains with the plan that takes least.
    rotor = RotorCallback(1, "net", on_infeasible="warn", show_table=False)
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        callbacks=[last] if way == "plain" else [rotor, last],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = TensorDataset(images[~held_out], classes[~held_out])
    trainer.fit(model, DataLoader(data, BATCH_SIZE, shuffle=True, drop_last=True))
    model.eval()
    with torch.no_grad():
        right = model(images[held_out]).argmax(1) == classes[held_out]
    return last, float(right.float().mean())


def draw(peaks: dict[str, list[int]], depths: list[int], path: Path) -> None:
    """Peak memory of a step against depth."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for name, values in peaks.items():
        axes.plot(depths, [value / 2**20 for value in values], "o-", color=COLORS[name], label=name)
        axes.annotate(name, (depths[-1], values[-1] / 2**20), xytext=(6, 0), textcoords="offset points", va="center")
    axes.set(xlabel="couplings", ylabel="peak memory of a step (MiB)", xlim=(0, depths[-1] * 1.25), ylim=(0, None))
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=200)


def main() -> None:
    """Train, print, draw."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--depths", type=int, nargs="+", default=[4, 16, 32], help="numbers of couplings")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--output", type=Path, default=HERE / "output", help="folder for the picture")
    arguments = parser.parse_args()
    if arguments.epochs < 1 or min(arguments.depths) < 1:
        sys.exit("Depths and epochs are positive numbers.")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    depths = sorted(arguments.depths)
    warnings.simplefilter("ignore", RotorWarning)
    peaks: dict[str, list[int]] = {"plain": [], "recompute": [], "invert": []}
    for depth in depths:
        for name, values in peaks.items():
            last, accuracy = train(depth, arguments.epochs, name)
            values.append(last.peak_bytes)
            print(
                f"{depth:4d} couplings, {name:9}  peak {format_bytes(last.peak_bytes):>10}  "
                f"last loss {last.loss:.6f}  accuracy {accuracy:.2%}",
                flush=True,
            )
    path = arguments.output / "depth.png"
    draw(peaks, depths, path)
    print(f"Peak against depth: {path.resolve()}")


if __name__ == "__main__":
    main()
