# %% [markdown]
# # ZeRO by hand
#
# Data-parallel training keeps the same numbers on every device. ZeRO ([Rajbhandari et
# al.](https://arxiv.org/abs/1910.02054)) keeps each number once, and computes the same. This notebook builds its
# stages 0 to 3 out of three collectives, each as a few lines of plain JAX. You will learn
#
# - where the sixteen bytes go that each parameter costs,
# - why an all-reduce has two halves, and why the first two steps of ZeRO therefore add no traffic at all,
# - how to write each stage with `jax.shard_map`, and how to see that it still trains the same model,
# - what stage 3 costs, and two mistakes that undo it in JAX without any error,
# - what `jzero` does so that your model need not know about any of this.
#
# No accelerator is needed. One line installs what is used, from the repository that this notebook lies in:

# %% tags=["skip-execution"]
# %pip install -q -e ..

# %%
import jax

jax.config.update("jax_num_cpu_devices", 8)  # simulated devices, where there are no real ones

import functools
from collections import Counter

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jzero
from jzero.program import collectives

plt.rcParams.update({"figure.dpi": 80, "font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
mesh = jzero.make_mesh(data=-1)
N = mesh.size
assert N > 1, 'One device has nobody to share with. Put jax.config.update("jax_platforms", "cpu") into the first line.'
print(f"{N} devices: {mesh.devices.flat[0].device_kind}")

# %% [markdown]
# ## A model and its sixteen bytes
#
# The model is a stack of residual blocks, run by a `scan`, as transformers are. It learns to turn a vector around.
# Look at `get`: it does nothing yet. It is called on the weights of a block right before the block uses them, and
# later it is the only thing that changes.

# %%
LAYERS, WIDTH, HIDDEN = 16, 64, 256


def init_params(key):
    up, down = jax.random.split(key)
    return {
        "up": jax.random.normal(up, (LAYERS, WIDTH, HIDDEN)) / WIDTH**0.5,
        "down": jax.random.normal(down, (LAYERS, HIDDEN, WIDTH)) / HIDDEN**0.5,
    }


def loss_fn(params, batch, get=lambda w: w, around_block=lambda block: block):
    def block(x, w):
        w = get(w)
        normed = x * lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6)
        return x + jax.nn.relu(normed @ w["up"]) @ w["down"], None

    x, _ = lax.scan(around_block(block), batch["x"], params)
    return jnp.mean(jnp.square((x - batch["y"]).astype(jnp.float32)))


def make_batch(key):
    x = jax.random.normal(key, (8 * N, WIDTH), jnp.bfloat16)  # a few examples for each device
    return {"x": x, "y": x[:, ::-1]}


key = jax.random.key(0)
master = jax.jit(init_params)(key)
batches = [make_batch(key) for key in jax.random.split(jax.random.key(1), 6)]
count = sum(w.size for w in jax.tree.leaves(master))
print(f"{count:,} parameters")

# %% [markdown]
# Matrix units are fast in `bfloat16`, so that is what the loss gets. But small updates vanish in it:

# %%
weight, update = jnp.bfloat16(1), jnp.bfloat16(0.001)
print(f"bfloat16: {weight} + {update:.4f} = {weight + update}")
assert weight + update == weight

# %% [markdown]
# So the optimizer moves a `float32` copy, the *master weights*, and Adam remembers two moments of every gradient, in
# `float32` as well. Every line of Adam works element by element. It does not care whether it is given whole matrices
# or a few rows of each, and all of ZeRO rests on that.


# %%
def half(tree):
    return jax.tree.map(lambda w: w.astype(jnp.bfloat16), tree)


def adam(state, grads, rate=1e-3, b1=0.9, b2=0.999, eps=1e-8):
    """Moves whatever part of the weights it is given."""
    t = state["t"] + 1
    m = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g.astype(jnp.float32), state["m"], grads)
    v = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * jnp.square(g.astype(jnp.float32)), state["v"], grads)

    def moved(w, m, v):
        return w - rate * (m / (1 - b1**t)) / (jnp.sqrt(v / (1 - b2**t)) + eps)

    return {"master": jax.tree.map(moved, state["master"], m, v), "m": m, "v": v, "t": t}


