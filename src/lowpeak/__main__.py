"""`python -m lowpeak`: the same as the `lowpeak` command, for launchers that start modules."""

import sys

from lowpeak.cli import main

if __name__ == "__main__":
    sys.exit(main())
