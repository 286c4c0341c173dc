import os
import sys

os.environ["JAX_PLATFORMS"] = "cpu"  # programs are compiled for GPUs; jax must not look for real ones

from experiments.schedule.cli import main

if __name__ == "__main__":
    sys.exit(main())
