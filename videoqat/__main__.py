"""`python -m videoqat` is the `videoqat` command."""

import sys

from videoqat.cli import main

if __name__ == "__main__":
    sys.exit(main())
