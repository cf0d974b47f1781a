"""Compiles the simulated device for the torch that is here, once: the libraries stay in the user's cache."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

_HERE = Path(__file__).parent
_TORCH = Path(torch.__file__).parent
_INCLUDES = [_TORCH.parent / "nvidia" / name / "include" for name in ("cu13", "cudnn")]
# Of what torch links; the compiler of kernels, cuSPARSELt and NCCL are real.
_WANTED = re.compile(r"cu[A-Z]|cuda[A-Z]|__cuda|cublas|cudnn|cusolver|cusparse(?!Lt)|curand|cufft")
_UNUSABLE = re.compile(r"cudnnBackend|RNN|_bufferSize|Get|cufft")
_TORCH_LIBRARIES = ("c10_cuda", "torch_cuda", "torch_cuda_linalg", "torch_python", "caffe2_nvrtc")
_LIBRARIES = {
    "libcuda.so.1": ["runtime.c", "libraries.c"],
    "libnvidia-ml.so.1": ["nvml.c"],
    "libnvrtc.so.13": ["nvrtc.c"],
}


def missing() -> str | None:
    """Why there can be no simulated device here; None if there can be."""
    if not sys.platform.startswith("linux"):
        return "the simulated one is for Linux"
    if not (torch.version.cuda or "").startswith("13."):
        return f"the simulated one needs torch for CUDA 13, this one is for {torch.version.cuda or 'the CPU'}"
    if not hasattr(torch.library, "get_kernel"):
        return f"the simulated one needs torch.library.get_kernel, which torch {torch.__version__} does not have"
    absent = [tool for tool in ("cc", "nm") if shutil.which(tool) is None] + [
        str(path) for path in _INCLUDES if not path.is_dir()
    ]
    return f"the simulated one needs {' and '.join(absent)} to be built" if absent else None


def built() -> list[Path]:
    """The libraries to preload, compiled if these sources have not been for this torch."""
    sources = sorted([*_HERE.glob("*.c"), _HERE / "build.py"])
    key = hashlib.sha256(b"".join(map(Path.read_bytes, sources)) + torch.__version__.encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning_rotor" / f"cuda_device-{key}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
            made = Path(temporary) / "made"
            made.mkdir()
            _compile(made)
            try:
                made.rename(folder)
            except OSError:  # another process was faster
                if not folder.exists():
                    raise
    return [folder / name for name in _LIBRARIES]


def _compile(folder: Path) -> None:
    (folder / "stubs.h").write_text("\n".join(map(_stub, sorted(_linked() - _defined()))) + "\n")
    (folder / "versions").write_text("libnvrtc.so.13 { *; };\n")  # torch asks for them by version
    includes = [f"-I{path}" for path in (_HERE, folder, *_INCLUDES)]
    for name, sources in _LIBRARIES.items():
        options = [
            "-O1",
            "-shared",
            "-fPIC",
            "-fvisibility=hidden",
            "-Wall",
            "-Wextra",
            "-Werror",
            f"-Wl,-soname,{name}",
        ]
        options += [f"-Wl,--version-script={folder / 'versions'}"] if name.startswith("libnvrtc") else []
        command = [
            "cc",
            *options,
            *includes,
            *(str(_HERE / source) for source in sources),
            "-ldl",
            "-lpthread",
            "-o",
            str(folder / name),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(
                f"the simulated device does not compile for torch {torch.__version__}: {done.stderr[-3000:]}"
            )


def _linked() -> set[str]:
    """Functions that torch's libraries expect from CUDA's."""
    libraries = [_TORCH / "lib" / f"lib{name}.so" for name in _TORCH_LIBRARIES]
    table = subprocess.run(
        ["nm", "-D", "--undefined-only", *libraries], check=True, capture_output=True, text=True
    ).stdout
    symbols = (line.split()[-1].split("@")[0] for line in table.splitlines() if line.startswith(" "))
    return {symbol for symbol in symbols if _WANTED.match(symbol)}


def _defined() -> set[str]:
    """Functions that the sources define; those of macros for each direction included."""
    text = "".join((_HERE / name).read_text() for name in ("runtime.c", "libraries.c"))
    for direction in ("Forward", "BackwardData", "BackwardFilter"):
        text += text.replace("##direction##", direction)
    return set(re.findall(r"\b(\w+)\(", text)) | set(re.findall(r"(?:FINE|LAUNCH)\((\w+)\)", text))


def _stub(symbol: str) -> str:
    if symbol.startswith(("cuda", "__cuda")) or re.match("cu[A-Z]", symbol):
        return f"REFUSED({symbol}, 801)"
    if _UNUSABLE.search(symbol):
        return f"REFUSED({symbol}, 3000)"
    if "Create" in symbol or "Destroy" in symbol:
        return f"{'CREATE' if 'Create' in symbol else 'DESTROY'}({symbol})"
    return f"FINE({symbol})" if "Set" in symbol else f"LAUNCH({symbol})"
