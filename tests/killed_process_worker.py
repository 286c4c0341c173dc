"""One process of two, of which the second is killed while both save."""

import os
import signal
import sys
from pathlib import Path

from tests.process_worker import start


def main(address, process, processes, folder):
    start(address, process, processes)
    from jzero.checkpoint import Checkpointer, cut
    from tests.checkpoints import TX, layout_of, random_state

    pieces = cut.pieces

    def dying(source, process):
        for number, piece in enumerate(pieces(source, process)):
            if number == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            yield piece

    layout = layout_of(3, "8")
    state = random_state(layout, 5)
    cut.LARGEST = 64  # bytes: several chunks for each process
    checkpointer = Checkpointer(Path(folder), async_=False, timeout=15)
    checkpointer.save(1, state, TX, layout)
    cut.pieces = dying if process else pieces
    checkpointer.save(2, state, TX, layout)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