zeros = jax.tree.map(jnp.zeros_like, master)
start = {"params": half(master), "master": master, "m": zeros, "v": zeros, "t": jnp.int32(0)}
grads = jax.grad(loss_fn)(start["params"], batches[0])

KINDS = {"params": "#1b4f72", "grads": "#d35400", "master": "#2e86c1", "m": "#7fb3d5", "v": "#c5dcee"}
sixteen = {kind: sum(x.nbytes for x in jax.tree.leaves((start | {"grads": grads})[kind])) / count for kind in KINDS}
assert sum(sixteen.values()) == 16

figure, axes = plt.subplots(figsize=(8, 1.1))
left = 0
for kind, size in sixteen.items():
    axes.barh(0, size, left=left, color=KINDS[kind], edgecolor="white")
    dtype = jax.tree.leaves(grads if kind == "grads" else start[kind])[0].dtype
    axes.text(left + size / 2, 0, f"{kind}\n{dtype}", ha="center", va="center", color="black" if kind == "v" else "w")
    left += size
axes.set(yticks=[], xlim=(0, left), xlabel="bytes for each parameter")
axes.spines["left"].set_visible(False)

# %% [markdown]
# In plain data parallelism every device holds this whole bar for every parameter. What differs from one device to the
# next is only the part of the batch that it looks at.
#
# ## An all-reduce has two halves
#
# Each device has a gradient of its own and all need the sum. That is `psum`, an all-reduce. It can be done in two
# halves. `psum_scatter`, a reduce-scatter, leaves each device with the sum of *one piece*. `all_gather` then hands
# all pieces to all.
#
# `jax.shard_map` runs a function on every device at once, each with its own part of the arrays; a `PartitionSpec`
# says which dim is cut into such parts. In the picture each row is a device and each column a piece:


# %%
def on_devices(f, ins, outs, **options):
    """Runs `f` on each device, with that device's part of every array.

    With `check_vma=True` JAX would add sums of its own to gradients. Here every collective is one that we write.
    """
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=False), **options)


EACH = P("data")  # each device has its own: here a row, later its examples
own = np.arange(float(N * N), dtype=np.float32).reshape(N, N)
reduce = on_devices(lambda x: lax.psum(x, "data"), EACH, EACH)
scatter = on_devices(lambda x: lax.psum_scatter(x, "data", scatter_dimension=1, tiled=True), EACH, EACH)
gather = on_devices(lambda x: lax.all_gather(x, "data", axis=1, tiled=True), EACH, EACH)

pieces = scatter(own)
assert (gather(pieces) == reduce(own)).all()

diagonal = np.where(np.eye(N, dtype=bool), np.asarray(pieces), np.nan)
panels = {
    "each device has its own gradient": own,
    "psum_scatter: each has one sum": diagonal,
    "then all_gather: all have all sums": np.asarray(gather(pieces)),
}
figure, row = plt.subplots(1, 3, figsize=(10, 3.3), layout="constrained")
for axes, (title, table) in zip(row, panels.items(), strict=True):
    for (device, piece), value in np.ndenumerate(table):
        if not np.isnan(value):
            color = plt.cm.tab10(piece % 10, alpha=0.25 if table is own else 0.85)
            axes.add_patch(plt.Rectangle((piece, device), 0.92, 0.86, color=color))
            axes.text(piece + 0.46, device + 0.43, f"{value:g}", ha="center", va="center", fontsize=7)
    axes.set(title=title, xlim=(0, N), ylim=(N, 0), xlabel="piece", ylabel="device")
    axes.set(xticks=np.arange(N) + 0.46, yticks=np.arange(N) + 0.43, xticklabels=range(N), yticklabels=range(N))
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)

# %% [markdown]
# What goes over the wire can be counted before anything runs: `jax.jit(f).lower(...)` holds each collective with its
# shape and dtype. In a ring of $N$ devices each one sends $(N-1)/N$ of the array for either half, and both times that
# for a `psum`. It follows that the halves together are as good as the whole:


# %%
def wire(*lowered):
    """Bytes that each device sends, by kind of collective. Single numbers, such as the loss, are left out."""
    sent = Counter()
    for row in (row for one in lowered for row in collectives(one, mesh) if row.shape):
        sent[row.kind] += row.wire_bytes
    return sent


