"""What commands print with `--json`."""

import json
import math
from collections.abc import Mapping
from typing import Any


def print_json(plain: Any) -> None:
    """Prints what JSON can hold. It has no NaN and no infinity; where these are it gets null, as in JavaScript.

    Example:
        >>> print_json({"loss": float("nan"), "steps": (1, 2)})
        {
         "loss": null,
         "steps": [
          1,
          2
         ]
        }
    """
    print(json.dumps(_finite(plain), indent=1, allow_nan=False))


def _finite(plain: Any) -> Any:
    if isinstance(plain, Mapping):
        return {name: _finite(value) for name, value in plain.items()}
    if isinstance(plain, list | tuple):
        return [_finite(value) for value in plain]
    return None if isinstance(plain, float) and not math.isfinite(plain) else plain
