"""Pictures and volumes: timm, segmentation-models-pytorch, monai, lightly, ultralytics, kornia, vit-pytorch."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.project_programs.program import STEPS, Run, Task, program


def pictures(size: int, *, batch: int = 4, classes: int = 5) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of pictures and their classes."""
    return [(torch.randn(batch, 3, size, size), torch.randint(classes, (batch,))) for _ in range(STEPS)]


class Classes(Task):
    """Classes of pictures."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Cross entropy."""
        images, classes = batch
        return F.cross_entropy(self.net(images), classes)


@program("timm")
def convnext(run: Run) -> None:
    """ConvNeXt with stochastic depth and mixed-up targets (timm's recipe)."""
    import timm
    from timm.data import Mixup
    from timm.loss import SoftTargetCrossEntropy

    class MixedUp(Task):
        def __init__(self, net: nn.Module) -> None:
            super().__init__(net)
            self.mixup = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, num_classes=5)
            self.loss = SoftTargetCrossEntropy()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            images, targets = self.mixup(*batch)
            return self.loss(self.net(images), targets)

    run.fit(MixedUp(timm.create_model("convnext_atto", num_classes=5, drop_path_rate=0.2)), pictures(64))


@program("timm")
def vit_averaged(run: Run) -> None:
    """A vision transformer with patch dropout, and its moving average (ModelEmaV3) after each step."""
    import timm
    from timm.utils import ModelEmaV3

    class Averaged(Classes):
        def __init__(self, net: nn.Module) -> None:
            super().__init__(net)
            self.average = ModelEmaV3(net, decay=0.99)

        def on_before_zero_grad(self, optimizer: Any) -> None:
            self.average.update(self.net)

    net = timm.create_model(
        "vit_tiny_patch16_224", num_classes=5, img_size=64, patch_size=8, depth=4, patch_drop_rate=0.25
    )
    run.fit(Averaged(net), pictures(64))


@program("segmentation-models-pytorch")
def unet_segmentation(run: Run) -> None:
    """Unet with a ResNet-18 encoder and DiceLoss (the package's Lightning example)."""
    import segmentation_models_pytorch as smp

    class Pets(Task):
        def __init__(self) -> None:
            super().__init__(smp.Unet("resnet18", encoder_weights=None, in_channels=3, classes=1))
            self.register_buffer("std", torch.tensor([0.229, 0.224, 0.225]).view(1, 3, 1, 1))
            self.register_buffer("mean", torch.tensor([0.485, 0.456, 0.406]).view(1, 3, 1, 1))
            self.loss = smp.losses.DiceLoss(smp.losses.BINARY_MODE, from_logits=True)
            self.seen: list[dict[str, torch.Tensor]] = []

        def forward(self, image: torch.Tensor) -> torch.Tensor:
            return self.net((image - self.mean) / self.std)

        def training_step(self, batch: Any, batch_idx: int) -> dict[str, torch.Tensor]:
            image, mask = batch
            assert image.shape[2] % 32 == 0
            assert mask.max() <= 1.0
            logits = self.forward(image)
            loss = self.loss(logits, mask)
            found = (logits.sigmoid() > 0.5).float()
            tp, fp, fn, tn = smp.metrics.get_stats(found.long(), mask.long(), mode="binary")
            output = {"loss": loss, "tp": tp, "fp": fp, "fn": fn, "tn": tn}
            self.seen.append({key: value.detach() for key, value in output.items()})
            return output

    batches = [(torch.rand(2, 3, 96, 96), torch.randint(2, (2, 1, 96, 96)).float()) for _ in range(STEPS)]
    run.fit(Pets(), batches)


@program("segmentation-models-pytorch")
def deeplab_segmentation(run: Run) -> None:
    """DeepLabV3+ with a MobileNet encoder and an auxiliary classifier."""
    import segmentation_models_pytorch as smp

    class Both(Task):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            images, masks, classes = batch
            found, labels = self.net(images)
            return F.cross_entropy(found, masks) + 0.1 * F.cross_entropy(labels, classes)

    net = smp.DeepLabV3Plus("mobilenet_v2", encoder_weights=None, classes=4, aux_params={"classes": 5, "dropout": 0.2})
    batches = [(torch.rand(4, 3, 96, 96), torch.randint(4, (4, 96, 96)), torch.randint(5, (4,))) for _ in range(STEPS)]
    run.fit(Both(net), batches)