whole_sum, halves = wire(reduce.lower(own)), wire(scatter.lower(own), gather.lower(pieces))
print(f"{dict(whole_sum)} bytes are as many as {dict(halves)}")
assert whole_sum.total() == halves.total()

# %% [markdown]
# Between the halves is a moment in which each device knows one piece of the sum, and nobody knows more than that.
# That is all that ZeRO needs: **update in between**. Each device can move its piece of the weights with its piece of
# the gradient, and what is then gathered are new weights in place of summed gradients.
#
# ## Stage 0: everything everywhere
#
# The step to beat. A stage is two functions, both run on each device: `backward` makes gradients, `update` uses them.
# Each device divides its loss by $N$, so that sums over the devices are means over the batch.


# %%
def share(params, batch, **how):
    return loss_fn(params, batch, **how) / N


def backward_0(state, batch):
    loss, grads = jax.value_and_grad(share)(state["params"], batch)
    return lax.psum(loss, "data"), grads


def update_0(state, grads):
    state = adam(state, jax.tree.map(lambda g: lax.psum(g, "data"), grads))
    return state | {"params": half(state["master"])}


# %% [markdown]
# `run` trains for a few steps. After the first `backward`, when all sixteen bytes are alive, it stops to look at what
# each device really holds.

# %% tags=["varies"]
WHOLE = P()  # every device has all of it
CUT = P(None, "data")  # each device has its rows of each matrix; the first dim counts the layers

runs = {}


def run(backward, update, params, rest, grads):
    """Trains with the params, the rest of the state and the gradients placed as said; `grads=EACH`: not yet summed."""
    places = {"params": params, "master": rest, "m": rest, "v": rest, "t": WHOLE}
    backward = on_devices(backward, (places, EACH), (WHOLE, grads))
    update = on_devices(update, (places, grads), places, donate_argnums=0)

    def placed(x, place):
        return jax.tree.map(lambda x: jax.device_put(np.asarray(x), NamedSharding(mesh, place)), x)

    state, losses, seen = {kind: placed(start[kind], place) for kind, place in places.items()}, [], None
    for batch in (placed(batch, EACH) for batch in batches):
        loss, g = backward(state, batch)
        seen = seen or look(state, g) | {"wire": wire(backward.lower(state, batch), update.lower(state, g))}
        state = update(state, g)
        losses.append(float(loss))
    return seen | {"losses": losses, "master": jax.tree.map(np.asarray, state["master"])}


def look(state, grads):
    """What lives on the devices: bytes on the first one, and for each kind the rows that each device holds."""
    alive = {kind: (grads if kind == "grads" else state[kind]) for kind in KINDS}
    live = {kind: jzero.memory.live_bytes(x)[mesh.devices.flat[0]] for kind, x in alive.items()}
    rows = {
        (kind, shard.device): [at / x["up"].shape[1] for at in shard.index[1].indices(x["up"].shape[1])[:2]]
        for kind, x in alive.items()
        for shard in x["up"].addressable_shards
    }
    summed = jax.tree.map(lambda g, w: np.asarray(g, np.float32).reshape(-1, *w.shape).sum(0), grads, master)
    return {"live": live, "rows": rows, "gradient": summed}


runs["stage 0"] = run(backward_0, update_0, params=WHOLE, rest=WHOLE, grads=EACH)
print(" ".join(f"{loss:.3f}" for loss in runs["stage 0"]["losses"]))

# %% [markdown]
# Is it right? One device that sees the whole batch must come to the same. We compare losses, the first gradient, and
# the weights at the end. The gradient is the sharpest of the three: Adam forgives one that is too large by a constant
# factor, because it divides by its size.


# %% tags=["varies"]
def on_one_device():
    state, losses, gradient = start, [], None
    backward, update = jax.jit(jax.value_and_grad(loss_fn)), jax.jit(adam)
    for batch in batches:
        loss, grads = backward(state["params"], batch)
        gradient = gradient or jax.tree.map(lambda g: np.asarray(g, np.float32), grads)
        state = update(state, grads)
        state = state | {"params": half(state["master"])}
        losses.append(float(loss))
    return {"losses": losses, "gradient": gradient, "master": jax.tree.map(np.asarray, state["master"])}


