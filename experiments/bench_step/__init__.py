"""jzero against plain `jit` and against sharding by hand: `python -m experiments.bench_step --help`.

Modules, each importing only from those above it: `model` (a scanned, rematerialised GPT and its loss), `programs` (the
gradient and the training step of it, made in four ways), `measure` (agreement, interleaved timing, intervals, compile
times), `compare` (the two kinds of run, as plain results), `report` (their tables), `cli`.
"""
