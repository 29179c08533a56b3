import sys

from rowstep.cli import main

sys.exit(main())
