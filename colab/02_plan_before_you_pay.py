# %% [markdown]
# # Plan before you pay
#
# You have a model and an offer for one host with eight H200s. Does the model fit? At which stage of ZeRO? Will the
# devices compute or wait for each other? All of that can be known before there is a bill, on a laptop. You will learn
#
# - to count what a model takes on each device, from its shapes alone: `jzero.estimate`,
# - to see where each weight will live, and where in your code it is gathered: `jzero.explain`,
# - to compile the real training step for GPUs that you do not have, and read what it will do: `jzero.preflight`,
# - to hold the program that runs against what was promised: `jzero.audit`,
# - and what to choose.
#
# If stages mean nothing to you yet, begin with [01_zero_by_hand](01_zero_by_hand.ipynb). One line installs what is
# used, from the repository that this notebook lies in. `preflight` brings a compiler for GPUs, without drivers or
# CUDA:

# %% tags=["skip-execution"]
# %pip install -q -e "..[preflight]"

# %%
# %matplotlib inline
import jax

jax.config.update("jax_platforms", "cpu")  # a plan needs no accelerator, and should not take one from somebody's run
jax.config.update("jax_num_cpu_devices", 8)

import functools

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from jax import lax

import jzero
from jzero.advice import RESERVE, advise, gb
from jzero.devices import DEVICES
from jzero.figures import plan_bars
from jzero.schedule_plot import block_schedule
from jzero.targets import has_pjrt

plt.rcParams.update({"figure.dpi": 80, "font.size": 9})
h200 = DEVICES["h200"]
print(f"{h200.name}: {gb(h200.memory)} of memory, {gb(h200.link)} per second to its neighbours, over {h200.link_kind}")
print(f"{len(jax.devices())} simulated devices stand in for them here")  # jax may say that it finds no GPU: right

# %% [markdown]
# ## The model
#
# A plain decoder: it knows nothing of devices. Blocks are stacked and run by a `scan`, so that one block is compiled
# however many there are, and `jax.checkpoint` recomputes a block in the backward pass in place of keeping what it
# computed. `make` gives the model at any size; of the large one we only ever need the shapes.


# %%
def make(layers, width, heads, vocabulary, context):
    def init_params(key):
        shapes = {
            "embedding": (vocabulary, width),
            "blocks": {
                "attn_norm": (layers, width),
                "qkv": (layers, width, 3 * width),
                "out": (layers, width, width),
                "mlp_norm": (layers, width),
                "up": (layers, width, 4 * width),
                "down": (layers, 4 * width, width),
            },
            "norm": (width,),
        }
        shapes, treedef = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))
        keys = jax.random.split(key, len(shapes))
        return treedef.unflatten([0.02 * jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True)])

    def normed(x, scale):
        wide = x.astype(jnp.float32)
        return (wide * lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-6)).astype(x.dtype) * (1 + scale)

    def block(x, w):
        q, k, v = jnp.split((normed(x, w["attn_norm"]) @ w["qkv"]).reshape(*x.shape[:2], heads, -1), 3, axis=-1)
        x = x + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ w["out"]
        return x + jax.nn.relu(normed(x, w["mlp_norm"]) @ w["up"]) ** 2 @ w["down"], None

    def loss_fn(params, tokens):
        x, _ = lax.scan(jax.checkpoint(block), params["embedding"][tokens[:, :-1]], params["blocks"])
        logits = (normed(x, params["norm"]) @ params["embedding"].T).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    return init_params, loss_fn, lambda examples: jax.ShapeDtypeStruct((examples, context + 1), jnp.int32)


init_params, loss_fn, tokens = make(layers=40, width=5120, heads=40, vocabulary=32_000, context=2048)
key = jax.random.key(0)
params = jax.eval_shape(init_params, key)
count = sum(leaf.size for leaf in jax.tree.leaves(params))
print(f"{count / 1e9:.2f} billion parameters, {gb(16 * count)} at sixteen bytes each; an H200 has {gb(h200.memory)}")

# %% [markdown]
# ## Estimate: count before you compile
#
# `jzero.estimate` places every leaf as the real run will, and adds up. What is stored between steps is exact. What
# comes on top inside of a step is an approximation, without activations, which depend on your code.


# %%
def estimate(stage, axes, microbatches=4):
    return jzero.estimate(params, axes=axes, stage=stage, precision="bf16", microbatches=microbatches)


