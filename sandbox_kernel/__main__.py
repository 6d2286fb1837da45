"""``python -m sandbox_kernel``: the same as the command ``sandbox-kernel``."""

import os
import sys

# ``-m`` makes the working folder the first place to import from. What was imported so far may have
# come from there; nothing else does. (Kernelspecs start us by ``-P``, which has no such folder.)
if not sys.flags.safe_path:
    sys.path[:] = [path for path in sys.path if path and path != os.getcwd()]

from sandbox_kernel.cli import main

sys.exit(main())
