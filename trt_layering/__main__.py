"""`python -m trt_layering` and the command `trt-layering`; an interrupt ends them quietly during the imports too."""

from __future__ import annotations

import sys


def main() -> int:
    """What `cli.main` does."""
    try:
        from trt_layering import cli

        return cli.main()
    except KeyboardInterrupt:
        if sys.stderr is not None:
            print("error: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
