"""What cannot be trained is refused before any work, by name: what came, what was wanted, the way out."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jzero


def params():
    return {
        "blocks": [{"kernel": jnp.ones((8, 16)), "index": jnp.arange(16)}, {"kernel": jnp.ones((16, 8))}],
        "allowed": jnp.ones(8, bool),
        "key": jax.random.key(0),
    }


def mask(**changes):
    first = {"kernel": changes.get("kernel", True), "index": changes.get("index", False)}
    rest = {name: changes.get(name, False) for name in ("allowed", "key")}
    return {"blocks": [first, {"kernel": False}], **rest}


def make_layout(trainable=None, tree=None, stage=3):
    tree = params() if tree is None else tree
    return jzero.zero(tree, stage=stage, mesh=jzero.make_mesh(data=-1), min_shard_size=0, trainable=trainable)


def message(error, call):
    """The message of the error that the call raises."""
    with pytest.raises(error) as raised:
        call()
    return str(raised.value)


def test_these_masks_are_fine():
    """The cases below fail for what they change."""
    numpy = jax.tree.map(np.bool_, mask())
    for trainable in (mask(), numpy, lambda path, leaf: path == "blocks/0/kernel"):
        assert [leaf.path for leaf in make_layout(trainable).trainable] == ["blocks/0/kernel"]


@pytest.mark.parametrize(
    "trainable, part",
    [
        (lambda path, leaf: "weight" in path, "the predicate trainable is false for each. Paths look like 'allowed'"),
        (lambda path, leaf: None, "the predicate trainable is false for each"),
        (mask(kernel=False), "the mask trainable is False everywhere"),
    ],
)
def test_trainable_that_matches_nothing(trainable, part):
    text = message(ValueError, lambda: make_layout(trainable))
    assert "none of the 5 leaves of params would be trained" in text and part in text


def test_params_with_nothing_to_train():
    text = message(ValueError, lambda: make_layout(tree={"n": jnp.arange(4), "key": jax.random.key(0)}))
    assert "none of the 2 leaves of params would be trained: no leaf is floating or complex" in text


@pytest.mark.parametrize(
    "change, parts",
    [
        (lambda m: {name: x for name, x in m.items() if name != "key"}, ("4 leaves, wanted 5", "missing ['key']")),
        (lambda m: m | {"more": True}, ("6 leaves, wanted 5", "not expected ['more']")),
        (lambda m: m | {"key": None}, ("missing ['key']",)),
        (lambda m: m | {"blocks": tuple(m["blocks"])}, ("the same leaves in other containers",)),
        (lambda m: m | {"allowed": [False]}, ("missing ['allowed']", "not expected ['allowed'][0]")),
        (lambda m: True, ("1 leaves, wanted 5", "missing ['allowed']")),
    ],
)
def test_a_mask_of_another_structure(change, parts):
    text = message(ValueError, lambda: make_layout(change(mask())))
    for part in ("trainable has another structure", *parts):
        assert part in text


@pytest.mark.parametrize("value", [1, 0.0, "no", jnp.ones(8, bool), np.int32(1)])
def test_a_mask_of_something_else_than_bools(value):
    text = message(TypeError, lambda: make_layout(mask(key=value)))
    assert f"trainable['key'] is {value!r}" in text and "True or False" in text


@pytest.mark.parametrize("how", ["mask", "predicate"])
@pytest.mark.parametrize(
    "name, at, dtype",
    [("index", "['blocks'][0]['index']", "int32"), ("allowed", "['allowed']", "bool"), ("key", "['key']", "key<fry>")],
)
def test_a_dtype_that_cannot_be_trained(name, at, dtype, how):
    trainables = {"mask": mask(**{name: True}), "predicate": lambda path, leaf: path.endswith(("kernel", name))}
    text = message(TypeError, lambda: make_layout(trainables[how]))
    for part in (
        f"params{at}",
        f"dtype {dtype} cannot be trained",
        "only floating and complex",
        "Leave it out, or cast",
    ):
        assert part in text


@pytest.fixture(scope="module")
def trained():
    """A layout that trains one kernel, its optimizer, and a state of both."""
    layout, tx = make_layout(mask()), optax.adam(0.1)
    return layout, tx, jzero.init(params, tx, layout)


def loss_fn(params, x):
    return jnp.mean((x @ params["blocks"][0]["kernel"]) ** 2)


def test_an_optimizer_state_over_a_different_tree(trained):
    """Of a layout that trains more, of all params, or of another optimizer: refused by every entry."""
    layout, tx, state = trained
    grads = {"blocks": [{"kernel": jnp.ones((8, 16)), "index": None}, {"kernel": None}], "allowed": None, "key": None}
    both = make_layout(lambda path, leaf: path.endswith("kernel"))
    more = jzero.init(params, tx, both)
    cases = [
        (more, tx, ("not expected", ".mu['blocks'][1]['kernel']", ".nu['blocks'][1]['kernel']")),
        (state, optax.sgd(0.1), ("3 leaves, wanted 0", "not expected", "[0].count", "[0].mu['blocks'][0]['kernel']")),
        (state, optax.sgd(0.1, momentum=0.9), ("missing [0].trace['blocks'][0]['kernel']", "not expected [0].count")),
    ]
    for wrong, tx, parts in cases:
        for call in (
            lambda wrong=wrong, tx=tx: jzero.apply_gradients(wrong, grads, tx, layout),
            lambda wrong=wrong, tx=tx: jzero.train_step(loss_fn, tx, layout)(wrong, jnp.ones((8, 8))),
        ):
            text = message(ValueError, call)
            for part in ("state.opt_state has another structure", *parts, "the tx that this layout"):
                assert part in text
    assert not any(x.is_deleted() for x in jax.tree.leaves((state, more)))  # nothing was donated


def test_an_optimizer_state_of_other_shapes(trained):
    layout, tx, state = trained
    adam, rest = state.opt_state
    for change, part in (
        (lambda x: jnp.ones((8, 24)), "[0].mu['blocks'][0]['kernel'] is float32(8, 24)"),
        (lambda x: x.astype(jnp.bfloat16), "[0].mu['blocks'][0]['kernel'] is bfloat16(8, 16)"),
    ):
        wrong = jzero.TrainState(state.params, (adam._replace(mu=jax.tree.map(change, adam.mu)), rest), state.step)
        text = message(ValueError, lambda wrong=wrong: jzero.train_step(loss_fn, tx, layout)(wrong, jnp.ones((8, 8))))
        assert f"state.opt_state{part}" in text and "the layout was made for float32(8, 16)" in text
    tx = optax.adamw(0.1, mask={"another": True})
    with pytest.raises(Exception, match="another"):  # optax's own complaint about a mask over another tree
        jzero.init(params, tx, layout)


def test_gradients_of_leaves_that_are_not_trained(trained):
    layout, tx, state = trained
    grads = jax.tree.map(lambda x: x, params())
    text = message(ValueError, lambda: jzero.apply_gradients(state, grads, tx, layout))
    assert "grads has another structure" in text and "not expected ['allowed'], ['blocks'][0]['index']" in text
    grads = {"blocks": [{"kernel": None, "index": None}, {"kernel": jnp.ones((16, 8))}], "allowed": None, "key": None}
    text = message(ValueError, lambda: jzero.apply_gradients(state, grads, tx, layout))
    assert "missing ['blocks'][0]['kernel']; not expected ['blocks'][1]['kernel']" in text


def test_params_that_lost_a_leaf_that_is_not_trained(trained):
    """The frozen part counts: its structure, shapes and dtypes are checked as well."""
    layout, tx, state = trained
    batch = jnp.ones((8, 8))
    without = {name: x for name, x in state.params.items() if name != "allowed"}
    text = message(ValueError, lambda: jzero.value_and_grad(loss_fn, layout)(without, batch))
    assert "params has another structure" in text and "missing ['allowed']" in text
    other = state.params | {"allowed": jnp.ones(8)}
    text = message(ValueError, lambda: jzero.value_and_grad(loss_fn, layout)(other, batch))
    assert re.search(r"params\['allowed'\] is float32\(8,\), but the layout was made for bool\(8,\)", text)
    text = message(ValueError, lambda: jzero.init(lambda: params() | {"key": jax.random.PRNGKey(0)}, tx, layout))
    assert "['key'] is uint32(2,), but the layout was made for key<fry>()" in text
