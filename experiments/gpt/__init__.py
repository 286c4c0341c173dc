"""A byte-level GPT, trained on real text at any ZeRO stage: `python -m experiments.gpt --help`.

Modules, each importing only from those above it: `config` (every option and its default), `devices` (the mesh), `data`
(text and batches), `ngram` (the yardstick), `model` (the GPT and its loss, which know nothing of jzero), `job` (model,
loss, optimizer and layout put together), `planned` (runs for `jzero preflight`), `evaluate` and `sample` (what a
trained model is worth, and what it writes), `record` and `plot` (what a run leaves behind), `resume` (its checkpoints),
`report` (tables and progress bar), `train`, `compare`, `cli`.
"""

from experiments.gpt.planned import train_1b3, train_config

__all__ = ["train_1b3", "train_config"]
