"""Python imports this at its start: every process in the environment of ``tests.cuda_device`` gets right values on the device."""

from tests.cuda_device import operators

operators.install()
