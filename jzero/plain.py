"""Rich's tables as plain text: the same in a terminal, in a file and in a notebook."""

import io
from collections.abc import Collection, Iterable

from rich import box
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


def table(*columns: str, right: Iterable[str] = (), folds: Collection[str] = (), title: str = "") -> Table:
    """An empty table with room for as much as a line holds. Where that is too little, columns fold.

    Args:
        *columns: Their names.
        right: Those of numbers.
        folds: Those that fold; all if empty.
        title: What stands above.
    """
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0), title=title or None)
    made.title_justify = "left"
    for name in columns:
        justify = "right" if name in right else "left"
        made.add_column(name, justify=justify, overflow="fold", no_wrap=bool(folds) and name not in folds)
    return made


def add_row(table: Table, *cells: str, style: str = "") -> None:
    """Adds a row of plain text: brackets in names are no markup."""
    table.add_row(*map(Text, cells), style=style)
