"""Bytes of boundaries and skips that are alive, by who holds them."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from benchmarks.random_chains import random_chain
from lightning_rotor.chain import Chain, Skip
from lightning_rotor.live_memory import Boundaries, Skips
from lightning_rotor.schedule import Leaf, Segment


@pytest.fixture
def chain() -> Chain:
    """Five stages; the first one makes a skip that the third and the last one read."""
    plain = random_chain(random.Random(3), 5, "transformer")
    return replace(plain, skips=(Skip(0, (2, 4), 100, (100, 60)),))


def test_a_boundary_that_somebody_holds_counts_whole(chain: Chain) -> None:
    boundaries = Boundaries(chain)
    size_bytes = boundaries.size_bytes[1]
    boundaries.update(1, holders=1)
    assert boundaries.live_bytes == boundaries.bytes(1) == size_bytes
    boundaries.update(1, holders=1, producer=1)
    assert boundaries.live_bytes == size_bytes
    boundaries.update(1, holders=-2)
    assert boundaries.live_bytes == 1


def test_what_both_sides_save_of_a_boundary_is_never_more_than_all_of_it(chain: Chain) -> None:
    boundaries = Boundaries(chain)
    size_bytes = boundaries.size_bytes[2]
    boundaries.update(2, producer=size_bytes - 1, consumer=2)
    assert boundaries.bytes(2) == size_bytes
    boundaries.update(2, producer=0)
    assert boundaries.live_bytes == 2


def test_a_boundary_that_will_be_rebuilt_counts_nothing_unless_it_is_held(chain: Chain) -> None:
    boundaries = Boundaries(chain)
    size_bytes = boundaries.size_bytes[2]
    boundaries.update(2, producer=5, dropped=True)
    assert boundaries.live_bytes == 0
    boundaries.update(2, holders=1)
    assert boundaries.live_bytes == size_bytes
    boundaries.update(2, holders=-1, dropped=False)
    assert boundaries.live_bytes == 5


def test_the_chains_input_is_the_callers(chain: Chain) -> None:
    boundaries = Boundaries(chain)
    assert boundaries.size_bytes[0] == 0
    assert boundaries.live_bytes == 0


def test_a_skip_counts_while_it_has_a_holder(chain: Chain) -> None:
    skips = Skips(chain)
    skips.hold([0])
    skips.hold([0], holders=2)
    assert skips.live_bytes == 100
    skips.hold([0], holders=-3)
    assert skips.live_bytes == 0


def test_a_segment_reads_the_skips_that_were_made_before_it(chain: Chain) -> None:
    skips = Skips(chain)
    assert skips.read_by(Segment((Leaf(1), Leaf(2)))) == {0}
    assert skips.read_by(Segment((Leaf(0), Leaf(1), Leaf(2)))) == set()  # made inside
    assert skips.read_by(Segment((Leaf(3),))) == set()


def test_stages_learn_of_what_was_made_before_them(chain: Chain) -> None:
    skips = Skips(chain)
    assert skips.learn_in(1, 2)
    assert skips.learn_in(3, 4)
    assert not skips.learn_in(1, 1)
    assert not skips.learn_in(0, 2)
    silent = Skips(replace(chain, skips=(Skip(0, (2, 4), 100, (0, 60)),)))
    assert not silent.learn_in(1, 2)


def test_a_gradient_of_a_skip_is_alive_from_its_last_reader_to_its_maker(chain: Chain) -> None:
    skips = Skips(chain)
    skips.leave_gradients(4)
    assert skips.live_bytes == 60
    skips.take_gradients(2)  # the reader's own peaks count what it finds
    assert skips.live_bytes == 0
    skips.leave_gradients(2)
    assert skips.live_bytes == 100
    skips.take_gradients(0)
    assert skips.live_bytes == 0
