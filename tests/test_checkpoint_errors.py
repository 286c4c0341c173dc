"""What does not fit, all of it at once, and what can be done about it: missing, extra, cast, only some parts."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jzero
from jzero.checkpoint import Checkpointer, CheckpointMismatch, read
from tests.checkpoints import KEY, OTHERS, TX, held, layout_of, random_state


def layout_with(params, stage=3, precision=None):
    return jzero.zero(params, stage=stage, mesh=jzero.make_mesh(data=8), min_shard_size=0, precision=precision)


OLD = {"body": {"w": jnp.full((8, 4), 0.1), "b": jnp.ones(9)}, "head": jnp.ones((4, 2)), "steps": jnp.arange(3)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Params, sgd with momentum and a key."""
    layout, tx = layout_with(OLD), optax.sgd(0.1, momentum=0.9)
    state = jzero.init(lambda: OLD, tx, layout, key=KEY)
    with Checkpointer(tmp_path_factory.mktemp("saved")) as checkpointer:
        checkpointer.save(5, state, tx, layout)
    return checkpointer, tx


def refusal(checkpointer, *args, **options):
    with pytest.raises(CheckpointMismatch) as found:
        checkpointer.restore(*args, **options)
    return found.value


def test_every_leaf_that_does_not_fit_is_named(saved):
    checkpointer, tx = saved
    params = {
        "body": {"w": jnp.ones((8, 4), jnp.bfloat16), "c": jnp.ones(9)},
        "head": jnp.ones((4, 3)),
        "steps": jnp.ones(3),
    }
    error = refusal(checkpointer, tx, layout_with(params))
    said = {problem.split(":")[0]: problem for problem in error.problems}
    assert set(said) == {
        "params/body/w",
        "params/body/b",
        "params/body/c",
        "params/head",
        "params/steps",
        "opt_state/0/trace/body/w",
        "opt_state/0/trace/body/b",
        "opt_state/0/trace/body/c",
        "opt_state/0/trace/head",
        "opt_state/0/trace/steps",
        "key",
    }
    assert said["params/body/w"].endswith(
        "the checkpoint has float32(8, 4), asked for bfloat16(8, 4). Pass cast=True to cast it, or use the precision "
        "that it was saved with."
    )
    assert "has float32(4, 2), asked for float32(4, 3). Make the layout from params of" in said["params/head"]
    assert "the checkpoint has none; asked for float32(9,). To make it afresh, pass on_missing" in said["params/body/c"]
    assert "the checkpoint has float32(9,), which was not asked for. To leave it" in said["params/body/b"]
    assert "has int32(3,), asked for float32(3,), and only floats are cast" in said["params/steps"]
    assert "Pass key=, any random key" in said["key"]
    assert str(error).startswith(f"{checkpointer.path(5)}: 11 leaves do not fit.")
    assert all(problem.split(". ")[0] in str(error) for problem in error.problems)


def test_a_message_stays_readable(tmp_path):
    many = {f"w{i}": jnp.ones(8) for i in range(60)}
    layout, tx = layout_with(many), optax.sgd(0.1)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(0, jzero.init(lambda: many, tx, layout), tx, layout)
        error = refusal(checkpointer, tx, layout_with({"v": jnp.ones(8)}))
    assert len(error.problems) == 61 and len(str(error).splitlines()) == 23 and "and 41 more" in str(error)


def test_missing_leaves_are_made_afresh_when_asked(saved):
    checkpointer, tx = saved
    new = {**OLD, "head": {"new": jnp.ones((4, 3))}}
    layout = layout_with(new)
    made = []

    def init():
        made.append(jzero.init(lambda: jax.tree.map(lambda x: x + 7, new), tx, layout, key=jax.random.key(9)))
        return made[-1]

    with pytest.raises(ValueError, match="pass init="):
        checkpointer.restore(tx, layout, on_missing="init")
    assert "params/head: the checkpoint has" in str(
        refusal(checkpointer, tx, layout, init=init, on_missing="init", key=KEY)
    )
    state = checkpointer.restore(tx, layout, key=KEY, init=init, on_missing="init", on_extra="ignore").state
    assert len(made) == 1, "once, and only where something is missing"
    assert np.all(np.asarray(state.params["head"]["new"])[:4] == 8), "never zeros"
    np.testing.assert_array_equal(np.asarray(state.params["body"]["w"]), OLD["body"]["w"])
    assert jnp.all(jax.random.key_data(state.key) == jax.random.key_data(KEY)), "what is there is read"
    state = checkpointer.restore(tx, layout_with(OLD), key=KEY, init=lambda: 1 / 0, on_missing="init").state
    assert np.all(np.asarray(state.params["head"])[:4] == 1)


