"""A classifier of torchvision by name, trained as torchvision's references train it. Nothing in here knows of RotorCallback."""

from __future__ import annotations

import difflib
import math
from functools import partial
from typing import Any, Literal

import lightning as L
import torch
import torchvision
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torchmetrics.classification import MulticlassAccuracy

# Weights of the additional heads, which these two have in training: as in their papers.
AUXILIARY_WEIGHTS = {"aux_logits": 0.4, "aux_logits1": 0.3, "aux_logits2": 0.3}
# Tensors with several axes that weight decay leaves alone, as it does all with one axis.
EMBEDDINGS = ("pos_embedding", "relative_position_bias_table")


class ImageClassifier(L.LightningModule):
    """Classifies images.

    Args:
        arch: Any classification model of torchvision, such as ``"resnet50"``, untrained.
        num_classes: Classes of the data.
        image_size: Side of the training images; vision transformers are built for one size.
        optimizer: SGD with momentum 0.9, or AdamW.
        learning_rate: After the warm-up.
        weight_decay: Of the weights of linear layers and convolutions.
        norm_weight_decay: Of everything else: normalisation, biases, layer scales, embeddings.
        warmup_epochs: Over which the learning rate rises linearly; then it falls to 0 along a cosine. Both change at every step.
        warmup_start: Share of the learning rate that the warm-up starts from.
        label_smoothing: Of the training loss.
        channels_last: Keep the weights of convolutions in the layout that tensor cores work on fastest; the images should be in it as well.
    """

    def __init__(
        self,
        arch: str = "resnet50",
        *,
        num_classes: int = 1000,
        image_size: int = 224,
        optimizer: Literal["sgd", "adamw"] = "sgd",
        learning_rate: float = 0.1,
        weight_decay: float = 1e-4,
        norm_weight_decay: float = 0.0,
        warmup_epochs: float = 5,
        warmup_start: float = 0.01,
        label_smoothing: float = 0.0,
        channels_last: bool = False,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = build_model(arch, num_classes=num_classes, image_size=image_size)
        if channels_last:
            self.model.to(memory_format=torch.channels_last)
        self.loss = nn.CrossEntropyLoss(label_smoothing=label_smoothing)
        self.top1 = MulticlassAccuracy(num_classes, average="micro")
        self.top5 = MulticlassAccuracy(num_classes, average="micro", top_k=min(5, num_classes))

    def forward(self, images: torch.Tensor) -> Any:
        """Logits ``(batch, num_classes)`` of images ``(batch, 3, height, width)``; in training some models add those of further heads."""
        return self.model(images)

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:  # noqa: D102
        images, classes = batch
        loss = with_auxiliary(self.loss, self(images), classes)
        self.log("train_loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> None:  # noqa: D102
        images, classes = batch
        logits = self(images)
        self.top1(logits, classes)
        self.top5(logits, classes)
        self.log("val_loss", nn.functional.cross_entropy(logits, classes))
        self.log_dict({"val_top1": self.top1, "val_top5": self.top5}, prog_bar=True)

    def configure_optimizers(self) -> dict[str, Any]:  # noqa: D102
        options = self.hparams
        groups = [
            {"params": parameters, "weight_decay": decay}
            for parameters, decay in zip(
                split_for_decay(self), (options.weight_decay, options.norm_weight_decay), strict=True
            )
        ]
        if options.optimizer == "sgd":
            optimizer = torch.optim.SGD(groups, options.learning_rate, momentum=0.9)
        else:
            optimizer = torch.optim.AdamW(groups, options.learning_rate)
        steps = int(self.trainer.estimated_stepping_batches)
        warmup = int(steps * min(1.0, options.warmup_epochs / self.trainer.max_epochs))
        factor = partial(warmup_then_cosine, steps=steps, warmup=warmup, start=options.warmup_start)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": LambdaLR(optimizer, factor), "interval": "step"}}


def architectures() -> list[str]:
    """Names of torchvision's classification models."""
    return torchvision.models.list_models(module=torchvision.models)


def build_model(arch: str, *, num_classes: int, image_size: int) -> nn.Module:
    """An untrained model of torchvision.

    Raises:
        ValueError: There is none of that name; says which ones are close.
    """
    known = architectures()
    if arch not in known:
        close = difflib.get_close_matches(arch.lower(), known, n=5) or known
        raise ValueError(
            f"model.arch is {arch!r}, which is no classification model of torchvision {torchvision.__version__}. Close to it: {', '.join(close)}"
        )
    options: dict[str, Any] = {}
    if arch.startswith("vit_"):
        options["image_size"] = image_size
    elif arch.startswith("maxvit_"):
        options["input_size"] = (image_size, image_size)
    elif arch in ("googlenet", "inception_v3"):
        options["init_weights"] = True  # what they do anyway, after a warning that it will change
    return torchvision.models.get_model(arch, weights=None, num_classes=num_classes, **options)


def with_auxiliary(loss: nn.Module, outputs: Any, classes: torch.Tensor) -> torch.Tensor:
    """The loss of a model's logits, and of its further heads if there are some (GoogLeNet, Inception)."""
    if isinstance(outputs, torch.Tensor):
        return loss(outputs, classes)
    total = loss(outputs.logits, classes)
    for name, weight in AUXILIARY_WEIGHTS.items():
        if (logits := getattr(outputs, name, None)) is not None:
            total = total + weight * loss(logits, classes)
    return total


def split_for_decay(module: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Parameters for weight decay, and the others: all along one axis (normalisation, biases, layer scales, class tokens) and embeddings."""
    decayed: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in module.named_parameters():
        plain = sum(size > 1 for size in parameter.shape) > 1 and not name.endswith(EMBEDDINGS)
        (decayed if plain else others).append(parameter)
    return decayed, others


def warmup_then_cosine(step: int, *, steps: int, warmup: int, start: float) -> float:
    """Factor of the learning rate: up a line from ``start`` to 1, then down a cosine to 0 at the last step."""
    if step < warmup:
        return start + (1 - start) * step / warmup
    return (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup))) / 2
