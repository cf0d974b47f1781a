"""Storages under values, and which of them outlive a link."""

from __future__ import annotations

import torch

from lightning_rotor.chain import Skip
from lightning_rotor.profiling.storages import Storage, skips_between, storages_of


def test_views_share_a_storage_and_what_is_known_keeps_who_made_it() -> None:
    x = torch.randn(4, 8)
    given = {x.untyped_storage().data_ptr(): Storage(born=0, size_bytes=128)}
    view, same, new, other = storages_of([x[:, :2], x.t(), x + 1, "text"], 3, given, 512)
    assert view is same
    assert view is not None
    assert (view.born, view.size_bytes) == (0, 128)
    assert new is not None
    assert (new.born, new.size_bytes) == (3, 512)
    assert other is None
    assert len(given) == 2


def test_tensors_without_memory_share_nothing() -> None:
    x = torch.empty(4, device="meta")
    first, second = storages_of([x, x], 0, {}, 1)
    assert first is not second


def storage(born: int, *uses: int, in_output: bool = False, size_bytes: int = 8) -> Storage:
    return Storage(born, size_bytes, set(uses), in_output)


def test_what_the_next_group_alone_reads_is_a_link() -> None:
    groups = [range(2), range(2, 3), range(3, 4)]
    link, inner, skip = storage(1, 2), storage(0, 1), storage(0, 2, 3)
    skips = skips_between({0: (link, inner, None), 1: (skip,)}, groups)
    assert skips == {skip: Skip(0, (1, 2), 8, (0, 0), in_output=False)}


def test_a_link_that_the_caller_gets_as_well_is_a_skip() -> None:
    groups = [range(1), range(1, 2)]
    shown, empty = storage(0, 1, in_output=True), storage(0, 1, in_output=True, size_bytes=0)
    assert list(skips_between({0: (shown, empty)}, groups)) == [shown]


def test_the_chains_input_takes_no_memory_of_a_plan() -> None:
    groups = [range(1), range(1, 2)]
    given = storage(-1, 0, 1)
    assert skips_between({0: (given,)}, groups)[given].size_bytes == 0
    assert not skips_between({0: (storage(-1, 0),)}, groups)