def test_what_init_does_not_make_either_is_named(saved):
    checkpointer, tx = saved
    layout = layout_with(OLD)
    scale = {"loss_scale": 1024.0}
    error = refusal(
        checkpointer, tx, layout, key=KEY, on_missing="init", init=lambda: jzero.init(lambda: OLD, tx, layout), **scale
    )
    assert "loss_scale/scale: neither the checkpoint has it nor the state that init() makes" in str(error)


def test_fine_tuning_starts_from_params_alone(saved, tmp_path):
    """Of a whole checkpoint, and of one that has no more, with another optimizer, stage and precision."""
    checkpointer, tx = saved
    whole = checkpointer.restore(tx, layout_with(OLD), key=KEY).state
    adam, layout = optax.adam(0.1), layout_with(OLD, 1, "bf16")
    with Checkpointer(tmp_path) as only:
        only.save(0, whole, tx, layout_with(OLD), only=("params",))
        only.wait()
        assert {leaf.path[0] for leaf in only.manifest(0).leaves} == {"params"}
        assert "opt_state/0/trace/head" in str(refusal(only, tx, layout_with(OLD)))
        for source in (checkpointer, only):
            restored = source.restore(
                adam,
                layout,
                only=("params",),
                init=lambda: jzero.init(lambda: jax.tree.map(jnp.zeros_like, OLD), adam, layout, key=jax.random.key(4)),
            )
            state = restored.state
            assert jax.tree.structure(state.opt_state) == jax.tree.structure(adam.init(state.master))
            assert int(state.step) == 0 and jnp.all(jax.random.key_data(state.key) == jnp.array([0, 4], jnp.uint32))
            np.testing.assert_array_equal(np.asarray(state.master["body"]["w"]), OLD["body"]["w"])
            assert state.params["body"]["w"].dtype == jnp.bfloat16
            np.testing.assert_array_equal(np.asarray(state.params["body"]["w"]), OLD["body"]["w"].astype(jnp.bfloat16))
            params = source.restore_params(layout)
            for x, y in zip(jax.tree.leaves(params), jax.tree.leaves(state.params), strict=True):
                assert (
                    x.dtype == y.dtype
                    and x.sharding == y.sharding
                    and np.asarray(x).tobytes() == np.asarray(y).tobytes()
                )
    with pytest.raises(ValueError, match=r"only=\['params'\] .* pass init="):
        checkpointer.restore(adam, layout, only=("params",))


def test_floats_are_cast_when_asked_and_only_then(saved):
    checkpointer, tx = saved
    layout = layout_with(
        OLD, precision=jzero.Precision(master="bfloat16", moments="bfloat16", stochastic_rounding=True)
    )
    assert len(refusal(checkpointer, tx, layout, key=KEY).problems) == 6
    state = checkpointer.restore(tx, layout, key=KEY, cast=True).state
    w = state.params["body"]["w"]
    assert w.dtype == state.opt_state[0].trace["body"]["w"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(w), OLD["body"]["w"].astype(jnp.bfloat16))
    assert checkpointer.restore_params(layout, cast=True)["head"].dtype == jnp.bfloat16
    with pytest.raises(CheckpointMismatch, match="params/head"):
        checkpointer.restore_params(layout)


