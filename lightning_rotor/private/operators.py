"""Operators: the classes of what ``torch.ops`` holds, their schemas, and functions without a public name."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter, methodcaller
from typing import Any

import torch
import torch._refs
import torch._utils
from torch._ops import OpOverload, OpOverloadPacket

__all__ = [
    "RECURRENT",
    "OpOverload",
    "OpOverloadPacket",
    "copy_each",
    "flattened",
    "istft_in_parts",
    "pack_sequences",
    "packet_of",
    "pad_sequences",
    "schema_of",
    "take_back",
    "unflattened",
    "written_arguments",
    "written_by_message",
]

pack_sequences: Callable[..., Any] = torch._VF._pack_padded_sequence
"""The operator of ``torch.nn.utils.rnn.pack_padded_sequence``: its results have sizes that depend on values."""
pad_sequences: Callable[..., Any] = torch._VF._pad_packed_sequence
"""The operator behind ``torch.nn.utils.rnn.pad_packed_sequence``."""
istft_in_parts: Callable[..., Any] = torch._refs.istft
"""``torch.istft`` as operations of Python, since its own code looks into memory. No public name has them."""
RECURRENT: tuple[Callable[..., Any], ...] = (
    torch._VF.lstm,
    torch._VF.gru,
    torch._VF.rnn_tanh,
    torch._VF.rnn_relu,
)
"""The operators of torch's recurrent layers. The third argument of packed sequences is the state, else the weights."""
copy_each: Callable[[list[torch.Tensor], list[torch.Tensor]], Any] = torch._foreach_copy_
"""Copy tensors in one call, as optimizers do: on a GPU a tenth of the time. There is no public name."""
flattened: Callable[[Sequence[torch.Tensor]], torch.Tensor] = torch._utils._flatten_dense_tensors
"""The values of many tensors of one type, copied into one: one block and one kernel. DDP fills its buckets with it."""
unflattened: Callable[[torch.Tensor, Sequence[torch.Tensor]], Sequence[torch.Tensor]] = (
    torch._utils._unflatten_dense_tensors
)
"""Views of such a tensor, in the shapes of those that it was made of."""
schema_of: Callable[[Any], Any] = attrgetter("_schema")
"""Names, types and aliases of an operator's arguments. ``torch.ops`` shows tags in public, and no schema."""
packet_of: Callable[[OpOverload], OpOverloadPacket] = attrgetter("_overloadpacket")
"""All overloads of the name that an operator is one of, for which torch keeps formulas."""
take_back: Callable[[torch.library.Library], None] = methodcaller("_destroy")
"""Undo what a library has registered. Else that happens whenever garbage is collected."""


def written_arguments(
    func: OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Iterator[Any]:
    """Arguments that an operator is given to write to."""
    yield from written_by_message(func, args)
    schema = schema_of(func)
    # Most operators change nothing, and this is asked for each that is recorded.
    if not schema.is_mutable:
        return
    for place, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield args[place] if place < len(args) else kwargs.get(argument.name)


def written_by_message(func: OpOverload, args: Sequence[Any]) -> Iterator[Any]:
    """Arguments that an operator receives a message in. Schemas of c10d do not say so: they come first."""
    if func.namespace == "c10d" and packet_of(func).__name__ != "send" and args:
        yield args[0]
