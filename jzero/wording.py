"""How messages and tables say what is long: the first few of many names, dtypes, bytes, seconds."""

from collections.abc import Iterable


def few(names: Iterable[str], shown: int = 3, of: int | None = None) -> str:
    """The first of some names, and how many there are besides: of all of them, or of as many as are said to be.

    Example:
        >>> few(["a", "b"]), few(["a", "b", "c", "d"], 2), few(["a", "b"], 2, of=9)
        ('a, b', 'a, b and 2 more', 'a, b and 7 more')
    """
    names = list(names)
    left = (len(names) if of is None else of) - shown
    return ", ".join(names[:shown]) + (f" and {left} more" if left > 0 else "")


SHORT = {"float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
"""Dtypes as the precisions of jzero call them."""


def dtypes(names: Iterable[str]) -> str:
    """The dtypes that there are among some.

    Example:
        >>> dtypes(["float32", "bfloat16", "float32", "int8"])
        'fp32/bf16/int8'
    """
    return "/".join(dict.fromkeys(SHORT.get(name, name) for name in names))


def size(count: float) -> str:
    """Bytes in the largest decimal unit of which there is one.

    Example:
        >>> size(7.5e9), size(1_250_000), size(437e9), size(12)
        ('7.50 GB', '1.25 MB', '437 GB', '12 B')
    """
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= unit:
            return f"{count / unit:,.{2 if count < 100 * unit else 0}f} {name}"
    return f"{count:.0f} B"


def exact_size(size: int) -> str:
    """Bytes in the largest binary unit that holds them in whole numbers.

    Example:
        >>> exact_size(4096), exact_size(1032), exact_size(3 << 29)
        ('4 KiB', '1032 B', '1536 MiB')
    """
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while len(units) > 1 and size and size % 1024 == 0:
        size, units = size // 1024, units[1:]
    return f"{size} {units[0]}"


def time(seconds: float) -> str:
    """Seconds in a unit that fits.

    Example:
        >>> time(1.5), time(0.0123), time(4.2e-6), time(0)
        ('1.50 s', '12.30 ms', '4.2 us', '0')
    """
    if seconds >= 1:
        return f"{seconds:,.2f} s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.2f} ms"
    return f"{seconds * 1e6:.1f} us" if seconds else "0"