def volumes() -> list[dict[str, torch.Tensor]]:
    """Batches of scans and their segments."""
    shape = (1, 1, 32, 32, 32)
    return [{"image": torch.randn(shape), "label": torch.randint(2, shape).float()} for _ in range(STEPS)]


class Organs(Task):
    """MONAI's segmentation tutorial in Lightning: DiceCELoss."""

    def __init__(self, net: nn.Module) -> None:
        from monai.losses import DiceCELoss

        super().__init__(net)
        self.loss_function = DiceCELoss(to_onehot_y=True, softmax=True)

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Loss of a scan."""
        return self.loss_function(self.net(batch["image"]), batch["label"])


@program("monai")
def unet_3d(run: Run) -> None:
    """MONAI's residual UNet on volumes (the spleen tutorial)."""
    from monai.networks.nets import UNet

    net = UNet(
        spatial_dims=3, in_channels=1, out_channels=2, channels=(8, 16, 32, 64), strides=(2, 2, 2), num_res_units=2
    )
    run.fit(Organs(net), volumes())


@program("monai")
def swin_unetr(run: Run) -> None:
    """MONAI's SwinUNETR on slices."""
    from monai.networks.nets import SwinUNETR

    slices = [
        {"image": torch.randn(2, 1, 64, 64), "label": torch.randint(2, (2, 1, 64, 64)).float()} for _ in range(STEPS)
    ]
    run.fit(Organs(SwinUNETR(in_channels=1, out_channels=2, feature_size=12, spatial_dims=2)), slices)


def small_backbone() -> nn.Module:
    """A ResNet-18 without its classifier."""
    import torchvision

    resnet = torchvision.models.resnet18()
    return nn.Sequential(*list(resnet.children())[:-1])


@program("lightly")
def simclr(run: Run) -> None:
    """SimCLR (lightly's Lightning example): two views, one backbone."""
    from lightly.loss import NTXentLoss
    from lightly.models.modules import SimCLRProjectionHead

    class SimCLR(Task):
        def __init__(self) -> None:
            super().__init__(small_backbone())
            self.projection_head = SimCLRProjectionHead(512, 128, 64)
            self.criterion = NTXentLoss()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.projection_head(self.net(x).flatten(start_dim=1))

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            x0, x1 = batch
            return self.criterion(self.forward(x0), self.forward(x1))

    run.fit(SimCLR(), [(torch.randn(8, 3, 32, 32), torch.randn(8, 3, 32, 32)) for _ in range(STEPS)])


@program("lightly")
def byol(run: Run) -> None:
    """BYOL (lightly's Lightning example): four calls, a momentum encoder that is updated in the step."""
    import copy

    from lightly.loss import NegativeCosineSimilarity
    from lightly.models.modules import BYOLPredictionHead, BYOLProjectionHead
    from lightly.models.utils import deactivate_requires_grad, update_momentum
    from lightly.utils.scheduler import cosine_schedule

    class BYOL(Task):
        def __init__(self) -> None:
            super().__init__(small_backbone())
            self.projection_head = BYOLProjectionHead(512, 128, 64)
            self.prediction_head = BYOLPredictionHead(64, 128, 64)
            self.backbone_momentum = copy.deepcopy(self.net)
            self.projection_head_momentum = copy.deepcopy(self.projection_head)
            deactivate_requires_grad(self.backbone_momentum)
            deactivate_requires_grad(self.projection_head_momentum)
            self.criterion = NegativeCosineSimilarity()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.prediction_head(self.projection_head(self.net(x).flatten(start_dim=1)))

        def forward_momentum(self, x: torch.Tensor) -> torch.Tensor:
            return self.projection_head_momentum(self.backbone_momentum(x).flatten(start_dim=1)).detach()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            momentum = cosine_schedule(self.current_epoch, 10, 0.996, 1)
            update_momentum(self.net, self.backbone_momentum, m=momentum)
            update_momentum(self.projection_head, self.projection_head_momentum, m=momentum)
            x0, x1 = batch
            p0, z0 = self.forward(x0), self.forward_momentum(x0)
            p1, z1 = self.forward(x1), self.forward_momentum(x1)
            return 0.5 * (self.criterion(p0, z1) + self.criterion(p1, z0))

    run.fit(BYOL(), [(torch.randn(8, 3, 32, 32), torch.randn(8, 3, 32, 32)) for _ in range(STEPS)])