def test_a_loss_scale_of_another_kind(tmp_path):
    layout, tx = layout_with(OLD, 2, "fp16"), optax.sgd(0.1)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(0, jzero.init(lambda: OLD, tx, layout, loss_scale=512.0), tx, layout)
        assert float(checkpointer.restore(tx, layout, loss_scale=512.0).state.loss_scale.scale) == 512
        for scale in (256.0, jzero.DynamicLossScale()):
            assert "stands at 512, saved by another" in str(refusal(checkpointer, tx, layout, loss_scale=scale))
        assert "loss_scale/scale: " in str(refusal(checkpointer, tx, layout))
        assert "Pass the loss_scale= of the training step" in str(refusal(checkpointer, tx, layout))


def test_only_some_parts_come_from_the_checkpoint(tmp_path):
    layout = layout_of(1, "8")
    old, fresh = random_state(layout, 1), random_state(layout, 2)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(0, old, TX, layout)
        kept = ("params", "opt_state")
        state = checkpointer.restore(TX, layout, only=kept, init=lambda: fresh).state
    found, first, second = held(state, layout), held(old, layout), held(fresh, layout)
    assert found == {name: (first if name.startswith(kept) else second)[name] for name in first}


def test_what_to_do_about_several_leaves_is_said_once(saved):
    checkpointer, _ = saved
    error = refusal(checkpointer, optax.adam(0.1), layout_with(OLD), key=KEY)
    missing = [problem for problem in error.problems if "To make it afresh, pass on_missing='init'" in problem]
    assert len(missing) > 2 and str(error).count("make it afresh") == 1
    assert f"    For each of these {len(missing)}: To make it afresh, pass on_missing='init' and init=." in str(error)
    assert all(problem.split(". ")[0] in str(error) for problem in error.problems)


def test_another_optimizer_and_params_alone_have_a_way_out(saved, tmp_path):
    checkpointer, tx = saved
    layout = layout_with(OLD)
    error = refusal(checkpointer, optax.adam(0.1), layout, key=KEY)
    assert "It was saved with another optimizer: pass the tx that it was saved with" in str(error).splitlines()[-1]
    with Checkpointer(tmp_path, async_=False) as alone:
        alone.save(0, jzero.init(lambda: OLD, tx, layout, key=KEY), tx, layout, only=("params",))
    error = refusal(alone, tx, layout)
    assert "It holds params alone. restore(..., only=['params'], init=" in str(error).splitlines()[-1]
    for error in (refusal(checkpointer, tx, layout), refusal(alone, tx, layout_with({**OLD, "more": jnp.ones(8)}))):
        assert "holds params alone" not in str(error) and "another optimizer" not in str(error)
    wrong: list = [lambda: 3]
    with pytest.raises(TypeError, match=r"init\(\) returns a int; wanted what jzero.init returns"):
        alone.restore(tx, layout, only=("params",), init=wrong[0])
    with pytest.raises(ValueError, match=r"restore: with on_missing='init' the rest is made afresh; pass init=lambda"):
        alone.restore(tx, layout, on_missing="init")


def test_places_and_steps_that_are_not_there(saved, tmp_path):
    checkpointer, tx = saved
    layout = layout_with(OLD)
    with pytest.raises(FileNotFoundError, match=r"6 is not there\. .* has steps 5\."):
        checkpointer.restore(tx, layout, step=6)
    empty = Checkpointer(tmp_path / "none")
    assert empty.steps == [] and empty.latest is None and empty.best_step is None
    with pytest.raises(FileNotFoundError, match=r"none has no checkpoint\. Save one first"):
        empty.restore(tx, layout)
    with pytest.raises(FileNotFoundError, match=r"no checkpoint with the metric 'loss' .* metrics of step 5 are: none"):
        Checkpointer(checkpointer.directory, best=("loss", "max")).restore(tx, layout, step="best")
    with pytest.raises(FileNotFoundError, match=r"5 is one checkpoint\. Make the .* folder, .*: step=5"):
        Checkpointer(checkpointer.path(5)).restore(tx, layout)
    shutil.copytree(checkpointer.path(5), tmp_path / "made")
    with pytest.raises(FileNotFoundError, match=r"made is one checkpoint, and no folder of them\. Move it to .*made/0"):
        Checkpointer(tmp_path / "made").restore(tx, layout)
    with pytest.raises(ValueError, match="step='best' needs a metric"):
        checkpointer.restore(tx, layout, step="best")


