"""What saving and restoring cost: `python -m experiments.bench_checkpoint --help`.

`measure` does one thing in a process of its own and says how much memory and time it took; `cli` asks for them all.
`tools` measures `jzero inspect`, `verify` and `reshard`: `python -m experiments.bench_checkpoint.tools --help`.
"""
