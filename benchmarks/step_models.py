"""Training steps that call several modules, or one several times: models for benchmarks/steps.py and the tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import lightning.pytorch as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn


def convolutions(*widths: int) -> nn.Sequential:
    """Blocks of convolution, BatchNorm and activation."""
    return nn.Sequential(*(layer for pair in pairwise(widths) for layer in _block(*pair)))


def _block(narrow: int, wide: int) -> list[nn.Module]:
    return [nn.Conv2d(narrow, wide, 3, padding=1), nn.BatchNorm2d(wide), nn.GELU()]


class Task(L.LightningModule):
    """Trains with momentum, and remembers its losses."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []

    def loss(self, *batch: Tensor) -> Tensor:
        """The loss of a batch."""
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """One step of automatic optimization."""
        loss = self.loss(*batch)
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> Any:
        """Plain gradient descent with momentum."""
        return torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9)


class Towers(Task):
    """Pictures and sentences in one space, as CLIP learns it."""

    def __init__(self) -> None:
        super().__init__()
        self.image = convolutions(3, 24, 24, 24, 24, 24)
        self.words = nn.Embedding(100, 64)
        layers = [nn.TransformerEncoderLayer(64, 4, 128, 0.1, batch_first=True) for _ in range(4)]
        self.text = nn.Sequential(*layers)
        self.heads = nn.ModuleList([nn.Linear(24, 32), nn.Linear(64, 32)])

    def loss(self, images: Tensor, tokens: Tensor) -> Tensor:
        """Each picture to its own sentence."""
        seen = self.heads[0](self.image(images).mean((2, 3)))
        read = self.heads[1](self.text(self.words(tokens)).mean(1))
        return F.cross_entropy(seen @ read.T, torch.arange(len(seen), device=seen.device))

    @staticmethod
    def batch() -> tuple[Tensor, ...]:
        """Pictures and tokens."""
        return torch.randn(16, 3, 24, 24), torch.randint(0, 100, (16, 32))


class Gan(Task):
    """Two players by hand, each with an optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(convolutions(8, 16, 16, 16, 16), nn.Conv2d(16, 3, 1), nn.Tanh())
        self.judge = nn.Sequential(convolutions(3, 16, 16, 16, 16), nn.Flatten(), nn.Linear(16 * 24 * 24, 1))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """The judge's turn, then the generator's."""
        images, noise = batch
        generator, judge = self.optimizers()
        fake = self.generator(noise)
        self._step(judge, self.judge_loss(images, fake.detach()))
        self._step(generator, F.softplus(-self.judge(fake)).mean())

    def judge_loss(self, images: Tensor, fake: Tensor) -> Tensor:
        """What is real, and what is not."""
        return F.softplus(-self.judge(images)).mean() + F.softplus(self.judge(fake)).mean()

    def _step(self, optimizer: Any, loss: Tensor) -> None:
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.losses.append(loss.detach())

    def configure_optimizers(self) -> Any:
        """One for each player."""
        return [torch.optim.Adam(part.parameters(), lr=1e-3) for part in (self.generator, self.judge)]

    @staticmethod
    def batch() -> tuple[Tensor, ...]:
        """Pictures and noise."""
        return torch.randn(16, 3, 24, 24), torch.randn(16, 8, 24, 24)


class Penalized(Gan):
    """WGAN-GP: the judge's gradient is part of its loss, so its backward is differentiated."""

    def __init__(self) -> None:
        super().__init__()
        self.judge = nn.Sequential(
            *(layer for width in (3, 16, 16, 16) for layer in (nn.Conv2d(width, 16, 3, padding=1), nn.Softplus())),
            nn.Flatten(),
            nn.Linear(16 * 24 * 24, 1),
        )

    def judge_loss(self, images: Tensor, fake: Tensor) -> Tensor:
        """Difference of means, and a penalty for steepness in between."""
        between = (images + 0.5 * (fake - images)).requires_grad_()
        gradient = torch.autograd.grad(self.judge(between).sum(), between, create_graph=True)[0]
        penalty = (gradient.flatten(1).norm(dim=1) - 1).square().mean()
        return self.judge(fake).mean() - self.judge(images).mean() + 10 * penalty


class Vae(Task):
    """Encoder, noise, decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = convolutions(3, 24, 24, 24, 16), convolutions(8, 24, 24, 24, 3)

    def loss(self, images: Tensor) -> Tensor:
        """Reconstruction and divergence."""
        mean, log_variance = self.encoder(images).chunk(2, 1)
        latent = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).mean()
        return F.mse_loss(self.decoder(latent), images) + divergence

    @staticmethod
    def batch() -> tuple[Tensor, ...]:
        """Pictures."""
        return (torch.randn(16, 3, 24, 24),)


class SimClr(Task):
    """One module sees two views of each picture."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = convolutions(3, 24, 24, 24, 24)
        self.head = nn.Sequential(nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, 32))

    def loss(self, images: Tensor) -> Tensor:
        """Each view to the other view of its picture."""
        first, second = (F.normalize(self.head(self.backbone(view).mean((2, 3)))) for view in (images, images.flip(3)))
        return F.cross_entropy(first @ second.T / 0.1, torch.arange(len(first), device=first.device))

    batch = Vae.batch


