"""`python -m jzero`."""

import sys

from jzero.cli import main

if __name__ == "__main__":
    sys.exit(main())
