"""``python -m benchmarks``."""

import sys

from benchmarks.cli import main

if __name__ == "__main__":  # worker processes also import this module
    sys.exit(main())
