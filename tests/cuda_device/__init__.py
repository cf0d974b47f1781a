"""A simulated CUDA device: torch's real CUDA host code over the host's memory, with the values that the CPU computes.

It is for machines without a GPU. ``missing()`` says why it cannot be had, ``environment()`` gives what a process needs to see it; this process
stays as it is. ``python -m tests.cuda_device [--devices 2] [--memory 2GiB] -m pytest -m gpu -n0`` runs Python on it.

=================== ==========================================================================================================
``runtime.c``       CUDA's runtime and driver: memory within a size, copies, streams, events; kernels are accepted, not run
``libraries.c``     cuBLAS and cuDNN: handles, sizes, algorithms. ``nvml.c``: what expandable segments ask
``build.py``        compiles them for the torch that is here, with stubs for what else it links
``operators.py``    after each operator of torch has allocated and launched, the CPU's operator writes its results there
``rules.py``        operators that only a GPU has
``startup/``        does so in every Python process that starts in the environment
``server.py``       runs tests marked ``gpu`` in such a process, for ``remote.py``, which reports them in the suite's
=================== ==========================================================================================================

What is exact: bytes of the caching allocator, its failures, random states, bits under recomputation, all that runs on the host. What is not
there: seconds, workspaces that cuDNN and cuBLASLt choose (none, unless set), a kernel's own rounding, NCCL, CUDA graphs, Triton, races
but those of copies (``copies=``). An operator or kernel without known values is an error.
"""

from __future__ import annotations

import os
from pathlib import Path

from tests.cuda_device.build import built, missing

__all__ = ["environment", "missing"]

_HERE = Path(__file__).parent


def environment(
    *,
    devices: int = 1,
    memory: int = 80 * 2**30,
    context: int = 512 * 2**20,
    capability: str = "8.0",
    workspace: int = 0,
    copies: str = "now",
) -> dict[str, str]:
    """Environment of a process that sees simulated devices; builds them if need be.

    Args:
        devices: How many.
        memory: Bytes of each.
        context: Bytes that a process takes of a device before it allocates anything.
        capability: What the device can do, as CUDA counts it.
        workspace: Bytes that each convolution asks for.
        copies: When copies of side streams between host and device happen: "now", or "late" or "early" for the last and
            the first moment that is legal (``runtime.c``).
    """
    libraries = built()
    settings = {
        "DEVICES": devices,
        "MEMORY": memory,
        "CONTEXT": context,
        "CAPABILITY": capability,
        "CONVOLUTION_WORKSPACE": workspace,
        "COPIES": copies,
    }
    return os.environ | {
        "LD_PRELOAD": ":".join(map(str, libraries)),
        "PYTHONPATH": os.pathsep.join(
            [str(_HERE / "startup"), str(_HERE.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        ),
        "OMP_NUM_THREADS": "1",
        "USE_PYTORCH_KERNEL_CACHE": "0",  # kernels that are compiled here are none
        **{f"SIMULATED_{name}": str(value) for name, value in settings.items()},
    }
