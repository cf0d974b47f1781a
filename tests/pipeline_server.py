"""What the server imports that all processes of pipelines are forked from, once: also the files that have their jobs."""

from __future__ import annotations

import gc
from importlib import import_module
from pathlib import Path

for _name in ("lightning.pytorch", "torch.distributed.pipelining", "lightning_rotor.strategies"):
    import_module(_name)
for _path in sorted(Path(__file__).parent.glob("test_pipeline_*.py")):
    if "from pipelines import" in _path.read_text():
        import_module(_path.stem)

# So that no process looks through what is imported, or copies it to count who refers to it.
gc.collect()
gc.freeze()
