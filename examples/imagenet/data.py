"""ImageNet, or any other folder of images with a folder per class, as torchvision's references read it."""

from __future__ import annotations

from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import lightning as L
import photographs
import torch
from torch.utils.data import DataLoader, default_collate
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
AUTO_AUGMENT = {
    "ta_wide": v2.TrivialAugmentWide,
    "ra": v2.RandAugment,
    "augmix": v2.AugMix,
    "imagenet": v2.AutoAugment,
}
Batch = tuple[torch.Tensor, torch.Tensor]


class ImageFolderData(L.LightningDataModule):
    """Images ``(3, size, size)``, float32, normalised, and their classes.

    Args:
        root: Holds ``train/<class>/*.JPEG`` and ``val/<class>/*.JPEG``. None takes :mod:`photographs` instead.
        batch_size: Images in a step.
        workers: Processes that read images.
        train_size: Side of the random crops for training.
        val_size: Side of the centre crops for validation.
        val_resize: Shorter side of the images that those are cut from.
        interpolation: Of every resizing.
        auto_augment: Policy of random changes to colours and geometry: TrivialAugmentWide, RandAugment, AugMix, or AutoAugment's for ImageNet.
        random_erasing: Probability of erasing a rectangle of a training image.
        mixup_alpha: Strength of MixUp, 0 for none. With CutMix as well, each batch takes one of them by chance.
        cutmix_alpha: Strength of CutMix, 0 for none.
        channels_last: Keep images, and with LightningCLI the model too, in the layout that tensor cores work on fastest.
        cache: Where the folder of photographs is made.
    """

    def __init__(
        self,
        root: Path | None = None,
        *,
        batch_size: int = 256,
        workers: int = 8,
        train_size: int = 224,
        val_size: int = 224,
        val_resize: int = 256,
        interpolation: Literal["bilinear", "bicubic"] = "bilinear",
        auto_augment: Literal["ta_wide", "ra", "augmix", "imagenet"] | None = None,
        random_erasing: float = 0.0,
        mixup_alpha: float = 0.0,
        cutmix_alpha: float = 0.0,
        channels_last: bool = False,
        cache: Path = Path(__file__).parent / "output",
    ) -> None:
        super().__init__()
        self.embedded = root is None
        self.root = Path(cache) / "photographs" if root is None else Path(root)
        self.batch_size = batch_size
        self.workers = workers
        self.train_size = train_size
        self.val_size = val_size
        self.val_resize = val_resize
        self.interpolation = v2.InterpolationMode(interpolation)
        self.auto_augment = auto_augment
        self.random_erasing = random_erasing
        self.mixup_alpha = mixup_alpha
        self.cutmix_alpha = cutmix_alpha
        self.layout = torch.channels_last if channels_last else torch.contiguous_format

    @cached_property
    def num_classes(self) -> int:
        """Folders of classes; known before anything is read, since the model needs it."""
        if self.embedded:
            return len(photographs.PHOTOGRAPHS)
        folder = self.root / "train"
        classes = sum(entry.is_dir() for entry in folder.iterdir()) if folder.is_dir() else 0
        if classes < 2:
            raise ValueError(
                f"data.root {str(self.root)!r} holds {classes} classes: expected train/<class>/*.JPEG and val/<class>/*.JPEG in it, for two "
                "classes or more"
            )
        return classes

    def prepare_data(self) -> None:  # noqa: D102
        if self.embedded:
            photographs.build(self.root)

    def setup(self, stage: str) -> None:  # noqa: D102
        self.train = ImageFolder(self.root / "train", self._train_transform())
        self.val = ImageFolder(self.root / "val", self._val_transform())
        if self.train.classes != self.val.classes:
            odd = sorted(set(self.train.classes) ^ set(self.val.classes))
            raise ValueError(
                f"train and val of {self.root} must have the same classes, but {len(odd)} are in one only: {', '.join(odd[:5])}"
            )

    def train_dataloader(self) -> DataLoader[Batch]:  # noqa: D102
        mixes = [
            mix(alpha=alpha, num_classes=self.num_classes)
            for mix, alpha in ((v2.MixUp, self.mixup_alpha), (v2.CutMix, self.cutmix_alpha))
            if alpha
        ]
        collate = partial(_collate_and_mix, v2.RandomChoice(mixes)) if mixes else None
        return self._loader(self.train, shuffle=True, drop_last=True, collate_fn=collate)

    def val_dataloader(self) -> DataLoader[Batch]:  # noqa: D102
        return self._loader(self.val)

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Lay the images out here: in the model's forward both copies would live through the step."""
        images, classes = batch
        return images.contiguous(memory_format=self.layout), classes

    def _loader(self, images: ImageFolder, **options: Any) -> DataLoader[Batch]:
        return DataLoader(
            images,
            self.batch_size,
            num_workers=self.workers,
            persistent_workers=self.workers > 0,
            pin_memory=torch.cuda.is_available(),
            **options,
        )

    def _train_transform(self) -> v2.Compose:
        steps = [
            v2.RandomResizedCrop(self.train_size, interpolation=self.interpolation, antialias=True),
            v2.RandomHorizontalFlip(),
        ]
        if self.auto_augment:
            steps.append(AUTO_AUGMENT[self.auto_augment](interpolation=self.interpolation))
        steps += _to_tensor()
        if self.random_erasing:
            steps.append(v2.RandomErasing(self.random_erasing))
        return v2.Compose(steps)

    def _val_transform(self) -> v2.Compose:
        resize = v2.Resize(self.val_resize, interpolation=self.interpolation, antialias=True)
        return v2.Compose([resize, v2.CenterCrop(self.val_size), *_to_tensor()])


def _to_tensor() -> list[v2.Transform]:
    return [v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]


def _collate_and_mix(mix: v2.Transform, samples: list[Any]) -> Batch:
    """A batch whose classes are shares ``(batch, num_classes)``."""
    return mix(*default_collate(samples))
