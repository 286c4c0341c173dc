"""Rich's tables as plain text: the same in a terminal, in a file and in a notebook."""

import io

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

WIDTH = 120
"""Columns of text."""


def plain(shown: RenderableType, width: int = WIDTH) -> str:
    """What rich would print, without colours and trailing blanks."""
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=False, force_jupyter=False)  # text in a notebook, too
    console.print(shown)
    return "\n".join(line.rstrip() for line in out.getvalue().rstrip().splitlines())


def add_row(table: Table, *cells: str, style: str = "") -> None:
    """Adds a row of plain text: brackets in names are no markup."""
    table.add_row(*map(Text, cells), style=style)
