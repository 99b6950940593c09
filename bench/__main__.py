"""`python -m bench load ...`: the load tester; the other benchmarks are modules of their own."""

import sys

from bench.loadtest.cli import main

if __name__ == "__main__":
    if sys.argv[1:2] != ["load"]:
        print("usage: python -m bench load URL [options]; see --help there", file=sys.stderr)
        sys.exit(2)
    sys.exit(main(sys.argv[2:]))
