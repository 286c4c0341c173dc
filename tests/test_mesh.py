"""Named meshes, and the arithmetic that a wrong one is told."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

import jzero


@pytest.mark.parametrize(
    ("axes", "shape"),
    [
        ({"data": -1}, {"data": 8}),
        ({"data": 8}, {"data": 8}),
        ({"replica": 2, "data": -1}, {"replica": 2, "data": 4}),
        ({"data": -1, "model": 4}, {"data": 2, "model": 4}),
        ({"a": 2, "b": 2, "c": 2}, {"a": 2, "b": 2, "c": 2}),
        ({"data": 8, "rest": -1}, {"data": 8, "rest": 1}),
    ],
)
def test_axes_keep_their_order_and_take_all_devices(axes, shape):
    mesh = jzero.make_mesh(**axes)
    assert list(mesh.shape.items()) == list(shape.items())
    assert set(mesh.devices.flat) == set(jax.devices())
    assert set(mesh.axis_types) == {AxisType.Auto}


def test_given_devices_are_used_in_their_order():
    devices = jax.devices()[:6]
    mesh = jzero.make_mesh(devices=devices, replica=2, data=3)
    assert mesh.devices.tolist() == [devices[:3], devices[3:]]
    one = jzero.make_mesh(devices=jax.devices()[5:6], data=-1)
    assert one.devices.tolist() == [jax.devices()[5]]


@pytest.mark.parametrize(
    ("axes", "error", "parts"),
    [
        ({}, ValueError, ["named axis", "data=-1"]),
        ({"data": 0}, ValueError, ["'data'", "0", "positive"]),
        ({"data": -2}, ValueError, ["'data'", "-2", "positive"]),
        ({"data": 2.0}, TypeError, ["'data'", "2.0", "int"]),
        ({"data": True}, TypeError, ["'data'", "True", "int"]),
        ({"data": -1, "model": -1}, ValueError, ["data=-1, model=-1", "['data', 'model']", "only one"]),
        ({"data": 3, "model": -1}, ValueError, ["data 3 = 3", "8 devices", "'model'"]),
        ({"data": 3, "model": 5}, ValueError, ["data 3 x model 5 = 15", "there are 8 devices"]),
        ({"replica": 2, "data": 3}, ValueError, ["replica 2 x data 3 = 6", "there are 8 devices", "[:6]", "-1"]),
    ],
)
def test_bad_axes(axes, error, parts):
    with pytest.raises(error) as caught:
        jzero.make_mesh(**axes)
    for part in parts:
        assert part in str(caught.value)


def test_product_that_does_not_fit_the_devices_given():
    with pytest.raises(ValueError, match=r"data 4 = 4 does not divide 6 devices") as caught:
        jzero.make_mesh(devices=jax.devices()[:6], data=4, model=-1)
    assert "'model'" in str(caught.value)
    with pytest.raises(ValueError, match="0 devices"):
        jzero.make_mesh(devices=[], data=-1)


def test_devices_are_laid_out_row_by_row():
    mesh = jzero.make_mesh(replica=2, data=4)
    assert mesh.devices.tolist() == np.array(jax.devices()).reshape(2, 4).tolist()


def test_more_devices_than_there_are_can_be_simulated():
    with pytest.raises(ValueError, match=r"but there are 8 devices\. .*'jax_num_cpu_devices', 16\)"):
        jzero.make_mesh(data=16)
