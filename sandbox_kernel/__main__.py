"""``python -m sandbox_kernel``: the same as the command ``sandbox-kernel``."""

import sys

from sandbox_kernel.cli import main

sys.exit(main())