def check(name, other, limit=0.1):
    """Prints how far two runs are apart, in parts of the size of the thing; for weights, of the way that they went."""
    ours, theirs = runs[name], runs[other]

    def apart(a, b, origin):
        a, b, origin = (np.concatenate([x.ravel() for x in jax.tree.leaves(tree)]) for tree in (a, b, origin))
        return np.linalg.norm(a - b) / np.linalg.norm(b - origin)

    found = {
        "losses": apart(np.array(ours["losses"]), np.array(theirs["losses"]), np.zeros(len(batches))),
        "gradients": apart(ours["gradient"], theirs["gradient"], zeros),
        "weights": apart(ours["master"], theirs["master"], master),
    }
    print(f"{name} against {other}: " + ", ".join(f"{what} differ by {much:.1e}" for what, much in found.items()))
    assert max(found.values()) < limit


runs["one device"] = on_one_device()
check("stage 0", "one device")

# %% [markdown]
# Not zero, but what one expects: a sum of rounded `bfloat16` gradients is not the rounded sum.
#
# ## Stage 1: cut the optimizer state
#
# Replace the all-reduce by its two halves and put Adam in between. Master weights and moments exist once, cut by
# rows; each device moves its own rows. The collectives send as much as before, because they are the same two halves.


# %% tags=["varies"]
def cut(tree, dim=1):
    """A reduce-scatter: from each device's own whole gradient to the sum of one part."""
    return jax.tree.map(lambda g: lax.psum_scatter(g, "data", scatter_dimension=dim, tiled=True), tree)


def joined(tree, dim=1):
    """An all-gather: from parts to the whole."""
    return jax.tree.map(lambda w: lax.all_gather(w, "data", axis=dim, tiled=True), tree)


def update_1(state, grads):
    state = adam(state, cut(grads))
    return state | {"params": joined(half(state["master"]))}


runs["stage 1"] = run(backward_0, update_1, params=WHOLE, rest=CUT, grads=EACH)
check("stage 1", "stage 0")

# %% [markdown]
# ## Stage 2: cut the gradients
#
# In stage 1 each device still makes its whole gradient, of all layers, before any of it is summed. Stage 2 sums the
# gradient of a block as soon as the backward pass has made it, and forgets the rest. For that the backward pass
# itself must change, and a `custom_vjp` changes it: `get` is handed a part and a whole, uses the whole, and gives its
# gradient, reduced and cut, to the part. We then differentiate with respect to the parts. Inside of the `scan` a
# block has no layer dim, so it is cut along its first.


# %% tags=["varies"]
@jax.custom_vjp
def reduced_when_born(part, whole):
    return whole


reduced_when_born.defvjp(lambda part, whole: (whole, None), lambda _, gradient: (cut(gradient, dim=0), None))


def backward_2(state, batch):
    def loss(parts):
        return share((parts, state["params"]), batch, get=lambda w: reduced_when_born(*w))

    parts = jax.tree.map(lambda w, like: w.astype(like.dtype), state["master"], state["params"])
    loss, grads = jax.value_and_grad(loss)(parts)
    return lax.psum(loss, "data"), grads


def update_2(state, grads):
    state = adam(state, grads)
    return state | {"params": joined(half(state["master"]))}


runs["stage 2"] = run(backward_2, update_2, params=WHOLE, rest=CUT, grads=CUT)
check("stage 2", "stage 1")

# %% [markdown]
# (The gradients of stages 0 and 1 are not summed yet when we look. We add them up in `float32` to compare them, and
# the devices add in `bfloat16`, so the last digits differ.)
#
# ## Stage 3: cut the params
#
# Now nothing is whole any more, so a block has to gather its weights before it uses them. That is one line. The other
# half writes itself: **the derivative of an all-gather is a reduce-scatter**, and JAX knows that. Nothing needs to be
# gathered after the update either. And `jax.checkpoint` makes the backward pass gather a block again, in place of
# keeping it since the forward pass.


# %% tags=["varies"]
def backward_3(state, batch, around_block=jax.checkpoint):
    def loss(params):
        return share(params, batch, get=lambda w: joined(w, dim=0), around_block=around_block)

    loss, grads = jax.value_and_grad(loss)(state["params"])
    return lax.psum(loss, "data"), grads


def update_3(state, grads):
    state = adam(state, grads)
    return state | {"params": half(state["master"])}


