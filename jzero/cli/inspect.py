"""`jzero inspect`: what a checkpoint holds, and whether it fits a mesh."""

import argparse
import json
import math
from collections.abc import Mapping
from typing import Any

from jzero.checkpoint.entry import Entry
from jzero.checkpoint.inspection import Inspection, inspect
from jzero.checkpoint.placing import precision_of
from jzero.cli.as_json import print_json
from jzero.cli.checkpoints import aligned, command, exits, mesh_and_stage, safe, title
from jzero.cli.options import parsed
from jzero.precision import AS_IT_IS, PRECISIONS, Precision
from jzero.stage import STAGES, Stage
from jzero.wording import size

DESCRIPTION = """\
What a checkpoint holds: its tree, with shapes, dtypes, bytes and chunks, and where it was saved from. No array is read.
A folder of checkpoints stands for the latest one in it. Checkpoints of plain orbax are read as well.

"1: data" under "cut over" says that dim 1, the second, was cut over the mesh axis data; "4 of (2, 64)" under "chunks"
that there are four files, each of at most this shape."""

EXAMPLES = """\
examples:
  jzero inspect run/checkpoints                                   the latest step there
  jzero inspect run/checkpoints/1000 --fits data=4,model=2,stage=3
  jzero inspect run/checkpoints/1000 --json | jq '.leaves[] | select(.bytes > 1e9)'

--fits says how many bytes each device would hold on that mesh, and which leaves do not divide there. Model axes cut the
dims that they cut where the checkpoint was saved, and no others; of an axis that cuts nothing it says so."""


def add(subparsers: Any) -> None:
    """Adds the subcommand."""
    parser = command(
        subparsers, "inspect", "what a checkpoint holds, and whether it fits a mesh", DESCRIPTION, EXAMPLES
    )
    parser.add_argument("checkpoint", metavar="CKPT", help="a checkpoint, or a folder of them")
    text = "a mesh and a stage, such as data=4,model=2,stage=3 (stage: 3 if it is not named)"
    parser.add_argument("--fits", type=parsed(mesh_and_stage), metavar="AXES", help=text)
    parser.set_defaults(run=exits(run))


def run(options: argparse.Namespace) -> int:
    """Runs it; returns the exit code."""
    mesh, stage = options.fits or (None, None)
    found = inspect(options.checkpoint, mesh=mesh, stage=stage)
    if options.json:
        print_json(_plain(found, mesh, stage))
    else:
        print("\n".join(map(safe, _lines(found, mesh, stage))))  # all of it may come from anywhere
    return 0


def _lines(found: Inspection, mesh: Mapping[str, int] | None, stage: int | None) -> list[str]:
    manifest = found.origin.manifest
    lines = [title(found.origin)]
    if said := _saved_from(manifest.saved_from):
        lines.append(f"saved from {said}")
    if manifest.metrics:
        lines.append("metrics " + ", ".join(f"{safe(name)} {value:g}" for name, value in manifest.metrics.items()))
    if manifest.data is not None:
        lines.append(f"data {safe(json.dumps(manifest.data))}")
    rows = [("leaf", "dtype", "shape", "bytes", "cut over", "chunks")]
    rows += [
        (safe(leaf.name), leaf.dtype, str(leaf.shape), size(leaf.nbytes), _axes(leaf.spec), _chunks(leaf))
        for leaf in manifest.leaves
    ]
    lines += ["", *aligned(rows, right=(3,)), ""]
    lines += [f"{safe(name)}: {kind}, not an array" for name, kind in found.origin.others.items()]
    lines.append("; ".join(f"{safe(part)} {size(count)}" for part, count in found.parts.items()))
    if mesh is not None:
        lines += ["", *_fits(found, mesh, 3 if stage is None else stage)]
    if found.stale:
        lines += ["", "Of writes that were stopped, or still go on; the next save there removes jzero's:"]
        lines += [f"  {safe(str(path))}" for path in found.stale]
    return lines


