import os
import sys

# Each simulated device has a thread of its own. That Eigen shares out the matmuls of one device among the threads of
# the others only makes times differ from call to call. XLA reads this once, when JAX starts.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_cpu_multi_thread_eigen=false"

from experiments.bench_step.cli import main

if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
