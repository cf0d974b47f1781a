"""Every private name of torch and Lightning that this package touches, under a plain name.

A private name may be gone in the next release. Here each stands once, with the versions that have it and why nothing
public serves, and ``tests/test_private.py`` asks each what it must do. Three habits count as public, for half the
world relies on them: the dicts ``_parameters``, ``_buffers`` and ``_modules`` of an ``nn.Module``, operators of
``torch.ops``, and what Python documents (``sys._getframe``).

Nothing is decided here: a file reads and sets, and others say what follows. By what they are about:

- ``torch_names``: the names of torch from most files below, under one import;
- tensors: ``values`` in what user code takes and gives, ``nestings`` around them, ``tensor_facts``, ``fake_tensors``;
- settings and modes of a thread: ``autocast``, ``modes``;
- code that runs: ``operators``, ``hooks``, ``running_backward``, ``running_threads``, ``users_checkpoints``,
  ``compiler``, ``partitioning`` of its joint graphs, ``profiler``;
- several processes: ``process_groups``, ``messages`` between them, ``functional_collectives``, ``sharding`` (FSDP2's
  units), ``pipelining``;
- ``lightning_names`` and ``lightning_packages``: Lightning's two packages; ``python_names``: CPython;
- ``undoing``: changes that are taken back whatever happens.
"""