runs["stage 3"] = run(backward_3, update_3, params=CUT, rest=CUT, grads=CUT)
check("stage 3", "stage 2")

# %% [markdown]
# Nobody asked for a reduce-scatter here. Is there one?

# %%
assert runs["stage 3"]["wire"]["reduce-scatter"] > 0
print({kind: f"{sent:,.0f} bytes" for kind, sent in runs["stage 3"]["wire"].items()})

# %% [markdown]
# ## Who holds what
#
# This picture is drawn from the arrays as they were after the first `backward`. Each column is a device, each block
# of colour is what that device held; hatched gradients are the device's own, not yet summed. Heights are bytes.

# %%
STAGES = [f"stage {stage}" for stage in range(4)]
figure, row = plt.subplots(1, 4, figsize=(11, 3.8), layout="constrained", sharey=True)
for axes, name in zip(row, STAGES, strict=True):
    seen, bottom = runs[name], 0
    for kind, size in sixteen.items():
        for column, device in enumerate(mesh.devices.flat):
            first, last = seen["rows"][kind, device]
            axes.add_patch(plt.Rectangle((column, bottom), 0.9, size, color="#f0f0f0"))
            hatch = "////" if kind == "grads" and name in ("stage 0", "stage 1") else ""
            box = plt.Rectangle((column, bottom + first * size), 0.9, (last - first) * size)
            box.set(facecolor=KINDS[kind], edgecolor="white", hatch=hatch, linewidth=0.4)
            axes.add_patch(box)
        if axes is row[0]:
            axes.text(-0.3, bottom + size / 2, kind, ha="right", va="center")
        bottom += size
    held = sum(seen["live"].values()) / count
    axes.set(title=f"{name}\n{held:g} bytes per parameter", xlim=(0, N), ylim=(0, bottom), yticks=[])
    axes.set(xticks=np.arange(N) + 0.45, xticklabels=range(N), xlabel="device")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)

# %% [markdown]
# The paper has a formula for each stage. The arrays agree with it, to the byte. Dots are what we have measured, lines
# say what happens with more devices:

# %%
promised = {
    "stage 0": lambda n: 16 + 0 / n,
    "stage 1": lambda n: 4 + 12 / n,
    "stage 2": lambda n: 2 + 14 / n,
    "stage 3": lambda n: 16 / n,
}
figure, axes = plt.subplots(figsize=(6.5, 3), layout="constrained")
devices = np.arange(1, 65)
for stage, (name, formula) in enumerate(promised.items()):
    live = sum(runs[name]["live"].values())
    print(f"{name}: {live:>10,} bytes live on the first device, {formula(N) * count:>12,.0f} promised")
    assert live == formula(N) * count
    color = plt.cm.viridis(stage / 3.5)
    axes.plot(devices, formula(devices), color=color)
    axes.plot(N, live / count, "o", color=color)
    axes.text(65, formula(64), name, color=color, va="center")
axes.set(xlabel="devices", ylabel="bytes per parameter\non each device", xlim=(0, 64), ylim=(0, 17))
axes.grid(alpha=0.3)

# %% [markdown]
# Each stage removes a floor: without stage 2 the gradients stay, without stage 3 the params stay, however many
# devices there are. Only at stage 3 do twice as many devices hold a model twice as large.
#
# ## What it costs
#
# Bytes that each device sends in a step, counted on the programs that ran:

# %%
figure, axes = plt.subplots(figsize=(6, 2.8), layout="constrained")
COLLECTIVES = {"all-reduce": "#7d3c98", "reduce-scatter": "#d35400", "all-gather": "#1e8449"}
left = np.zeros(4)
for kind, color in COLLECTIVES.items():
    sent = np.array([runs[name]["wire"][kind] for name in STAGES]) / 1e6
    axes.barh(STAGES, sent, left=left, color=color, label=kind, edgecolor="white")
    left += sent
axes.set(xlabel="MB sent by each device in a step")
axes.invert_yaxis()
axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)

sent = [runs[name]["wire"].total() for name in STAGES]
print(f"against stage 0: {[total / sent[0] for total in sent]}")
assert sent[0] == sent[1] == sent[2] and sent[3] == 1.5 * sent[0]

