"""What a run leaves behind: config.json and metrics.jsonl."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

from experiments.gpt.config import Config


class Record:
    """A run's folder. Each row goes to the file at once, so that nothing is lost when a run is stopped.

    Args:
        folder: Made if it is not there.
        config: Written to config.json.
        overwrite: Whether a run that is already there is replaced.
        upto: The step after which this run goes on with the one that is there, whose rows up to it stay; 0: it begins.

    Raises:
        ValueError: A run is already there, and `overwrite` is False; or the folder cannot be made.
    """

    def __init__(self, folder: Path, config: Config, *, overwrite: bool = False, upto: int = 0):
        self.folder = folder
        self.path = folder / "metrics.jsonl"
        self.rows: list[dict[str, Any]] = []
        try:
            if (self.path.exists() or (folder / "checkpoints").exists()) and not overwrite:
                raise ValueError(
                    f"--out {folder}: holds a run already. Name another folder, or --overwrite to replace that run."
                )
            if upto:
                rows = [json.loads(line) for line in self.path.read_text().splitlines()]
                self.rows = [row for row in rows if row.get("step", upto + 1) <= upto]
            elif (folder / "checkpoints").exists():
                shutil.rmtree(folder / "checkpoints")
            folder.mkdir(parents=True, exist_ok=True)
            self.path.write_text("".join(json.dumps(row) + "\n" for row in self.rows))
            (folder / "config.json").write_text(json.dumps(dataclasses.asdict(config), indent=2) + "\n")
        except OSError as error:
            raise ValueError(f"--out {folder}: cannot write there ({error}).") from error

    def add(self, kind: str, **values: Any) -> None:
        """Appends one row; `kind` says what it is: "train", "validation", "audit", "summary" or "stage"."""
        row = {"kind": kind, **values}
        self.rows.append(row)
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def of(self, kind: str) -> list[dict[str, Any]]:
        """The rows of one kind, in order."""
        return [row for row in self.rows if row["kind"] == kind]
