"""What `--help` prints: texts that fit the terminal, and examples that can be pasted into a shell."""

import argparse
import re
import textwrap


class Help(argparse.HelpFormatter):
    r"""Fills paragraphs, and leaves examples, which are indented, as they are if the terminal is wide enough.

    If it is not, what an example is for goes onto a line above it, and a long command goes on behind a backslash.

    Example:
        >>> text = "To see it:\n  show data/numbers --all --sorted   every number"
        >>> print(Help("show")._fill_text(text, width=30, indent=""))
        To see it:
          # every number
          show data/numbers --all \
              --sorted
    """

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n\n".join(_paragraph(part, width) for part in text.strip().split("\n\n"))

    def add_argument(self, action: argparse.Action) -> None:
        """Adds an option, or the subcommands: argparse before Python 3.13 forgets how far these are indented."""
        super().add_argument(action)
        for each in self._iter_indented_subactions(action):
            length = len(self._format_action_invocation(each)) + self._current_indent
            self._action_max_length = max(self._action_max_length, length)


def _paragraph(text: str, width: int) -> str:
    lines = text.splitlines()
    prose = " ".join(line for line in lines if not line.startswith("  "))
    examples = [line for line in lines if line.startswith("  ")]
    if any(len(line) > width for line in examples):
        examples = [part for line in examples for part in _narrow(line, width)]
    return "\n".join([*textwrap.wrap(prose, width), *examples])


def _narrow(line: str, width: int) -> list[str]:
    """An example in several lines."""
    command, _, purpose = (part.strip() for part in re.sub(r"(\S) {2,}", "\\1\0", line.strip()).partition("\0"))
    lines = textwrap.wrap(purpose, width, initial_indent="  # ", subsequent_indent="  # ")
    now = " "
    for word in re.findall(r"""(?:--\S+ (?!-))?(?:'[^']*'|"[^"]*"|\S)+""", command):  # quotes, options with values
        if len(now) + len(word) + 3 > width and now.strip():
            lines.append(f"{now} \\")
            now = "     "
        now += f" {word}"
    return [*lines, now]
