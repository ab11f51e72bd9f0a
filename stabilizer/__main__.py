"""`python -m stabilizer` is the command `stabilizer`."""

import sys

from stabilizer.cli import main

if __name__ == "__main__":
    sys.exit(main())
