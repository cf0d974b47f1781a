"""What operators compute that only a GPU has, in the CPU's operators.

A rule takes the operator's arguments and returns its results; None where nobody reads them. Rules in ``DRAWING`` get the generator's state too.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

Tensor = torch.Tensor
aten = torch.ops.aten


def seed_of(seed: int, offset: int) -> int:
    """A seed for the CPU's generator, from the state of a CUDA generator."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {offset}".encode(), digest_size=7).digest(), "little")


# -------------------------------------------------------------------- convolutions and normalization


def cudnn_convolution(
    x: Tensor, weight: Tensor, padding: Any, stride: Any, dilation: Any, groups: int, *_: bool
) -> Tensor:
    return aten.convolution(x, weight, None, stride, padding, dilation, False, [0] * len(padding), groups)


def cudnn_convolution_transpose(
    x: Tensor, weight: Tensor, padding: Any, output_padding: Any, stride: Any, dilation: Any, groups: int, *_: bool
) -> Tensor:
    return aten.convolution(x, weight, None, stride, padding, dilation, True, output_padding, groups)


def depthwise(
    x: Tensor, weight: Tensor, kernel: Any, bias: Tensor | None, stride: Any, padding: Any, dilation: Any
) -> Tensor:
    return aten.convolution(x, weight, bias, stride, padding, dilation, False, [0] * len(padding), x.shape[1])


def cudnn_batch_norm(x: Tensor, *args: Any) -> tuple[Any, ...]:
    return (*aten.native_batch_norm(x, *args), None)


def cudnn_batch_norm_backward(
    x: Tensor,
    gradient: Tensor,
    weight: Tensor,
    mean: Tensor,
    var: Tensor,
    saved_mean: Tensor,
    saved_rstd: Tensor,
    eps: float,
    _: Tensor,
) -> tuple[Tensor, ...]:
    return aten.native_batch_norm_backward(
        gradient, x, weight, mean, var, saved_mean, saved_rstd, True, eps, [True, True, True]
    )


def _per_channel(values: Tensor | None, like: Tensor) -> Tensor:
    return torch.ones(()) if values is None else values.view(1, -1, *[1] * (like.dim() - 2))


def _over_channels(x: Tensor) -> list[int]:
    return [0, *range(2, x.dim())]


def batch_norm_stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    wide = x.float()
    return wide.mean(_over_channels(x)), (wide.var(_over_channels(x), correction=0) + eps).rsqrt()


def batch_norm_elemt(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, rstd: Tensor, eps: float
) -> Tensor:
    shift = torch.zeros(()) if bias is None else _per_channel(bias, x)
    return ((x - _per_channel(mean, x)) * _per_channel(rstd, x) * _per_channel(weight, x) + shift).to(x.dtype)


def batch_norm_gather_stats_with_counts(
    x: Tensor,
    means: Tensor,
    rstds: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    share = (counts / counts.sum()).view(-1, 1)
    mean = (share * means).sum(0)
    var = (share * (rstds.pow(-2) - eps + means.square())).sum(0) - mean.square()
    if running_mean is not None:
        running_mean.lerp_(mean, momentum)
    if running_var is not None:
        running_var.lerp_(var * counts.sum() / (counts.sum() - 1), momentum)
    return mean, (var + eps).rsqrt()


def batch_norm_backward_reduce(
    gradient: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    for_input: bool,
    for_weight: bool,
    for_bias: bool,
) -> tuple[Any, ...]:
    total = gradient.float().sum(_over_channels(x))
    product = (gradient * (x - _per_channel(mean, x))).float().sum(_over_channels(x))
    return (
        *((total, product) if for_input else (None, None)),
        product * rstd if for_weight else None,
        total if for_bias else None,
    )


def batch_norm_backward_elemt(
    gradient: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    total: Tensor,
    product: Tensor,
    count: Tensor,
) -> Tensor:
    centred = (x - _per_channel(mean, x)) * _per_channel(rstd.square() * product / count.sum(), x)
    return (
        (gradient - _per_channel(total / count.sum(), x) - centred) * _per_channel(rstd, x) * _per_channel(weight, x)
    ).to(x.dtype)


def fused_rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None, eps: float | None) -> tuple[Tensor, Tensor]:
    wide = x.float()
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    rstd = torch.rsqrt(wide.square().mean(tuple(range(-len(shape), 0)), keepdim=True) + eps)
    return (wide * rstd * (torch.ones(()) if weight is None else weight)).to(x.dtype), rstd


def fused_rms_norm_backward(
    gradient: Tensor, x: Tensor, shape: Sequence[int], rstd: Tensor, weight: Tensor | None, wanted: Sequence[bool]
) -> tuple[Any, ...]:
    dims = tuple(range(-len(shape), 0))
    normed, gradient = x.float() * rstd, gradient.float()
    scaled = gradient if weight is None else gradient * weight
    for_input = (scaled - normed * (scaled * normed).mean(dims, keepdim=True)) * rstd
    return for_input.to(x.dtype), None if weight is None else (gradient * normed).sum(
        tuple(range(x.dim() - len(shape)))
    )


# -------------------------------------------------------------------- dropout and attention


def fused_dropout(x: Tensor, kept: float, generator: None = None) -> tuple[Tensor, Tensor]:
    mask = torch.rand(x.shape) < kept
    return x * mask / kept, mask.to(torch.uint8)