plans = [estimate(stage, {"data": 8}) for stage in range(4)]
for plan in plans:
    print(
        f"stage {plan.number}, {plan.microbatches} microbatches: {gb(plan.stored.total):>7} stored, "
        f"{gb(plan.total):>7} in a step, {gb(plan.moved()):>7} sent by each device"
    )
assert plans[1].moved() <= plans[2].moved() <= plans[3].moved()
plan_bars(plans, h200, RESERVE)

# %% [markdown]
# The solid line is the memory of the device; the dashed one leaves room for activations. Hatched is what lives only
# inside of a step. `advise` names the lowest stage that fits, and what it costs. It looks for other ways as well.

# %%
advice = advise(estimate, {"data": 8}, device="h200")
for reason in advice.reasons:
    print("-", reason)
print("Smallest number of H200s, by stage:", dict(enumerate(advice.smallest)))

# %% [markdown]
# ## Explain: where will each weight live?
#
# A layout is a decision about every leaf, and `explain` prints it. Given the loss, it also traces it and says where
# in your code a weight is gathered, how often, and how many bytes that is. A leaf that did not do what you expected
# has its reason in the last column.

# %% tags=["varies"]
mesh = jzero.make_mesh(data=-1)
tx = optax.adamw(3e-4)
layout = jzero.zero(params, stage=3, mesh=mesh, precision="bf16")
print(jzero.explain(layout, loss_fn, tokens(8)))

# %% [markdown]
# ## Preflight: compile it for the real thing
#
# An estimate knows shapes. It does not know your code: activations, attention scores, what XLA keeps and copies,
# which collectives it manages to hide. The compiler does, and it needs no GPU. `preflight` takes the very step that
# you are going to run, builds it again for the GPUs that you name, compiles it, and reads the result.


# %%
def preflight(stage, microbatches, examples=32):
    """Compiles a step at some stage, from the shapes of its state and of a global batch."""
    layout = jzero.zero(params, stage=stage, mesh=mesh, precision="bf16")
    step = jzero.train_step(loss_fn, tx, layout, microbatches=microbatches, clip_norm=1.0)
    state = jax.eval_shape(functools.partial(jzero.init, init_params, tx, layout), key)
    return jzero.preflight(step, state, tokens(examples), target="h200x8", mesh={"data": 8})


# %% tags=["varies"]
reports = {}
if has_pjrt():
    reports[advice.lowest, 4] = preflight(advice.lowest, microbatches=4)
    print(reports[advice.lowest, 4])
else:
    print('What compiles for GPUs is not installed: pip install "jzero[preflight]". The cells below go on without it.')

# %% [markdown]
# Read it from the top: does it fit, and what takes the memory; is the state written over in place; then every
# collective of the compiled program, and what is multiplied while it is under way. The bound at the end is a model
# and no measurement: matmuls at the peak of the data sheet, collectives at the speed of the links, and nothing else
# takes time. No run is faster than that. Where the bound says that devices wait, so will yours.
#
# Memory that stays empty is memory that was paid for. With larger microbatches there are fewer of them, and fewer
# gathers and reductions; only activations grow, and how much they do no estimate can tell. So we compile the same
# global batch in other ways, too.

# %% tags=["varies"]
if has_pjrt():
    for stage, microbatches in ((advice.lowest, 1), (3, 1)):
        reports[stage, microbatches] = preflight(stage, microbatches)

print("stage  microbatches  estimate  compiled      sent  fits  a step at least  MFU at most")
for (stage, microbatches), report in reports.items():
    guess = estimate(stage, {"data": 8}, microbatches).total
    sizes = [guess, report.memory.peak, report.wire_bytes]
    print(
        f"{stage:>5}  {microbatches:>12}"
        + "".join(f"{gb(size):>10}" for size in sizes)
        + f"{'yes' if report.fits else 'no':>6}{report.bound.seconds:>15.2f} s{report.bound.mfu:>13.0%}"
    )

fitting = {key: report for key, report in reports.items() if report.fits}
best = min(fitting, key=lambda key: fitting[key].bound.seconds, default=None)
print("choose (stage, microbatches):", best)

# %% [markdown]
# The difference between estimate and compiled is what your code keeps: activations. And bytes alone do not decide:
# what is sent while matrices are multiplied costs no time, and what is sent when nothing is left to multiply does.
#
# Here is a block of the winner in the forward and in the backward pass, by that model:

