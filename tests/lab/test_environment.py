import json

import jax

from mcomb.lab.environment import environment


def test_environment_has_versions_and_devices():
    found = environment()
    assert found["packages"]["jax"] == jax.__version__
    assert found["devices"] == ["cpu:cpu"] * len(jax.devices())
    assert json.loads(json.dumps(found)) == found