class Captions(Task):
    """The same blocks run twice, once with a picture as context: https://github.com/pytorch/pytorch/issues/193193."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.pixels = nn.Embedding(100, 64), nn.Linear(48, 64)
        self.blocks = nn.Sequential(*(nn.TransformerEncoderLayer(64, 4, 128, 0.1, batch_first=True) for _ in range(4)))
        self.head = nn.Linear(64, 100)

    def loss(self, patches: Tensor, tokens: Tensor) -> Tensor:
        """The next word, without the picture and with it."""
        words = self.words(tokens)
        alone = self.head(self.blocks(words))
        seen = self.head(self.blocks(torch.cat([self.pixels(patches), words], 1))[:, patches.shape[1] :])
        wanted = tokens.roll(-1, 1).flatten()
        return sum((F.cross_entropy(found.flatten(0, 1), wanted) for found in (alone, seen)), torch.zeros(()))

    @staticmethod
    def batch() -> tuple[Tensor, ...]:
        """Patches and tokens."""
        return torch.randn(8, 36, 48), torch.randint(0, 100, (8, 24))


class Detector(Task):
    """torchvision's Faster R-CNN on few and small pictures, whose activations are half of all memory."""

    def __init__(self) -> None:
        from torchvision.models.detection import fasterrcnn_resnet50_fpn

        super().__init__()
        sizes = {"min_size": 256, "max_size": 256, "rpn_pre_nms_top_n_train": 50, "rpn_post_nms_top_n_train": 20}
        self.net = fasterrcnn_resnet50_fpn(
            weights=None, weights_backbone=None, num_classes=4, trainable_backbone_layers=5, **sizes
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The sum of its losses."""
        images, boxes = batch
        labels = torch.ones(1, dtype=torch.int64)
        losses = self.net(list(images), [{"boxes": box[None], "labels": labels} for box in boxes])
        loss = sum(losses.values(), torch.zeros(()))
        self.losses.append(loss.detach())
        return loss

    @staticmethod
    def batch() -> tuple[Tensor, ...]:
        """Pictures and a box in each."""
        return torch.rand(2, 3, 256, 256), torch.tensor([[20.0, 20.0, 160.0, 160.0], [50.0, 80.0, 210.0, 180.0]])


class Flow(Task):
    """torchvision's RAFT: one block refines the flow again and again."""

    def __init__(self) -> None:
        from torchvision.models.optical_flow import raft_small

        super().__init__()
        self.net = raft_small()

    def loss(self, first: Tensor, second: Tensor) -> Tensor:
        """All refinements towards no motion."""
        return torch.stack([flow.abs().mean() for flow in self.net(first, second, num_flow_updates=3)]).sum()

    @staticmethod
    def batch() -> tuple[Tensor, ...]:
        """Two pictures."""
        return torch.rand(1, 3, 128, 128), torch.rand(1, 3, 128, 128)


class UNet(nn.Module):
    """Two levels, with the text added at the bottom."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.bottom, self.up = convolutions(4, 24, 24), convolutions(24, 48, 48), convolutions(72, 24, 24)
        self.text, self.out = nn.Linear(64, 48), nn.Conv2d(24, 4, 1)

    def forward(self, images: Tensor, text: Tensor) -> Tensor:
        """Predict the noise."""
        high = self.down(images)
        low = self.bottom(F.max_pool2d(high, 2)) + self.text(text)[:, :, None, None]
        return self.out(self.up(torch.cat([F.interpolate(low, scale_factor=2.0), high], 1)))


class Diffusion(Task):
    """A U-Net that removes noise, told by a text encoder what to look for."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(100, 64)
        self.encoder = nn.Sequential(*(nn.TransformerEncoderLayer(64, 4, 128, 0.1, batch_first=True) for _ in range(3)))
        self.unet = UNet()

    def loss(self, images: Tensor, tokens: Tensor) -> Tensor:
        """The noise that was added."""
        noise = torch.randn_like(images)
        return F.mse_loss(self.unet(images + noise, self.encoder(self.words(tokens)).mean(1)), noise)

    @staticmethod
    def batch() -> tuple[Tensor, ...]:
        """Latents and tokens."""
        return torch.randn(8, 4, 24, 24), torch.randint(0, 100, (8, 24))


@dataclass(frozen=True, slots=True)
class Workload:
    """A model and its batch; ``module`` is what the user names, None for nothing."""

    model: Callable[[], Any]
    module: str | list[str] | None = None


WORKLOADS: dict[str, Workload] = {
    "two towers": Workload(Towers),
    "GAN by hand": Workload(Gan),
    "WGAN-GP": Workload(Penalized),
    "VAE": Workload(Vae),
    "SimCLR, one module twice": Workload(SimClr),
    "captions, blocks twice": Workload(Captions),
    "fasterrcnn_resnet50_fpn": Workload(Detector),
    "raft_small": Workload(Flow),
    "diffusion U-Net and text": Workload(Diffusion),
}
