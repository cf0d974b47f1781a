"""Tests of lightning_rotor/planning, a file a module; none needs torch but those of whole plans."""
