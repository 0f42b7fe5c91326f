"""`python -m apoptosis` is the command `apoptosis`."""

from apoptosis.cli import main

if __name__ == "__main__":
    main()