@program("ultralytics")
def yolo(run: Run) -> None:
    """YOLO11n: the model's own forward takes a batch with boxes and returns its loss."""
    from ultralytics.cfg import get_cfg
    from ultralytics.nn.tasks import DetectionModel

    class Detection(Task):
        def __init__(self) -> None:
            net = DetectionModel("yolo11n.yaml", nc=4, verbose=False)
            net.args = get_cfg()
            super().__init__(net)

        def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
            loss, _ = self.net(batch)
            return loss.sum()

    batches: list[dict[str, torch.Tensor]] = []
    for number in range(STEPS):
        boxes = 3 + number % 3
        batches.append(
            {
                "img": torch.rand(2, 3, 96, 96),
                "batch_idx": torch.randint(2, (boxes,)).sort().values.float(),
                "cls": torch.randint(4, (boxes, 1)).float(),
                "bboxes": torch.rand(boxes, 4) * 0.4 + 0.3,
            }
        )
    run.fit(Detection(), batches)


@program("vit-pytorch")
def navit_packed(run: Run) -> None:
    """NaViT: pictures of different sizes are packed into sequences, and some patches dropped at random."""
    from vit_pytorch.na_vit import NaViT

    net = NaViT(
        image_size=64, patch_size=8, num_classes=5, dim=96, depth=3, heads=4, mlp_dim=192, token_dropout_prob=0.1
    )

    class Packed(Task):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            images, classes = batch
            return F.cross_entropy(self.net(images, group_images=True, group_max_seq_len=96), classes)

    sizes = [8 * (4 + number % 5) for number in range(STEPS + 6)]
    batches = [
        ([torch.randn(3, sizes[k + n], sizes[k]) for n in range(6)], torch.randint(5, (6,))) for k in range(STEPS)
    ]
    run.fit(Packed(net), batches)


@program("kornia")
def augmented_on_device(run: Run) -> None:
    """Random augmentations of kornia in front of a network, in the training step."""
    import kornia.augmentation as augmentation
    import torchvision

    class Augmented(Classes):
        def __init__(self) -> None:
            super().__init__(torchvision.models.mobilenet_v3_small(num_classes=5))
            self.augment = nn.Sequential(
                augmentation.RandomHorizontalFlip(p=0.5),
                augmentation.RandomAffine(15.0, p=0.7),
                augmentation.ColorJitter(0.2, 0.2, 0.2, 0.1, p=0.8),
            )

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            images, classes = batch
            return F.cross_entropy(self.net(self.augment(images.sigmoid())), classes)

    run.fit(Augmented(), pictures(96, batch=8))


@program("open_clip_torch")
def clip_two_towers(run: Run) -> None:
    """CLIP of open_clip: a tower for pictures, one for text, and the contrastive loss of both."""
    import open_clip

    class Contrast(Task):
        def __init__(self) -> None:
            vision = {"image_size": 32, "layers": 3, "width": 64, "patch_size": 8, "head_width": 16}
            text = {"context_length": 24, "vocab_size": 100, "width": 64, "heads": 4, "layers": 3}
            super().__init__(open_clip.CLIP(embed_dim=32, vision_cfg=vision, text_cfg=text))
            self.loss = open_clip.ClipLoss()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            images, texts = batch
            image_features, text_features, scale = self.net(images, texts)
            return self.loss(image_features, text_features, scale)

    run.fit(Contrast(), [(torch.randn(16, 3, 32, 32), torch.randint(1, 100, (16, 24))) for _ in range(STEPS)])


@program("pytorch-metric-learning")
def mined_triplets(run: Run) -> None:
    """Triplet loss of pytorch-metric-learning on pairs that a miner finds in the step."""
    from pytorch_metric_learning.losses import TripletMarginLoss
    from pytorch_metric_learning.miners import MultiSimilarityMiner

    class Metric(Task):
        def __init__(self) -> None:
            super().__init__(small_backbone())
            self.miner, self.loss = MultiSimilarityMiner(), TripletMarginLoss()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            images, classes = batch
            found = self.net(images).flatten(1)
            return self.loss(found, classes, self.miner(found, classes))

    run.fit(Metric(), pictures(48, batch=12))