# %% [markdown]
# On the wire, stages 1 and 2 are free. Stage 3 gathers the weights for the forward pass and once more for the
# backward pass, where stage 0 paid for one all-reduce, which is two halves. So it sends three halves.
#
# ## Two ways to spoil stage 3
#
# Both train the same model, and both store what stage 3 promises *between* steps. The damage is done *inside* of the
# step. First, gather all weights in front of the loss: then all of them are there at once. Second, gather each block
# in the scan but leave out the `checkpoint`: then JAX keeps what was gathered for the backward pass, which is, in the
# end, all of it.
#
# `compile().memory_analysis()` knows how much a program needs beyond its inputs. (XLA for CPUs computes `bfloat16` in
# `float32`, and its copies would hide what we look for. For this picture all programs are compiled in `float32`.)


# %%
def gathered_in_front(state, batch):
    loss, grads = jax.value_and_grad(lambda parts: share(joined(parts), batch))(state["params"])
    return lax.psum(loss, "data"), grads


def kept(state, batch):
    return backward_3(state, batch, around_block=lambda block: block)


def inside(backward, params, rest, grads):
    """Bytes that `backward` needs on each device for its results and on the way, in models of `float32`."""
    places = {"params": params, "master": rest, "m": rest, "v": rest, "t": WHOLE}
    shapes = {kind: (master if kind != "t" else start["t"]) for kind in places}
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), batches[0])
    program = on_devices(backward, (places, EACH), (WHOLE, grads)).lower(shapes, batch).compile()
    memory = program.memory_analysis()
    return (memory.temp_size_in_bytes + memory.output_size_in_bytes) / (4 * count)


needs = {
    "stage 1: reduced at the end": inside(backward_0, WHOLE, CUT, EACH),
    "stage 2: reduced when born": inside(backward_2, WHOLE, CUT, CUT),
    "stage 3, gathered in front": inside(gathered_in_front, CUT, CUT, CUT),
    "stage 3, gathered in the block, kept": inside(kept, CUT, CUT, CUT),
    "stage 3, gathered again": inside(backward_3, CUT, CUT, CUT),
}
figure, axes = plt.subplots(figsize=(7.5, 2.6), layout="constrained")
colors = ["#1b4f72", "#1b4f72", "#c0392b", "#c0392b", "#1e8449"]
axes.bar_label(axes.barh(list(needs), list(needs.values()), color=colors), fmt=" %.2f")
axes.axvline(1, color="black", linewidth=1, linestyle=":")
axes.set(xlabel="memory that the backward pass takes on each device; dotted: all weights once")
axes.invert_yaxis()

one, two, front, late, again = needs.values()
assert one > 1 > two and front > 1 and late > 1 > again

# %% [markdown]
# ## The same from jzero
#
# To write this we had to open the model: `get` is called inside of its blocks. For a model that you did not write
# that is a nuisance, and each of the mistakes above is easy to make. jzero takes `loss_fn` as it is. It reads the
# program of the gradient, finds where each weight is first used, and puts the collectives there.
#
# `jzero.value_and_grad` is our `backward`, and `jzero.apply_gradients` is our `update`, with any optax optimizer.
# (`jzero.train_step` is both in one.)
#
# To compare number for number, gradients are summed in `bfloat16` here as well; by default jzero sums them in
# `float32`.

# %% tags=["varies"]
precision = jzero.Precision(reduce="bfloat16", accumulate="bfloat16")
tx = optax.adam(1e-3)
layouts = {}

for stage, name in enumerate(STAGES):
    layout = jzero.zero(master, stage=stage, mesh=mesh, precision=precision)
    state = jzero.init(init_params, tx, layout, key)
    backward = jax.jit(jzero.value_and_grad(loss_fn, layout))
    update = jax.jit(functools.partial(jzero.apply_gradients, tx=tx, layout=layout))

    losses, seen = [], None
    for batch in map(layout.put_batch, batches):
        loss, g = backward(state.params, batch)
        alive = {"params": state.params, "grads": g, "master": state.master, "m, v": state.opt_state}
        seen = seen or {
            "live": {kind: jzero.memory.live_bytes(x).get(mesh.devices.flat[0], 0) for kind, x in alive.items()},
            "wire": wire(backward.lower(state.params, batch), update.lower(state, g)),
            "gradient": jax.tree.map(lambda g: np.asarray(g, np.float32), g),
        }
        state = update(state, g)
        losses.append(float(loss))
    weights = jax.tree.map(np.asarray, jzero.master_params(state, layout))
    runs[f"jzero {stage}"] = seen | {"losses": losses, "master": weights}
    layouts[stage] = layout, state
    check(f"jzero {stage}", name)
    assert seen["wire"] == runs[name]["wire"]

