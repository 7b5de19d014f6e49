"""Write the table of docs/security.md: which attacks do harm where the kernel lacks a layer, found by trying them.

PYTHONPATH=tests/sandbox python docs/make_security_table.py

The attacks are those that a machine survives unconfined. `tests/sandbox` holds that the table is what is seen.
"""

import sys
import tempfile
from pathlib import Path

import elsewhere
import security_table

from trl_rollouts.sandbox.confinement import LAYERS


def main() -> None:
    if (python := elsewhere.readable_python()) is None:
        sys.exit("No Python of this version is installed where another user can run it, such as /usr/bin.")
    with tempfile.TemporaryDirectory(prefix="anyones-python-") as folder:
        anyones = elsewhere.build(Path(folder), python)
        security_table.write({layer: security_table.report_without(layer, anyones) for layer in LAYERS})


if __name__ == "__main__":
    main()
