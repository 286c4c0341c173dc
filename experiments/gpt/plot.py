"""loss.png: what a run learnt, against the yardstick."""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from experiments.gpt.record import Record


def plot_loss(record: Record, yardstick: float) -> Path:
    """Draws bits per byte over steps, training and held-out, and the order-2 byte model as a line."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    train, validation = record.of("train"), record.of("validation")
    steps, bits = [row["step"] for row in train], np.array([row["bits_per_byte"] for row in train])
    axes.plot(steps, bits, color="tab:blue", alpha=0.3, linewidth=0.8, label="training batch")
    # A running mean of about a twentieth of the run, so that the trend shows through the noise of single batches.
    span = max(1, len(bits) // 20)
    if span > 1:
        mean = np.convolve(bits, np.full(span, 1 / span), mode="valid")
        axes.plot(steps[span // 2 :][: len(mean)], mean, color="tab:blue", label=f"mean of {span} steps")
    if validation:
        axes.plot(
            [row["step"] for row in validation],
            [row["bits_per_byte"] for row in validation],
            "o-",
            color="tab:orange",
            label="held-out files",
        )
    axes.axhline(yardstick, color="black", linestyle="--", linewidth=1, label=f"order-2 byte model ({yardstick:.2f})")
    axes.set(xlabel="step", ylabel="bits per byte")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    path = record.folder / "loss.png"
    figure.savefig(path, dpi=120)
    return path
