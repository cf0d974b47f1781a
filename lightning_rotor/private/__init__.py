"""Every private name of torch and Lightning that this package touches, under a plain name.

A private name may be gone in the next release. Here each stands once, with the versions that have it and why nothing
public serves, and ``tests/test_private.py`` asks each what it must do. Three habits count as public, for half the
world relies on them: the dicts ``_parameters``, ``_buffers`` and ``_modules`` of an ``nn.Module``, operators of
``torch.ops``, and what Python documents (``sys._getframe``).

``torch_names`` lists the names of torch by file. Besides: ``values`` knows nestings, ``sharding`` FSDP2's units,
``messages`` the processes' groups, ``lightning_names`` both packages of Lightning, ``python_names`` CPython.
"""