# %% [markdown]
# The same numbers, and the same collectives byte for byte. Memory is the same too, but for two things:

# %%
for stage, name in enumerate(STAGES):
    ours, hand = (sum(runs[one]["live"].values()) / count for one in (f"jzero {stage}", name))
    print(f"stage {stage}: {hand:6.3f} bytes per parameter by hand, {ours:6.3f} from jzero")

# %% [markdown]
# At stage 1 our bar counts the whole gradient before it is summed, jzero's the part that is left afterwards. At stage
# 3 jzero keeps no `bfloat16` copy: it casts its part of the master weights each time before it gathers it. That is
# less memory than the paper's formula, and the same bytes on the wire.
#
# ## One picture to choose by
#
# If memory is short, a batch is cut into microbatches whose gradients are added up. Then *when* a gradient is reduced
# matters. Stages 0 and 1 reduce once, at the end. Stages 2 and 3 reduce in every microbatch, and stage 3 gathers in
# each of them, too. Counted on jzero's programs, for one and for four microbatches:

# %%
figure, axes = plt.subplots(figsize=(6.5, 4), layout="constrained")
traffic = {}
for stage in range(4):
    layout, state = layouts[stage]
    live = sum(runs[f"stage {stage}"]["live"].values()) / count
    for microbatches in (1, 4):
        step = jzero.train_step(loss_fn, tx, layout, microbatches=microbatches)
        traffic[stage, microbatches] = wire(step.lower(state, layout.put_batch(batches[0]))).total() / count
    few, many = traffic[stage, 1], traffic[stage, 4]
    color = plt.cm.viridis(stage / 3.5)
    axes.annotate("", (many, live), (few, live), arrowprops={"arrowstyle": "->", "color": color})
    axes.plot(few, live, "o", color=color, markersize=9)
    axes.plot(many, live, "o", color=color, markersize=9, fillstyle="none")
    axes.annotate(f"stage {stage}", (few, live), (0, 9), textcoords="offset points", ha="center", color=color)
    print(f"stage {stage}: sends {few:.2f} bytes per parameter with one microbatch, {many:.2f} with four")
axes.set(xlabel="bytes sent in a step, per parameter (hollow: with four microbatches)", xlim=(0, None))
axes.set(ylabel="bytes live when gradients are there, per parameter", ylim=(0, 18))
axes.grid(alpha=0.3)
assert traffic[0, 1] == traffic[0, 4] and traffic[1, 1] == traffic[1, 4]
assert traffic[3, 4] == 4 * traffic[3, 1]

# %% [markdown]
# So: **stage 1 always** (it stores less than stage 0 and sends no more). **Stage 2** if whole gradients do not fit.
# **Stage 3** if the model does not fit without it, with as few microbatches as memory allows.
#
# ## Where to go next
#
# Try these; `check` tells you whether you were right.
#
# - *A wrong scale.* Leave the division by $N$ out of `share`. Which of the three numbers of `check` notices, and
#   which hardly does?
# - *No copy.* Drop `params` from the state of stage 3, and cast the master weights in front of the gather. How many
#   bytes per parameter are left? Compare with jzero.
# - *Better sums.* Reduce gradients in `float32`. What does it do to the picture of the traffic?
# - *Microbatches.* Add up gradients over a `scan` of microbatches, at stage 1 and at stage 2. Count the bytes.
# - *A trap.* Clip by `optax.global_norm(grads)` inside of `update_2`. Why is that wrong, and which `psum` mends it?
# - *An odd number.* Choose a `WIDTH` that does not divide by the number of devices. What would you do? Look at
#   `jzero.explain(layout)` for what jzero does.
#
# Then plan a run of your own in [02_plan_before_you_pay](02_plan_before_you_pay.ipynb), or read in the
# [README](../README.md) about hybrid sharding, tensor parallelism and precision, and in
# [docs/overlap.md](../docs/overlap.md) about hiding the collectives behind matrix multiplications.
