"""Who holds a skip for the dynamic program: its maker from birth on, its reader, or the caller."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_rotor.chain import Chain, Skip
from lightning_rotor.planning.retained_skips import RetainedSkips, retains_from_birth
from tests.test_simulator import STAGE


def chain_with(skip: Skip) -> Chain:
    stages = tuple(replace(STAGE, name=str(number)) for number in range(5))
    return Chain(stages, input_bytes=10, skips=(skip,))


def test_the_only_reader_holds_a_skip() -> None:
    chain = chain_with(Skip(0, (3,), 7, (0,)))
    skips = RetainedSkips(chain, readers_pay=False)
    assert not retains_from_birth(chain)
    assert skips.in_forward.tolist() == [0, 7, 7, 7, 0]
    # Segments that read it, and do not make it.
    assert (skips.held[1, 3], skips.held[3, 4], skips.held[0, 3], skips.held[1, 2]) == (7, 7, 0, 0)
    assert skips.carried(0).tolist() == [0] * 5


@pytest.mark.parametrize("readers_pay", [False, True])
def test_several_readers_let_the_maker_hold_it_from_birth(readers_pay: bool) -> None:
    chain = chain_with(Skip(0, (2, 4), 7, (0, 0)))
    skips = RetainedSkips(chain, readers_pay=readers_pay)
    assert retains_from_birth(chain)
    assert skips.from_birth == (set() if readers_pay else {0})
    assert skips.retained(0, chain.stages[0].keep, chain) == (0 if readers_pay else 7)
    assert skips.carried(0).tolist() == ([0] * 5 if readers_pay else [0, 7, 7, 7, 7])
    assert skips.carried(1).tolist() == [0] * 4


def test_the_caller_holds_what_is_in_the_output() -> None:
    skips = RetainedSkips(chain_with(Skip(1, (3,), 7, (0,), in_output=True)), readers_pay=False)
    assert skips.in_forward.tolist() == [0, 0, 7, 7, 7]
    assert not skips.held.any()
