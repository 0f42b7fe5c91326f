"""`python -m apoptosis` is the command `apoptosis`."""

import os
import sys

if __name__ == "__main__" and sys.path and sys.path[0] in ("", os.getcwd()):  # noqa: PTH109 - as Python wrote it
    # Python puts the current folder first, and a file in it could stand in for a library.
    del sys.path[0]

from apoptosis.cli import main

if __name__ == "__main__":
    main()
