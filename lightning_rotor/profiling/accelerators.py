"""Accelerators as a roofline sees them: an operator takes as long as its arithmetic, or as the bytes that it moves."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_rotor.link import Link

# Parts of a data sheet's figures that well-tuned kernels reach. Both cancel where one limit decides everything.
_ARITHMETIC_EFFICIENCY = 0.6
_BANDWIDTH_EFFICIENCY = 0.8
# The gap between two kernels in a stream, when the host keeps up.
_LAUNCH_SECONDS = 3e-6


# Copies from and to pinned memory of the host, over sixteen lanes: about four fifths of what PCIe says. An H200 on
# PCIe 5 showed 53 GB/s each way (benchmarks/results/offload_cuda.md).
_PCIE_3, _PCIE_4, _PCIE_5 = Link(12e9, 12e9), Link(25e9, 25e9), Link(50e9, 50e9)
# As nvbandwidth has shown of Grace's memory (Megatron-LM, issue 6491); the data sheet says 450 each way.
_NVLINK_C2C = Link(170e9, 410e9)


@dataclass(frozen=True, slots=True)
class Accelerator:
    """A device as a roofline sees it.

    Attributes:
        name: As users write it.
        memory_bytes: As the driver shows it.
        bandwidth: Bytes per second between memory and chip.
        flops: Operations per second on 4-byte numbers (a fused multiply-add is two), without TF32.
        half_flops: Operations per second on 2-byte numbers (dense, on tensor cores).
        host_link: To pinned memory of the host.
    """

    name: str
    memory_bytes: int
    bandwidth: float
    flops: float
    half_flops: float
    host_link: Link = _PCIE_4

    def seconds(self, operations: float, moved_bytes: float, element_bytes: int) -> float:
        """Estimated duration of one operator that multiplies numbers of ``element_bytes``."""
        peak = self.half_flops if element_bytes <= 2 else self.flops
        arithmetic = operations / (_ARITHMETIC_EFFICIENCY * peak)
        movement = moved_bytes / (_BANDWIDTH_EFFICIENCY * self.bandwidth)
        # Arithmetic and copies of one kernel overlap, so the slower of them decides.
        return max(arithmetic, movement, _LAUNCH_SECONDS)


_MIB = 2**20
# Vendor's data sheets; memory is what `nvidia-smi` shows of it.
_ALL = (
    Accelerator("B200", 183_359 * _MIB, 8000e9, 75e12, 2250e12, _PCIE_5),
    Accelerator("H200", 143_771 * _MIB, 4800e9, 67e12, 989e12, _PCIE_5),
    Accelerator("GH200", 97_871 * _MIB, 4000e9, 67e12, 989e12, _NVLINK_C2C),
    Accelerator("H100", 81_559 * _MIB, 3350e9, 67e12, 989e12, _PCIE_5),
    Accelerator("H100-PCIe", 81_559 * _MIB, 2000e9, 51e12, 756e12, _PCIE_5),
    Accelerator("A100-80GB", 81_920 * _MIB, 2039e9, 19.5e12, 312e12),
    Accelerator("A100-40GB", 40_960 * _MIB, 1555e9, 19.5e12, 312e12),
    Accelerator("L40S", 46_068 * _MIB, 864e9, 91.6e12, 362e12),
    Accelerator("L4", 23_034 * _MIB, 300e9, 30.3e12, 121e12),
    Accelerator("A10G", 23_028 * _MIB, 600e9, 31.5e12, 70e12),
    Accelerator("V100-32GB", 32_768 * _MIB, 900e9, 15.7e12, 125e12, _PCIE_3),
    Accelerator("V100-16GB", 16_384 * _MIB, 900e9, 15.7e12, 125e12, _PCIE_3),
    Accelerator("T4", 15_360 * _MIB, 320e9, 8.1e12, 65e12, _PCIE_3),
    Accelerator("RTX-5090", 32_607 * _MIB, 1792e9, 104.8e12, 209.5e12, _PCIE_5),
    Accelerator("RTX-4090", 24_564 * _MIB, 1008e9, 82.6e12, 165.2e12),
    Accelerator("RTX-3090", 24_576 * _MIB, 936e9, 35.6e12, 71e12),
)
GPUS: dict[str, Accelerator] = {gpu.name: gpu for gpu in _ALL}
"""GPUs by name."""
