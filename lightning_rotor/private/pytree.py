"""Nestings of tuples, lists, dicts and registered containers.

``torch.utils._pytree`` is private in name alone: torch's own messages send users there to register containers, and ``torch.utils`` has no public
module of the kind. The same in 2.11 to 2.15.
"""

from __future__ import annotations

from torch.utils._pytree import (
    TreeSpec,
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_structure,
    tree_unflatten,
)

__all__ = [
    "TreeSpec",
    "keystr",
    "tree_flatten",
    "tree_flatten_with_path",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_structure",
    "tree_unflatten",
]
