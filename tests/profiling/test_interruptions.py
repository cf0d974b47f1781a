"""A wait for other work is told from work by the thread's processor time."""

from __future__ import annotations

import time

import torch

from lightning_rotor.profiling.interruptions import Interruptions
from lightning_rotor.profiling.meters import AllocatorMeter, CpuMeter

SLEEP = 0.02


def test_a_wait_is_told_from_work() -> None:
    watch = Interruptions(CpuMeter())
    begin = time.thread_time()
    while time.thread_time() - begin < 1e-4:
        pass
    time.sleep(SLEEP)
    assert watch.any()
    found = []
    for _ in range(50):  # the machine itself may be busy
        watch = Interruptions(CpuMeter())
        begin = time.thread_time()
        while time.thread_time() - begin < 1e-3:
            pass
        found.append(watch.any())
    assert not all(found)
    other = Interruptions(AllocatorMeter(torch.device("cuda")))
    time.sleep(SLEEP)
    assert not other.any()  # the host waits for a device anyway
