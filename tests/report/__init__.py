"""Tests of lightning_rotor/report."""