# %%
block_schedule(reports[best]) if reports else None

# %% [markdown]
# ## Audit: was the promise kept?
#
# Later, when the real run has started, the same questions have answers that are no plans any more. `jzero.audit`
# lowers and compiles the step on the machine that it runs on, and holds every collective and every byte against the
# ledger. Here is a small twin of the model, trained for a few steps on simulated devices:

# %% tags=["varies"]
small_init, small_loss, small_tokens = make(layers=4, width=128, heads=4, vocabulary=512, context=32)
small_layout = jzero.zero(jax.eval_shape(small_init, key), stage=3, mesh=mesh, precision="bf16")
state = jzero.init(small_init, tx, small_layout, key)
step = jzero.train_step(small_loss, tx, small_layout, clip_norm=1.0)
batch = small_layout.put_batch(jax.random.randint(key, small_tokens(2 * mesh.size).shape, 0, 512))
losses = []
for _ in range(3):
    state, metrics = step(state, batch)
    losses.append(float(metrics["loss"]))
assert losses == sorted(losses, reverse=True)  # the same batch, so it gets better

audit = jzero.audit(step, state, batch)
audit.check()
print(audit)

# %% [markdown]
# `check` raises if a promise is broken; put it into the tests of your own project. To see it at work, break one: here
# is the same state, but somebody has copied all of it to every device, as a careless restore would.

# %%
careless = jax.device_put(state, jax.NamedSharding(mesh, jax.P()))
try:
    jzero.audit(step, careless, batch).check()
except jzero.BrokenPromise as error:
    print(str(error).splitlines()[0])
else:
    raise AssertionError("a state that is whole everywhere went unnoticed")

# %% [markdown]
# ## What to choose
#
# From stage 1 on, a lower stage never sends more than a higher one, for the same number of microbatches. So the
# lowest that fits is a good first guess. Which one that is depends on how large the model is, and on how many devices
# share it. This map asks `estimate` for each pair, with room left for activations:

# %%
sizes = [1e9, 3e9, 7e9, 13e9, 30e9, 70e9, 180e9, 400e9]
devices = [8, 16, 32, 64, 128, 256, 512, 1024]
lowest = np.full((len(sizes), len(devices)), np.nan)
for (row, column), _ in np.ndenumerate(lowest):
    totals = [jzero.estimate(sizes[row], axes={"data": devices[column]}, stage=stage).total for stage in range(4)]
    fits = [stage for stage, total in enumerate(totals) if total <= h200.memory * (1 - RESERVE)]
    lowest[row, column] = fits[0] if fits else np.nan

figure, axes = plt.subplots(figsize=(6.5, 4), layout="constrained")
axes.imshow(lowest, cmap="viridis", vmin=0, vmax=3.5, origin="lower", aspect="auto")
for (row, column), stage in np.ndenumerate(lowest):
    label = "none" if np.isnan(stage) else f"{stage:.0f}"
    axes.text(column, row, label, ha="center", va="center", color="black" if np.isnan(stage) or stage > 2 else "white")
axes.set_xticks(range(len(devices)), devices)
axes.set_yticks(range(len(sizes)), [f"{size / 1e9:.0f}" for size in sizes])
axes.set(xlabel="H200s", ylabel="billions of parameters", title="the lowest stage that fits")
assert (np.diff(np.nan_to_num(lowest, nan=4), axis=0) >= 0).all()  # a larger model never needs less

# %% [markdown]
# Where it says none, cut the matrices of a block as well, by a model axis: `advise` tells you how large. In words:
#
# - **Start at stage 1.** It sends no more than plain data parallelism, and stores far less.
# - **Stage 2** if whole gradients are what does not fit. With many microbatches it sends more.
# - **Stage 3** if whole params do not fit. It gathers in every microbatch, so make these few and large.
# - **Hybrid sharding** (`replica_axes`) if there are several hosts and the model fits on one: gathers stay on the
#   fast links inside of it.
# - **A model axis** if a single block is too large, or if there are more devices than sequences in a batch.
#
# And then ask the compiler. On a shell it is
#
# ```
# jzero estimate --model mymodel:abstract_params --devices 8
# jzero preflight mymodel:config --target h200x8
# ```
#
# When the machines are there, `jzero bandwidth` measures their links before the run trusts them. The
# [README](../README.md) has the rest.
