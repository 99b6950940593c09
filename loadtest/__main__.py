"""`python -m loadtest`: the load tester, as `headwise-load` is where it is installed."""

import sys

from loadtest.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