def _fits(found: Inspection, mesh: Mapping[str, int], stage: int) -> list[str]:
    fits, by_part = found.fits, {}
    for one in fits:
        by_part[one.leaf.path[0]] = by_part.get(one.leaf.path[0], 0) + one.bytes
    rows = [(safe(part), size(count)) for part, count in by_part.items()]
    rows.append(("all", size(sum(by_part.values()))))
    rows.append(("of it padding", size(sum(one.padding for one in fits))))
    axes = " x ".join(f"{name} {count}" for name, count in mesh.items())
    lines = [f"On {axes} at stage {stage}, each of {math.prod(mesh.values())} devices holds between steps:"]
    lines += [f"  {line}" for line in aligned(rows, right=(1,))]
    lines += [safe(f"{axis!r} {why}.") for axis, why in found.idle.items()]
    refused = [f"  {safe(one.leaf.name)} {one.leaf.shape}: {one.note}" for one in fits if one.refused]
    uneven = [f"  {safe(one.leaf.name)} {one.leaf.shape}: {one.note}" for one in fits if one.note and not one.refused]
    if refused:
        lines += [
            "Cannot be placed so; other rules for these leaves, or another size of the axis, are needed:",
            *refused,
        ]
    if uneven:
        lines += ["Does not divide:", *uneven]
    return lines if refused or uneven else [*lines, "All that is cut divides."]


def _saved_from(saved: Mapping[str, Any]) -> str:
    if not saved:
        return ""
    said = ["mesh " + " x ".join(f"{name} {count}" for name, count in saved.get("mesh", {}).items())]
    if "stage" in saved:
        stage = Stage(**saved["stage"])
        said.append(f"stage {STAGES.index(stage)}" if stage in STAGES else str(stage))
    if (precision := precision_of(saved)) is not None:
        said.append(f"precision {_precision(precision, saved['precision'])}")
    if "processes" in saved:
        said.append(f"{saved['processes']} process{'es' if saved['processes'] > 1 else ''}")
    return ", ".join(said)


def _precision(given: Precision, saved: Mapping[str, Any]) -> str:
    """The short name of a precision, or the dtypes that it names."""
    if given == AS_IT_IS:
        return "as the params"
    names = [name for name, precision in PRECISIONS.items() if precision == given]
    return names[0] if names else ", ".join(f"{name} {value}" for name, value in saved.items() if value)


def _axes(spec: tuple[tuple[str, ...], ...] | None) -> str:
    if spec is None:
        return "?"
    return ", ".join(f"{dim}: {'+'.join(axes)}" for dim, axes in enumerate(spec) if axes) or "-"


def _chunks(leaf: Entry) -> str:
    if leaf.stored is None:
        return "none"
    return f"{leaf.chunk_count} of {leaf.chunk}"


def _plain(found: Inspection, mesh: Mapping[str, int] | None, stage: int | None) -> dict[str, Any]:
    """All of it as JSON can hold it."""
    manifest = found.origin.manifest
    plain: dict[str, Any] = {
        "checkpoint": str(found.origin.folder),
        "written_by": "jzero" if found.origin.has_checksums else "orbax",
        "step": manifest.step,
        "bytes": found.bytes,
        "parts": found.parts,
        "saved_from": dict(manifest.saved_from),
        "metrics": dict(manifest.metrics),
        "data": manifest.data,
        "leaves": [
            {
                "path": list(leaf.path),
                "dtype": leaf.dtype,
                "shape": list(leaf.shape),
                "bytes": leaf.nbytes,
                "spec": leaf.spec,
                "chunk": list(leaf.chunk),
            }
            for leaf in manifest.leaves
        ],
        "others": dict(found.origin.others),
        "stale": [str(path) for path in found.stale],
    }
    if mesh is not None:
        plain["fits"] = {
            "mesh": dict(mesh),
            "stage": 3 if stage is None else stage,
            "bytes_per_device": sum(one.bytes for one in found.fits),
            "padding_per_device": sum(one.padding for one in found.fits),
            "idle": dict(found.idle),
            "leaves": [
                {
                    "path": list(one.leaf.path),
                    "shard": list(one.shard),
                    "spec": one.axes,
                    "bytes": one.bytes,
                    "note": one.note,
                    "refused": one.refused,
                }
                for one in found.fits
            ],
        }
    return plain
