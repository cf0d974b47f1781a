"""Operations that look like one though they are Python code that does several: recordings go through them, with the module's bits."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchvision
from test_graph_cuts import check, step
from torch import nn
from torch.utils._pytree import tree_leaves

from lightning_rotor import Checkpointable, sequentialize
from lightning_rotor.capture.graph_cut import GraphCut, cut_graph
from lightning_rotor.execution.segment import recomputed
from lightning_rotor.profiling.same_results import require_same
from tests.grids import grid

# torch says so of a mask of booleans next to one of numbers, without a plan as well.
pytestmark = pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask")

BATCH, LENGTH, MEMORY, WIDTH, HEADS = 2, 5, 7, 8, 2


def operations(cut: GraphCut) -> list[str]:
    targets = [target for stage in cut.stages for piece in stage.modules for target in piece.operators]
    return [
        type(target).__name__ if isinstance(target, nn.Module) else getattr(target, "__name__", str(target))
        for target in targets
    ]


class Attending(nn.Module):
    """Attention between two projections."""

    def __init__(self, *, need_weights: bool = False, is_causal: bool = False, average: bool = True, **options: Any):
        super().__init__()
        torch.manual_seed(0)
        self.before = nn.Linear(WIDTH, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, **options)
        self.after = nn.Linear(WIDTH, WIDTH)
        self.options = {"need_weights": need_weights, "is_causal": is_causal, "average_attn_weights": average}

    def forward(
        self,
        x: torch.Tensor,
        key: torch.Tensor | None = None,
        value: torch.Tensor | None = None,
        attn_mask: torch.Tensor | None = None,
        key_padding_mask: torch.Tensor | None = None,
    ) -> Any:
        x = self.before(x)
        key = x if key is None else key
        value = key if value is None else value
        given, weights = self.attention(
            x, key, value, attn_mask=attn_mask, key_padding_mask=key_padding_mask, **self.options
        )
        return self.after(given), weights


def masks(rows: int, columns: int) -> dict[str, torch.Tensor]:
    allowed = torch.rand(BATCH * HEADS, rows, columns) > 0.3
    allowed[..., 0] = True
    return {
        "float 2-D": torch.randn(rows, columns),
        "bool 2-D": ~allowed[0],
        "float 3-D": torch.randn(BATCH * HEADS, rows, columns),
        "bool 3-D": ~allowed,
    }


def same_as_one_operation(net: Attending, **inputs: torch.Tensor | None) -> GraphCut:
    """Output, gradients and generator of the stages, each recomputed by itself, are those of the module to the bit."""
    state = {key: value.clone() for key, value in net.state_dict().items()}
    expected, _ = step(net, net, (), inputs, state)
    cut = cut_graph(net, (), inputs)
    assert "MultiheadAttention" not in operations(cut)
    require_same(net, cut, (), inputs)

    def staged(**inputs: Any) -> Any:
        values = dict(enumerate(leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor)))
        for stage in cut.stages:
            given = tuple(values[number] for number in stage.reads)
            made = recomputed(stage, given[0] if len(given) == 1 else given, draws_random=True)
            values.update(zip(stage.writes, (made,) if len(stage.writes) == 1 else made, strict=True))
        return made

    received, _ = step(net, staged, (), inputs, state)
    assert len(received) == len(expected)
    assert all(map(torch.equal, received, expected))
    return cut


@pytest.mark.parametrize(
    ("need_weights", "batch_first", "mask", "padding"),
    grid(
        [False, True],
        [False, True],
        [None, "float 2-D", "bool 2-D", "float 3-D", "bool 3-D"],
        [None, torch.float32, torch.bool],
    ),
)
def test_masks(need_weights: bool, batch_first: bool, mask: str | None, padding: torch.dtype | None) -> None:
    net = Attending(need_weights=need_weights, batch_first=batch_first, dropout=0.2)
    x = torch.randn(BATCH, LENGTH, WIDTH) if batch_first else torch.randn(LENGTH, BATCH, WIDTH)
    ignored = torch.zeros(BATCH, LENGTH)
    ignored[0, -2:] = 1
    same_as_one_operation(
        net,
        x=x.requires_grad_(),
        attn_mask=None if mask is None else masks(LENGTH, LENGTH)[mask],
        key_padding_mask=None if padding is None else ignored.to(padding),
    )


OPTIONS: list[dict[str, Any]] = [
    {},
    {"bias": False},
    {"dropout": 0.3},
    {"add_bias_kv": True},
    {"add_zero_attn": True},
    {"add_bias_kv": True, "add_zero_attn": True},
    {"kdim": 6, "vdim": 6},
    {"kdim": 6, "vdim": 6, "add_bias_kv": True},
    {"kdim": 6, "vdim": 6, "bias": False},
    {"average": False},
]


@pytest.mark.parametrize(
    ("options", "need_weights", "batched"),
    [
        pytest.param(options, need_weights, batched, marks=[] if way == number % 4 else pytest.mark.wide)
        for number, options in enumerate(OPTIONS)
        for way, (need_weights, batched) in enumerate(product([False, True], [False, True]))
    ],
    ids=str,
)
def test_options_with_another_source(options: dict[str, Any], need_weights: bool, batched: bool) -> None:
    net = Attending(need_weights=need_weights, **options)
    source = options.get("kdim", WIDTH)
    shapes = [(LENGTH, WIDTH), (MEMORY, source), (MEMORY, source)]
    x, key, value = (
        torch.randn((shape[0], BATCH, shape[1]) if batched else shape, requires_grad=True) for shape in shapes
    )
    same_as_one_operation(net, x=x, key=key)
    same_as_one_operation(net, x=x, key=key, value=value)
    ignored = torch.zeros((BATCH, MEMORY) if batched else (MEMORY,), dtype=torch.bool)
    ignored[..., -1] = True
    same_as_one_operation(net, x=x, key=key, key_padding_mask=ignored)


@pytest.mark.parametrize("need_weights", [False, True])
def test_a_causal_mask(need_weights: bool) -> None:
    net = Attending(need_weights=need_weights, is_causal=True, batch_first=True)
    mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
    same_as_one_operation(net, x=torch.randn(BATCH, LENGTH, WIDTH), attn_mask=mask)


def test_a_graph_through_attention_holds_for_other_sizes_and_not_for_other_dimensions() -> None:
    net = Attending(batch_first=True)
    mask = masks(LENGTH, LENGTH)["bool 2-D"]
    cut = cut_graph(net, (torch.randn(BATCH, LENGTH, WIDTH),), {"attn_mask": mask})
    larger = (torch.randn(4, 6, WIDTH),), {"attn_mask": masks(6, 6)["bool 2-D"]}
    assert cut_graph(net, *larger, known=[cut]) is cut
    for batch, length in itertools.product((1, 3), (4, 9)):
        args, kwargs = (torch.randn(batch, length, WIDTH),), {"attn_mask": masks(length, length)["bool 2-D"]}
        assert cut.bind(args, kwargs) is not None
        require_same(net, cut, args, kwargs)
    assert cut.bind((torch.randn(LENGTH, WIDTH),), {"attn_mask": mask}) is None
    assert cut.bind((torch.randn(BATCH, LENGTH, WIDTH),), {"attn_mask": mask.float()}) is None


def test_attention_with_hooks_or_in_evaluation_stays_one_operation() -> None:
    x = torch.randn(BATCH, LENGTH, WIDTH)
    seen: list[int] = []
    for hooked in ("attention", "attention.out_proj"):
        net = Attending(batch_first=True)
        net.get_submodule(hooked).register_forward_hook(lambda *_: seen.append(1))
        assert "MultiheadAttention" in operations(cut_graph(net, (x,)))
    net = Attending(batch_first=True)
    net.attention.eval()
    assert "MultiheadAttention" in operations(cut_graph(net, (x,)))


def test_attention_under_autocast() -> None:
    net, x = Attending(batch_first=True, dropout=0.1), torch.randn(BATCH, LENGTH, WIDTH)
    with torch.autocast("cpu", torch.bfloat16):
        same_as_one_operation(net, x=x, attn_mask=masks(LENGTH, LENGTH)["bool 2-D"])


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.gumbel_softmax(x, hard=True),
        lambda x: F.local_response_norm(x[None, :, :, None], 3).flatten(0, 2)[:, 0].view(x.shape),
        F.normalize,
        F.softsign,
        F.tanhshrink,
    ],
    ids=["gumbel_softmax", "local_response_norm", "normalize", "softsign", "tanhshrink"],
)
def test_functions_of_torch_are_recorded_inside(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(function(self.linear(x)))

    net, x = Net(), torch.randn(LENGTH, WIDTH)
    cut = cut_graph(net, (x,))
    require_same(net, cut, (x,), {})
    saving = [stage for stage in cut.stages if "linear" not in stage.name]
    assert saving
    assert not {"gumbel_softmax", "local_response_norm", "normalize", "softsign", "tanhshrink"} & {*operations(cut)}


@pytest.mark.wide
def test_transformers_of_torch_and_torchvision_are_cut_inside_of_attention() -> None:
    torch.manual_seed(0)
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    x, memory = torch.randn(BATCH, LENGTH, WIDTH), torch.randn(BATCH, MEMORY, WIDTH)
    both_sides = nn.Transformer(WIDTH, HEADS, 1, 1, 16, dropout=0.1, batch_first=True)
    planned = check(both_sides, src=memory, tgt=x, tgt_mask=mask)
    assert planned.chain is not None
    assert any(stage.name.endswith("multihead_attn.scaled_dot_product_attention") for stage in planned.chain.stages)
    vit = torchvision.models.VisionTransformer(16, 8, 2, 2, 16, 32, num_classes=3)
    assert operations(cut_graph(vit, (torch.randn(2, 3, 16, 16),))).count("scaled_dot_product_attention") == 2
    swin = torchvision.models.SwinTransformer([2, 2], 8, [2], [2], [4, 4], num_classes=3)
    assert operations(cut_graph(swin, (torch.randn(2, 3, 16, 16),))).count("softmax") == 2


@pytest.mark.wide
def test_a_smaller_last_batch_is_served_by_the_plan_of_a_larger_one() -> None:
    torch.manual_seed(0)
    vit = torchvision.models.VisionTransformer(16, 8, 2, 2, 16, 32, num_classes=3)
    planned = Checkpointable(vit, torch.randn(4, 3, 16, 16), "1GiB")
    before, images = planned.plan, torch.randn(3, 3, 16, 16)
    assert torch.equal(planned(images), vit(images))
    assert planned.plan is not None
    assert planned.plan.schedule == before.schedule
    assert sequentialize(vit, (images,)).way == "graph"
