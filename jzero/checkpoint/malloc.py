"""How malloc keeps the memory that was given back to it."""

import contextlib
import ctypes

TRIM_THRESHOLD, MMAP_THRESHOLD, ARENA_MAX = -1, -3, -8
"""glibc's names of the options."""


def reuse() -> None:
    """Makes glibc's malloc, where it is used, keep one pool of memory for all threads, and use it again.

    By default each thread has a pool of its own, each of which keeps the largest chunks that it ever had: several times
    what is in use. And what is given back to the system has to be zeroed when it is taken again, which takes more time
    than reading and writing. It changes the whole process, and so is for command lines, before the first array is read.
    """
    with contextlib.suppress(OSError, AttributeError):  # another libc
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(ARENA_MAX, 1)
        mallopt(MMAP_THRESHOLD, 32 * 2**20)
        mallopt(TRIM_THRESHOLD, 2**30)