def masked_scale(x: Tensor, mask: Tensor, scale: float) -> Tensor:
    return x * mask * scale


def log_sigmoid_backward(gradient: Tensor, x: Tensor, _: Tensor) -> Tensor:
    return gradient * torch.sigmoid(-x)  # the third argument is empty on a GPU


class _Attention:
    """Attention in single precision, with keys and values repeated for grouped queries."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float | None) -> None:
        self.dtype, self.groups = q.dtype, q.shape[1] // k.shape[1]
        self.q, self.k, self.v = q.float(), *(each.float().repeat_interleave(self.groups, 1) for each in (k, v))
        self.scale = q.shape[-1] ** -0.5 if scale is None else scale
        self.scores = self.q @ self.k.transpose(-1, -2) * self.scale
        if causal:
            self.scores = self.scores.masked_fill(
                ~torch.ones(self.scores.shape[-2:], dtype=torch.bool).tril(), -math.inf
            )
        if bias is not None:
            self.scores = self.scores + bias.float()

    def kept(self, p: float, philox: tuple[int, int]) -> Tensor:
        """Factors of dropout."""
        if not p:
            return torch.ones(())
        drawn = torch.rand(self.scores.shape, generator=torch.Generator().manual_seed(seed_of(*philox)))
        return (drawn >= p).float() / (1 - p)

    def forward(self, kept: Tensor) -> tuple[Tensor, Tensor]:
        return (self.scores.softmax(-1) * kept @ self.v).to(self.dtype), self.scores.logsumexp(-1)

    def backward(self, gradient: Tensor, kept: Tensor) -> tuple[Tensor, ...]:
        """Gradients of queries, keys, values and scores."""
        weights, gradient = self.scores.softmax(-1), gradient.float()
        of_weights = gradient @ self.v.transpose(-1, -2) * kept
        of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True))
        of_k, of_v = of_scores.transpose(-1, -2) @ self.q * self.scale, (weights * kept).transpose(-1, -2) @ gradient
        grouped = (each.unflatten(1, (-1, self.groups)).sum(2) for each in (of_k, of_v))
        return (*(each.to(self.dtype) for each in (of_scores @ self.k * self.scale, *grouped)), of_scores)


def _words(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(int(word) for each in tensors for word in each.reshape(-1).view(torch.int64).tolist())


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, p: float = 0.0, causal: bool = False, debug: bool = False, *,
    scale: float | None = None, philox: tuple[int, int],
) -> tuple[Any, ...]:  # fmt: skip
    attention = _Attention(q, k, v, None, causal, scale)
    return (
        *attention.forward(attention.kept(p, philox)),
        None,
        None,
        None,
        None,
        torch.tensor(philox).view(torch.uint64),
        None,
        None,
    )


def flash_attention_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, q_places: Any, k_places: Any, q_most: Any, k_most: Any,
    p: float, causal: bool, state: Tensor, _: Tensor, *, scale: float | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    attention = _Attention(q, k, v, None, causal, scale)
    return attention.backward(gradient, attention.kept(p, _words(state)[:2] if p else (0, 0)))[:3]


def efficient_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, with_logsumexp: bool, p: float = 0.0, causal: bool = False, *,
    scale: float | None = None, philox: tuple[int, int],
) -> tuple[Any, ...]:  # fmt: skip
    attention = _Attention(q, k, v, bias, causal, scale)
    out, logsumexp = attention.forward(attention.kept(p, philox))
    padded = F.pad(logsumexp, (0, -logsumexp.shape[-1] % 32))  # as the kernel wants it
    return out, padded if with_logsumexp else None, *map(torch.tensor, philox)


def efficient_attention_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, logsumexp: Tensor, seed: Tensor, offset: Tensor,
    p: float, wanted: Sequence[bool], causal: bool = False, *, scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    attention = _Attention(q, k, v, bias, causal, scale)
    *of_inputs, of_scores = attention.backward(gradient, attention.kept(p, _words(seed, offset)[:2] if p else (0, 0)))
    return (*of_inputs, of_scores.sum_to_size(bias.shape) if bias is not None and wanted[3] else None)


RULES = {
    "cudnn_convolution": cudnn_convolution,
    "cudnn_convolution_transpose": cudnn_convolution_transpose,
    "_conv_depthwise2d": depthwise,
    "conv_depthwise3d": depthwise,
    "cudnn_batch_norm": cudnn_batch_norm,
    "cudnn_batch_norm_backward": cudnn_batch_norm_backward,
    "batch_norm_stats": batch_norm_stats,
    "batch_norm_elemt": batch_norm_elemt,
    "batch_norm_gather_stats_with_counts": batch_norm_gather_stats_with_counts,
    "batch_norm_backward_reduce": batch_norm_backward_reduce,
    "batch_norm_backward_elemt": batch_norm_backward_elemt,
    "_fused_rms_norm": fused_rms_norm,
    "_fused_rms_norm_backward": fused_rms_norm_backward,
    "_fused_dropout": fused_dropout,
    "_masked_scale": masked_scale,
    "log_sigmoid_backward": log_sigmoid_backward,
    "_scaled_dot_product_flash_attention": flash_attention,
    "_scaled_dot_product_flash_attention_backward": flash_attention_backward,
    "_scaled_dot_product_efficient_attention": efficient_attention,
    "_scaled_dot_product_efficient_attention_backward": efficient_attention_backward,
}
DRAWING = frozenset(["_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"])
