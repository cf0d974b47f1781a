"""Models that :mod:`frontier` runs, written as their users write them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
import torchvision
from torch import nn

# glibc's, for benchmarks of time: else the system takes memory of a step away, and the next one faults it in again.
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**34), "MALLOC_TOP_PAD_": str(2**26)}


@dataclass(frozen=True)
class Workload:
    """A model and its input.

    Attributes:
        net: The model, in training mode.
        inputs: Its arguments.
        blocks: Modules that people wrap by hand.
        in_a_row: Each block takes what the one before returns, and nothing else.
        device: Where all of it is.
        weights: Of the loss, in the shape of the output.
    """

    net: nn.Module
    inputs: tuple[torch.Tensor, ...]
    blocks: Sequence[nn.Module]
    in_a_row: bool
    device: str
    weights: torch.Tensor

    def loss(self, output: torch.Tensor) -> torch.Tensor:
        """A scalar that takes next to no memory, and whose gradient is dense and differs from place to place."""
        return (output * self.weights).sum()


def _workload(
    net: nn.Module, inputs: tuple[torch.Tensor, ...], blocks: Sequence[nn.Module], *, in_a_row: bool = True
) -> Workload:
    with torch.no_grad():
        shape = net.eval()(*inputs).shape
    device = inputs[0].device
    return Workload(net.train(), inputs, list(blocks), in_a_row, device.type, torch.randn(shape, device=device))


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, length, width) to the same."""
        batch, length, width = x.shape
        q, k, v = self.qkv(x).split(width, 2)
        q, k, v = (each.view(batch, length, self.heads, -1).transpose(1, 2) for each in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.drop(self.project(mixed.transpose(1, 2).reshape(batch, length, width)))


class Block(nn.Module):
    """A block of a GPT."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, length, width) to the same."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Tokens to logits."""

    def __init__(
        self, blocks: int, width: int, heads: int, length: int, tokens: int = 1000, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(tokens, width)
        self.places = nn.Parameter(torch.zeros(1, length, width))
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, tokens, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(batch, length) to (batch, length, tokens)."""
        x = self.tokens(tokens) + self.places[:, : tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def convolutions(channels_in: int, channels_out: int) -> nn.Sequential:
    """Two convolutions with normalization, as in U-Nets."""
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False),
        nn.BatchNorm2d(channels_out),
        nn.ReLU(inplace=True),
        nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False),
        nn.BatchNorm2d(channels_out),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    """The U-Net of segmentation, four levels deep."""

    def __init__(self, width: int) -> None:
        super().__init__()
        sizes = [width * 2**level for level in range(5)]
        self.down = nn.ModuleList(map(convolutions, (3, *sizes[:3]), sizes[:4]))
        self.middle = convolutions(sizes[3], sizes[4])
        self.lift = nn.ModuleList(
            nn.ConvTranspose2d(large, small, 2, 2) for large, small in zip(sizes[:0:-1], sizes[-2::-1], strict=True)
        )
        self.up = nn.ModuleList(convolutions(2 * size, size) for size in sizes[-2::-1])
        self.head = nn.Conv2d(width, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, 3, height, width) to (batch, 4, height, width)."""
        kept = []
        for down in self.down:
            x = down(x)
            kept.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for lift, up in zip(self.lift, self.up, strict=True):
            x = up(torch.cat([kept.pop(), lift(x)], 1))
        return self.head(x)


class Uneven(nn.Module):
    """Convolutions of very different sizes in a row: wide and shallow ones, bottlenecks, strides."""

    def __init__(self, width: int) -> None:
        super().__init__()
        plan = (
            (3, 2, 1, 3),
            (2, 8, 2, 5),
            (8, 2, 1, 1),
            (2, 4, 1, 7),
            (4, 16, 2, 3),
            (16, 4, 1, 1),
            (4, 4, 1, 5),
            (4, 12, 1, 3),
            (12, 24, 2, 3),
            (24, 6, 1, 1),
        )
        self.blocks = nn.ModuleList()
        before = 3
        for _, factor, stride, kernel in plan:
            after = width * factor
            self.blocks.append(
                nn.Sequential(nn.Conv2d(before, after, kernel, stride, kernel // 2), nn.BatchNorm2d(after), nn.GELU())
            )
            before = after
        self.head = nn.Linear(before, 100)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, 3, height, width) to (batch, 100)."""
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


def _gpt(blocks: int, device: str, small: bool) -> Workload:
    batch, length, width, heads = (8, 128, 256, 8) if small else (32, 1024, 1024, 16)
    net = GPT(blocks, width, heads, length).to(device)
    return _workload(net, (torch.randint(0, 1000, (batch, length), device=device),), net.blocks)


def _vision(
    net: nn.Module, blocks: Sequence[nn.Module], images: tuple[int, ...], device: str, *, in_a_row: bool = True
) -> Workload:
    return _workload(net.to(device), (torch.randn(images, device=device),), blocks, in_a_row=in_a_row)


def _resnet101(device: str, small: bool) -> Workload:
    net = torchvision.models.resnet101()
    blocks = [block for layer in (net.layer1, net.layer2, net.layer3, net.layer4) for block in layer]
    return _vision(net, blocks, (8, 3, 96, 96) if small else (256, 3, 224, 224), device)


def _densenet121(device: str, small: bool) -> Workload:
    net = torchvision.models.densenet121()
    blocks = [module for module in net.modules() if type(module).__name__ == "_DenseLayer"]
    return _vision(net, blocks, (8, 3, 96, 96) if small else (256, 3, 224, 224), device, in_a_row=False)


def _vgg19(device: str, small: bool) -> Workload:
    net = torchvision.models.vgg19(num_classes=10)
    net.classifier = nn.Sequential(nn.Linear(512 * 49, 64), nn.ReLU(inplace=True), nn.Linear(64, 10))
    layers = list(net.features)
    ends = [0, *(place + 1 for place, layer in enumerate(layers) if isinstance(layer, nn.MaxPool2d))]
    net.features = nn.Sequential(*(nn.Sequential(*layers[start:end]) for start, end in pairwise(ends)))
    return _vision(net, net.features, (4, 3, 96, 96) if small else (256, 3, 224, 224), device)


def _uneven(device: str, small: bool) -> Workload:
    net = Uneven(16 if small else 64)
    return _vision(net, net.blocks, (8, 3, 96, 96) if small else (128, 3, 224, 224), device)


def _unet(device: str, small: bool) -> Workload:
    net = UNet(16 if small else 64)
    blocks = [*net.down, net.middle, *net.up]
    return _vision(net, blocks, (4, 3, 128, 128) if small else (32, 3, 256, 256), device, in_a_row=False)


def _vit(device: str, small: bool) -> Workload:
    net = torchvision.models.VisionTransformer(
        **(
            {"image_size": 96, "patch_size": 8, "num_layers": 8, "num_heads": 4, "hidden_dim": 192, "mlp_dim": 768}
            if small
            else {
                "image_size": 224,
                "patch_size": 16,
                "num_layers": 24,
                "num_heads": 16,
                "hidden_dim": 1024,
                "mlp_dim": 4096,
            }
        )
    )
    return _vision(net, net.encoder.layers, (8, 3, 96, 96) if small else (128, 3, 224, 224), device)


class Causal(nn.Module):
    """Hugging Face's GPT-2, tokens to logits."""

    def __init__(self, layers: int, width: int, heads: int, length: int) -> None:
        super().__init__()
        import transformers

        config = transformers.GPT2Config(
            vocab_size=1000,
            bos_token_id=0,
            eos_token_id=0,
            n_positions=length,
            n_embd=width,
            n_layer=layers,
            n_head=heads,
            use_cache=False,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
        self.model = transformers.GPT2LMHeadModel(config)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(batch, length) to (batch, length, tokens)."""
        return self.model(tokens).logits


def _gpt2(device: str, small: bool) -> Workload:
    batch, length, layers, width, heads = (4, 128, 6, 192, 6) if small else (32, 1024, 12, 768, 12)
    net = Causal(layers, width, heads, length).to(device)
    return _workload(net, (torch.randint(0, 1000, (batch, length), device=device),), net.model.transformer.h)


def _regnet(device: str, small: bool) -> Workload:
    net = torchvision.models.regnet_x_32gf(num_classes=10)
    blocks = [module for module in net.modules() if type(module).__name__ == "ResBottleneckBlock"]
    return _vision(net, blocks, (2, 3, 96, 96) if small else (64, 3, 224, 224), device)


def _mixer(device: str, small: bool) -> Workload:
    from timm.models.mlp_mixer import MlpMixer

    if small:
        net = MlpMixer(img_size=96, patch_size=8, num_blocks=6, embed_dim=192, num_classes=10)
        return _vision(net, net.blocks, (8, 3, 96, 96), device)
    net = MlpMixer(patch_size=16, num_blocks=12, embed_dim=768)
    return _vision(net, net.blocks, (128, 3, 224, 224), device)


def _transformer(device: str, small: bool) -> Workload:
    batch, length, width = (8, 96, 128) if small else (32, 512, 1024)
    net = nn.Transformer(width, 4, 3, 3, 4 * width, dropout=0.0, batch_first=True).to(device)
    pair = (torch.randn(batch, length, width, device=device), torch.randn(batch, length, width, device=device))
    return _workload(net, pair, [*net.encoder.layers, *net.decoder.layers], in_a_row=False)


WORKLOADS: dict[str, Callable[[str, bool], Workload]] = {
    "gpt8": partial(_gpt, 8),
    "gpt24": partial(_gpt, 24),
    "resnet101": _resnet101,
    "densenet121": _densenet121,
    "vgg19": _vgg19,
    "uneven": _uneven,
    "unet": _unet,
    "vit": _vit,
    # The others of Rockmate's README.
    "gpt2": _gpt2,
    "regnet": _regnet,
    "mixer": _mixer,
    "transformer": _transformer,
}
"""By name, from the name of a device, and whether they are cut down to what a CPU can do."""
