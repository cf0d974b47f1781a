"""A convolutional network for handwritten digits, written as nobody would write it for this library: a plain ``nn.Sequential``."""

from __future__ import annotations

import lightning as L
import torch
from torch import nn
from torchmetrics.classification import MulticlassAccuracy


class DigitClassifier(L.LightningModule):
    """Classifies images of one digit.

    Args:
        width: Channels of the first two convolutions; the other two have twice as many.
        dropout: Probability of dropping a value, after each block.
        learning_rate: Step size of Adam.
    """

    def __init__(self, width: int = 32, dropout: float = 0.1, learning_rate: float = 2e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = nn.Sequential(
            *_convolution(1, width),
            *_convolution(width, width),
            *(nn.Dropout(dropout), nn.MaxPool2d(2)),
            *_convolution(width, 2 * width),
            *_convolution(2 * width, 2 * width),
            *(nn.Dropout(dropout), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(2 * width * 7 * 7, 10)),
        )
        self.loss = nn.CrossEntropyLoss()
        self.test_accuracy = MulticlassAccuracy(num_classes=10, average="micro")

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits ``(batch, 10)`` of images ``(batch, 1, 28, 28)``."""
        return self.model(images)

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:  # noqa: D102
        images, digits = batch
        loss = self.loss(self(images), digits)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def test_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> None:  # noqa: D102
        images, digits = batch
        self.test_accuracy(self(images), digits)
        self.log("test_accuracy", self.test_accuracy)

    def configure_optimizers(self) -> torch.optim.Optimizer:  # noqa: D102
        return torch.optim.Adam(self.parameters(), lr=self.hparams["learning_rate"])


def _convolution(channels_in: int, channels_out: int) -> tuple[nn.Module, ...]:
    return nn.Conv2d(channels_in, channels_out, 3, padding=1), nn.BatchNorm2d(channels_out), nn.ReLU()
