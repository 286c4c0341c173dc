import sys

from experiments.bench_checkpoint.cli import main

if __name__ == "__main__":
    sys.exit(main())
