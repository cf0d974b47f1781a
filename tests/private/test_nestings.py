"""Objects that are nothing but their values are taken apart and put together again."""

from dataclasses import dataclass

import torch

from lightning_rotor.private.nestings import attribute_of, flatten, tree_unflatten, watch_containers


@dataclass(frozen=True)
class Pair:
    left: torch.Tensor
    right: int


class Ring:
    def __init__(self) -> None:
        self.tensor = torch.zeros(1)
        self.itself = self


def test_a_frozen_dataclass_comes_back() -> None:
    leaves, spec = flatten(Pair(torch.ones(1), 3))
    assert [type(leaf) for leaf in leaves] == [torch.Tensor, int]
    assert tree_unflatten(leaves, spec).right == 3


def test_an_object_in_itself_is_one_leaf() -> None:
    ring = Ring()
    leaves, _ = flatten(ring)
    assert leaves == [ring]


def test_a_change_of_a_container_is_told() -> None:
    value = {"rows": [1, 2]}
    changed = watch_containers(value)
    assert not changed()
    value["rows"].append(3)
    assert changed()


def test_an_attribute_that_raises_is_the_default() -> None:
    assert attribute_of(Ring(), "missing", 5) == 5