def test_a_step_is_not_replaced_unless_asked(saved, tmp_path):
    _, tx = saved
    layout = layout_with(OLD)
    state = jzero.init(lambda: OLD, tx, layout)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state, tx, layout, data="first")
        with pytest.raises(FileExistsError, match=r"1 is there already\. Pass overwrite=True"):
            checkpointer.save(1, state, tx, layout)
        checkpointer.save(1, state, tx, layout, data="second", overwrite=True)
        assert checkpointer.restore(tx, layout).data == "second"
        checkpointer.save(2, state, tx, layout)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"keep": 0}, "keep=0; wanted an int of 1 or more"),
        ({"every": 2.5}, "every=2.5"),
        ({"best": "loss"}, r"best='loss'; wanted a metric and its best end, such as \('loss', 'min'\)"),
        ({"best": ("loss", "low")}, "best="),
    ],
)
def test_options_of_the_checkpointer(tmp_path, options, words):
    with pytest.raises(ValueError, match=words):
        Checkpointer(tmp_path, **options)


def test_arguments_that_make_no_sense(saved, tmp_path):
    checkpointer, tx = saved
    layout = layout_with(OLD)
    state = jzero.init(lambda: OLD, tx, layout, key=KEY)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="file is a file; wanted a folder"):
        Checkpointer(tmp_path / "file")
    fresh = Checkpointer(tmp_path / "run")
    bad: list = [-1, 1.0, True]
    for step in bad:
        with pytest.raises(ValueError, match="wanted an int of 0 or more"):
            fresh.save(step, state, tx, layout)
    with pytest.raises(ValueError, match=r"only=\('weights',\); wanted a list of some of params, opt_state"):
        fresh.save(0, state, tx, layout, only=("weights",))
    with pytest.raises(TypeError, match="save: data or metrics are nothing that JSON holds: "):
        fresh.save(0, state, tx, layout, data=object())
    numbers: list = [None, jnp.ones(2), "low"]
    for number in numbers:
        with pytest.raises(TypeError, match=r"save: metrics\['loss'\] is no number: .*Pass a float"):
            fresh.save(0, state, tx, layout, metrics={"loss": number})
    with pytest.raises(ValueError, match=r"state\.opt_state has another structure"):
        fresh.save(0, state, optax.adam(1.0), layout)
    assert not (tmp_path / "run").exists(), "nothing is written before all has been checked"
    for options, words in [
        ({"step": "last"}, "step='last'; wanted a step, 'latest' or 'best'"),
        ({"on_missing": "zeros"}, "on_missing='zeros'; wanted 'error' or 'init'"),
        ({"on_extra": "drop"}, "on_extra='drop'; wanted 'error' or 'ignore'"),
        ({"only": ()}, r"only=\(\)"),
    ]:
        with pytest.raises(ValueError, match=words):
            checkpointer.restore(tx, layout, **options)
    assert [step for step in range(7) if Checkpointer(tmp_path, every=3).due(step)] == [0, 3, 6]


def test_nothing_is_read_before_all_fits(saved, monkeypatch):
    checkpointer, tx = saved
    monkeypatch.setattr(read, "arrays", lambda *args: 1 / 0)
    refusal(checkpointer, tx, layout_with({**OLD, "head": jnp.ones((4, 3))}))
    with pytest.raises(ZeroDivisionError):
        checkpointer.restore(tx, layout_with(OLD), key=KEY)


def test_states_of_every_leaf_are_restored(tmp_path):
    """A checkpoint that was saved without a key, model state or loss scale is restored without them."""
    layout, tx = layout_with({"w": jnp.ones(9)}, 2, "bf16"), optax.adam(0.1)
    state = jzero.init(lambda: {"w": jnp.ones(9)}, tx, layout)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(0, state, tx, layout)
        restored = checkpointer.restore(tx, layout).state
        assert restored.key is restored.model_state is restored.loss_scale is None
        assert jax.tree.structure(restored) == jax.tree.structure(state)
        with pytest.raises(CheckpointMismatch, match="model_state/mean: the checkpoint has none"):
            checkpointer.restore(tx, layout, model_state=OTHERS["model_state"])
