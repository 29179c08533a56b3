"""`python -m rowstep` is the command `rowstep`, wherever scripts are not on the path."""

import sys

from rowstep.cli import main

if __name__ == "__main__":
    sys.exit(main())
