"""Skip connections between layers of an ``nn.Sequential``, as torchgpipe's users write them, with or without a pipeline.

::

    @skippable(stash=["skip"])                      @skippable(pop=["skip"])
    class Down(nn.Module):                          class Up(nn.Module):
        def forward(self, x):                           def forward(self, x):
            yield stash("skip", x)                          skip = yield pop("skip")
            return self.conv(x)                             return self.conv(x) + skip

    net = nn.Sequential(Down(), Middle(), Up())
    verify_skippables(net)

A decorated class is a subclass of the user's: keys of state dictionaries, ``isinstance`` and pickling stay as they are. Called plainly, an
``nn.Sequential`` hands tensors on by itself. Cut into a chain, every skip is a value of its own between the stage that stashes it and the one that
pops it, so planners know what it takes (:class:`lightning_rotor.chain.Skip`) and recomputation hands it out again.
"""

from lightning_rotor.skip.skippable import (
    Namespace,
    SkipDeclarationError,
    SkipError,
    Skippable,
    pop,
    skippable,
    stash,
    verify_skippables,
)

__all__ = [
    "Namespace",
    "SkipDeclarationError",
    "SkipError",
    "Skippable",
    "pop",
    "skippable",
    "stash",
    "verify_skippables",
]
