"""Layouts of gradients: which memory they share, and for whom it counts."""

from __future__ import annotations

from dataclasses import replace

import torch

from lightning_rotor.profiling.gradient_layouts import (
    Layout,
    layouts_from,
    layouts_of,
    memories_elsewhere,
    memory_bytes,
)


def layout_of(gradient: torch.Tensor, stride: tuple[int, ...] | None = None, key: int = 0) -> Layout:
    return layouts_of([(key, gradient.stride() if stride is None else stride, gradient)])[0]


def test_layouts_of_several_readers_share_memory_if_it_is_one_reader_that_leaves_it() -> None:
    lying = Layout(torch.Size([2, 4]), (8, 1), 0, 64, torch.float32, torch.device("cpu"))
    plain = replace(lying, stride=(4, 1), storage_bytes=32, is_plain=True)
    beside = replace(lying, offset=4, counts_elsewhere=True)
    both = dict(layouts_from({~0: (7, beside), 0: (7, lying)}))
    assert both == {~0: replace(beside, counts_elsewhere=False), 0: lying}
    assert not memories_elsewhere(tuple(both.items()))
    assert dict(layouts_from({~0: (7, beside), 0: (8, lying)}))[~0] == beside
    assert [memory.nbytes for memory in memories_elsewhere(layouts_from({~0: (7, beside)})).values()] == [64]
    assert layouts_from({0: (7, plain), 1: (8, plain)}) == ()
    of_a_sum = layouts_from({0: (7, plain), 1: (7, plain)})
    assert [place for place, _ in of_a_sum] == [0, 1]


def test_a_gradient_that_fills_its_memory_like_its_tensor_is_plain() -> None:
    whole = torch.ones(4, 8)
    assert layout_of(whole).is_plain
    assert not layout_of(whole.t(), (8, 1)).is_plain
    assert not layout_of(whole[:, :4]).is_plain
    assert not layout_of(torch.ones(1).expand(8)).is_plain
    # The stride of a dimension of size 1 says nothing.
    assert layout_of(torch.ones(1, 8), (99, 1)).is_plain


def test_a_slice_keeps_alive_what_it_is_cut_from() -> None:
    whole = torch.ones(4, 8)
    layout = layout_of(whole[:, 4:])
    assert (layout.storage_bytes, layout.offset, layout.stride) == (128, 4, (8, 1))
    assert memory_bytes([layout], 1) == 128
    assert memory_bytes([layout], 512) == 512


def test_shared_memory_counts_for_the_skip_that_was_made_first() -> None:
    whole = torch.ones(8)
    rows = [(~0, (1,), whole[:4]), (1, (1,), whole[4:]), (0, (1,), whole)]
    of_link, second, first = layouts_of(rows)
    assert (of_link.counts_elsewhere, second.counts_elsewhere, first.counts_elsewhere) == (True, True, False)
    assert memory_bytes([of_link, second, first], 1) == 32
    assert memory_bytes([of_link, second], 1) == 0


def test_a_layout_makes_gradients_that_lie_in_one_memory() -> None:
    whole = torch.zeros(4, 8)
    left, right = layouts_of([(0, (8, 1), whole[:, :4]), (1, (8, 1), whole[:, 4:])])
    memories: dict[int, torch.Tensor] = {}
    one, other = left.ones(memories), replace(right, memory=left.memory).ones(memories)
    assert len(memories) == 1
    assert one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    assert (one.stride(), other.storage_offset()) == ((8, 1), 4)
    assert torch.equal(one, torch.ones(4, 4))


def test_a_plain_layout_is_as_large_as_its_tensor_reaches() -> None:
    layout = Layout.like(torch.ones(4, 8).t(), memory=3)
    assert (layout.storage_bytes, layout.is_plain, layout.memory) == (128, True, 3)
