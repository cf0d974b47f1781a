"""lightning-rotor."""
