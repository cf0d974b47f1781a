"""How long an operator takes on an accelerator, from its arithmetic and the bytes that it moves.

Source: Williams, Waterman, Patterson, "Roofline: an insightful visual performance model for multicore architectures", CACM 52(4), 2009.
"""

from __future__ import annotations

from dataclasses import dataclass

# What well-tuned kernels reach of the figures on a data sheet. Both cancel where one of the two limits everything.
_ARITHMETIC_EFFICIENCY = 0.6
_BANDWIDTH_EFFICIENCY = 0.8
# From one kernel to the next one in a stream, when the host keeps up.
_LAUNCH_SECONDS = 3e-6


@dataclass(frozen=True, slots=True)
class Accelerator:
    """A device as a roofline sees it.

    Attributes:
        name: What people call it.
        memory_bytes: Its memory, as the driver shows it.
        bandwidth: Bytes per second between memory and chip.
        flops: Floating-point operations per second on numbers of four bytes (a multiplication with addition is two). Of fast but
            inexact modes (TF32) nothing is assumed, as torch does for matrices.
        half_flops: The same on numbers of two bytes (dense, on tensor cores).
    """

    name: str
    memory_bytes: int
    bandwidth: float
    flops: float
    half_flops: float

    def seconds(self, operations: float, moved_bytes: float, element_bytes: int) -> float:
        """Estimated duration of one operator.

        Args:
            operations: Floating-point operations.
            moved_bytes: Bytes read and written.
            element_bytes: Size of the numbers that it multiplies.
        """
        peak = self.half_flops if element_bytes <= 2 else self.flops
        arithmetic = operations / (_ARITHMETIC_EFFICIENCY * peak)
        movement = moved_bytes / (_BANDWIDTH_EFFICIENCY * self.bandwidth)
        return max(arithmetic, movement, _LAUNCH_SECONDS)


def _gpu(name: str, mebibytes: int, gigabytes_per_second: float, teraflops: float, half: float) -> Accelerator:
    return Accelerator(name, mebibytes * 2**20, gigabytes_per_second * 1e9, teraflops * 1e12, half * 1e12)


# Vendor's data sheets; memory is what `nvidia-smi` shows of it.
GPUS: dict[str, Accelerator] = {
    gpu.name: gpu
    for gpu in (
        _gpu("B200", 183_359, 8000, 75, 2250),
        _gpu("H200", 143_771, 4800, 67, 989),
        _gpu("H100", 81_559, 3350, 67, 989),
        _gpu("H100-PCIe", 81_559, 2000, 51, 756),
        _gpu("A100-80GB", 81_920, 2039, 19.5, 312),
        _gpu("A100-40GB", 40_960, 1555, 19.5, 312),
        _gpu("L40S", 46_068, 864, 91.6, 362),
        _gpu("L4", 23_034, 300, 30.3, 121),
        _gpu("A10G", 23_028, 600, 31.5, 70),
        _gpu("V100-32GB", 32_768, 900, 15.7, 125),
        _gpu("V100-16GB", 16_384, 900, 15.7, 125),
        _gpu("T4", 15_360, 320, 8.1, 65),
        _gpu("RTX-5090", 32_607, 1792, 104.8, 209.5),
        _gpu("RTX-4090", 24_564, 1008, 82.6, 165.2),
        _gpu("RTX-3090", 24_576, 936, 35.6, 71),
    )
}
