"""Tests of lightning_rotor/advising."""
