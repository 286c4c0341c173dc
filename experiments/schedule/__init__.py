"""When a program communicates, read from what XLA makes of it for GPUs that are not there.

`python -m experiments.schedule --help`. Modules, each importing only from those above it: `config` (every option and
its default), `models` (what is compiled), `program` (layout and compiled program), `report` (tables and JSON), `cli`.
"""
