"""`python -m trt_layering`, the same as the command `trt-layering`."""

from __future__ import annotations

import sys

from trt_layering.cli import main

if __name__ == "__main__":
    sys.exit(main())
