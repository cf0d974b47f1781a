"""``python -m lightning_rotor``: plans from the command line."""

import sys

from lightning_rotor.report.command_line import main

if __name__ == "__main__":
    sys.exit(main(program="python -m lightning_rotor"))
