"""Handwritten digits, 28 x 28, from one of two sources."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import lightning as L
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

Split = Dataset[tuple[torch.Tensor, torch.Tensor]]


class DigitData(L.LightningDataModule):
    """Images ``(1, 28, 28)``, float32 in [0, 1], and their digits.

    Args:
        source: ``"digits"`` are the 1797 images that scikit-learn brings along, 8 x 8 scaled up to 28 x 28, every fifth for testing.
            ``"mnist"`` are torchvision's 60,000 and 10,000 images, downloaded at the first use.
        batch_size: Images in a step.
        folder: Where MNIST is kept.
    """

    def __init__(
        self,
        source: Literal["digits", "mnist"] = "digits",
        batch_size: int = 256,
        folder: str | Path = Path(__file__).parent / "data",
    ) -> None:
        super().__init__()
        if source not in ("digits", "mnist"):
            raise ValueError(f"source is {source!r}: expected 'digits' or 'mnist'")
        self.source = source
        self.batch_size = batch_size
        self.folder = Path(folder)
        self.train: Split
        self.test: Split

    def prepare_data(self) -> None:  # noqa: D102
        if self.source == "mnist":
            from torchvision.datasets import MNIST

            try:
                MNIST(self.folder, download=True)
            except (RuntimeError, OSError) as error:
                raise RuntimeError(
                    f"MNIST could not be downloaded to {self.folder}: {error}\n"
                    f"Put its four files into {self.folder / 'MNIST' / 'raw'}, or use the digits that need no download (--data digits)."
                ) from error

    def setup(self, stage: str) -> None:  # noqa: D102
        self.train, self.test = _digits() if self.source == "digits" else _mnist(self.folder)

    def train_dataloader(self) -> DataLoader[tuple[torch.Tensor, torch.Tensor]]:  # noqa: D102
        return DataLoader(self.train, self.batch_size, shuffle=True, drop_last=True)

    def test_dataloader(self) -> DataLoader[tuple[torch.Tensor, torch.Tensor]]:  # noqa: D102
        return DataLoader(self.test, self.batch_size)


def _digits() -> tuple[Split, Split]:
    from sklearn.datasets import load_digits

    digits = load_digits()
    small = torch.as_tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    images = F.interpolate(small, size=(28, 28), mode="bilinear", align_corners=False)
    labels = torch.as_tensor(digits.target)
    held_out = torch.arange(len(labels)) % 5 == 0
    return TensorDataset(images[~held_out], labels[~held_out]), TensorDataset(images[held_out], labels[held_out])


def _mnist(folder: Path) -> tuple[Split, Split]:
    from torchvision.datasets import MNIST

    splits = [MNIST(folder, train=train) for train in (True, False)]
    train, test = (TensorDataset(split.data.unsqueeze(1) / 255, split.targets) for split in splits)
    return train, test
