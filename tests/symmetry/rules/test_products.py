"""Rules of products, convolutions and linear algebra.

Each program has the freedom that it claims, and computes the same result with permuted parameters.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from rule_programs import (
    BY_EXPERT,
    EXPERTS,
    FEATURES,
    ONE_OUTPUT,
    ROWS,
    UNITS,
    WHOLE,
    Program,
    check_freedom,
    pooled,
    unused_rules,
    weights,
)

from mcomb.symmetry.rules import products


def kernel_derivative(params, x):
    def energy(kernel):
        dims = ("NHWC", "HWIO", "NHWC")
        result = jax.lax.conv_general_dilated(
            x @ params["up"], kernel, (1, 1), "SAME", dimension_numbers=dims, feature_group_count=2
        )
        return (result**3).sum()

    return jnp.square(jax.grad(energy)(params["k"])).sum((0, 1, 2)) @ params["down"]


def ensemble(params, x):
    """A convolution mapped over its kernels."""
    return jax.vmap(lambda kernel: jax.nn.relu(jax.lax.conv(x, kernel, (1, 1), "SAME")).sum((1, 2, 3)))(params["k"])


def solve(params, x):
    return jnp.linalg.solve(x.T @ x + jnp.eye(FEATURES), jnp.tanh(x.T @ params["up"])) @ params["down"]


def sorted_by_expert(finish, counted=lambda index, params: jnp.bincount(index, length=3), also=lambda params, index: 0):
    """Rows that are sorted by expert, for experts to take them in turn, and what is done then."""

    def fn(params, x):
        index = jnp.argmax(x @ params["router"], axis=-1)
        order = jnp.argsort(index)
        sizes = counted(index, params)
        hidden = jnp.tanh(jax.lax.ragged_dot(x[order], params["in"], sizes) + also(params, index[order]))
        return finish(jax.lax.ragged_dot(hidden, params["out"], sizes), order, params)

    return fn


def sum_as_they_are(one_hot):
    return jnp.sum(one_hot, axis=0, promote_integers=False).astype(int)


def put_back(y, order, params):
    return y[jnp.argsort(order)]


def sorted_twice(params, x):
    """Two routers sort the same rows: what is added is of different rows."""
    both = [jnp.argmax(x @ params[name], axis=-1) for name in ("router", "other")]
    orders = [jnp.argsort(index) for index in both]
    products = [
        jax.lax.ragged_dot(x[order], params["in"], jnp.bincount(index, length=3))
        for order, index in zip(orders, both, strict=True)
    ]
    return (products[0] + products[1])[jnp.argsort(orders[0])] @ params["last"]


def counted_as_another(params, x):
    """Each position three times: how often each occurs is not what is counted."""
    index = jnp.argmax(x @ params["router"], axis=-1)
    order = jnp.argsort(jnp.maximum(index[:, None], jnp.zeros((1, 3), index.dtype)).reshape(-1))
    product = jax.lax.ragged_dot(jnp.repeat(x, 3, 0)[order], params["in"], jnp.bincount(index, length=3))
    return product[jnp.argsort(order)] @ params["last"]


def ridge(params, x):
    """Linear regression on hidden units."""
    h = jnp.tanh(x @ params["up"])
    return h @ jnp.linalg.solve(h.T @ h + jnp.eye(UNITS), h.T @ x) + jnp.linalg.inv(h.T @ h + jnp.eye(UNITS)).sum()


def sorted_in_every_step(params, x):
    """Rows of different steps, sorted by what is computed in each, are added up: they are different rows."""

    def step(x, shift):
        index = jnp.argmax(x @ params["router"] + shift, axis=-1)
        y = jax.lax.ragged_dot(x[jnp.argsort(index)], params["in"], jnp.bincount(index, length=3))
        return x, y

    return jax.lax.scan(step, x, params["shift"])[1].sum(0)[:1] @ params["last"]


def sorted_rows(params, x):
    index = jnp.argmax(x @ params["router"], axis=-1)
    return jax.lax.ragged_dot(x[jnp.argsort(index)], params["in"], jnp.bincount(index, length=3))


def sorted_in_a_while_loop(params, x):
    """The same, in a loop whose carry has an axis that is free before."""

    def body(carry):
        i, sums = carry
        return i + 1, sums + sorted_rows(params, x * jnp.cos(i + params["shift"])).sum(1)

    start = jnp.concatenate([jnp.full(ROWS, params["shift"].sum()), jnp.zeros(2)])[:ROWS]
    return jnp.square(jax.lax.while_loop(lambda carry: carry[0] < 3, body, (0, start))[1]).sum()


def sorted_on_each_device(params, x):
    """Rows of different devices are added up: they are sorted by what each device computes."""

    def inner(params, x):
        return jax.lax.psum(sorted_rows(params, x), "units")

    mesh = Mesh(np.array(jax.devices()[:2]), "units")
    run = jax.shard_map(inner, mesh=mesh, in_specs=(P(), P("units")), out_specs=P(), check_vma=False)
    return jnp.square(run(params, x)).sum(0) @ params["last"]


PROGRAMS = {
    "largest singular value": pooled(lambda h: jnp.linalg.norm(h, ord=2), []),
    "ensemble of convolutions": Program(ensemble, {"k": (3, UNITS, 2, 3, 3)}, [(3, UNITS)], (ROWS, 2, 4, 4)),
    "derivative of a grouped convolution by its kernel": Program(
        kernel_derivative,
        {"up": (2, 4), "k": (3, 3, 2, UNITS), "down": (UNITS, 2)},
        [(2,), (2, 2), (2, 3)],
        (2, 4, 4, 2),
    ),
    "linear equations of hidden units": Program(ridge, {"up": (FEATURES, UNITS)}, []),
    "determinants of a batch": pooled(
        lambda h: jnp.linalg.det(jnp.einsum("bi,bj->jbi", x := h[:3, :3], h[:3]) + jnp.eye(3)).prod() + x.sum(),
        [(3,)],
    ),
    "rows sorted by expert and put back": Program(sorted_by_expert(put_back), EXPERTS, BY_EXPERT),
    "rows sorted by expert and written back": Program(
        sorted_by_expert(lambda y, order, p: jnp.zeros_like(y).at[order].set(y)), EXPERTS, [(6,)]
    ),
    "rows sorted by expert and added up": Program(
        sorted_by_expert(lambda y, order, p: y.sum(0)), EXPERTS, [(3,), (UNITS,)]
    ),
    "rows sorted by expert that stay so": Program(sorted_by_expert(lambda y, order, p: y), EXPERTS, [(UNITS,)]),
    "rows sorted by expert, of which the first is used": Program(
        sorted_by_expert(lambda y, order, p: y[0]), EXPERTS, [(UNITS,)]
    ),
    "rows sorted by expert with weights of their own": Program(
        sorted_by_expert(lambda y, order, p: put_back(y * p["own"], order, p)), EXPERTS | {"own": (ROWS, 1)}, [(UNITS,)]
    ),
    "rows sorted by expert but counted otherwise": Program(
        sorted_by_expert(put_back, lambda index, p: jnp.bincount(jnp.argmax(p["size"], 1), length=3)),
        EXPERTS | {"size": (ROWS, 3)},
        [(ROWS,), (UNITS,)],
    ),
    "rows sorted by expert of which some are counted": Program(
        sorted_by_expert(put_back, lambda index, p: jnp.bincount(index[1:], length=3)), EXPERTS, [(UNITS,)]
    ),
    "rows sorted by expert and counted by one-hot vectors": Program(
        sorted_by_expert(put_back, lambda index, p: jax.nn.one_hot(index, 3).sum(0).astype(int)), EXPERTS, [(6,)]
    ),
    "rows sorted by expert of which some are counted by one-hot vectors": Program(
        sorted_by_expert(put_back, lambda index, p: jax.nn.one_hot(index, 3)[1:].sum(0).astype(int)),
        EXPERTS,
        [(UNITS,)],
    ),
    "rows sorted by expert but counted by the others' one-hot vectors": Program(
        sorted_by_expert(put_back, lambda index, p: (index[:, None] != jnp.arange(3)).sum(0) // 2), EXPERTS, [(UNITS,)]
    ),
    "rows sorted by expert and counted too often": Program(
        sorted_by_expert(
            put_back, lambda index, p: (index[:, None, None] == jnp.arange(3) + jnp.zeros((2, 1), int)).sum((0, 1))
        ),
        EXPERTS,
        [(UNITS,)],
    ),
    "rows sorted by expert and counted in too small a type": Program(
        sorted_by_expert(put_back, lambda index, p: sum_as_they_are(jax.nn.one_hot(index, 3, dtype=jnp.int8))),
        EXPERTS,
        [(UNITS,)],
        (300, FEATURES),
    ),
    "rows sorted by expert with what is looked up for theirs": Program(
        sorted_by_expert(put_back, also=lambda p, index: p["bias"][index]),
        EXPERTS | {"bias": (3, UNITS)},
        [(6,)],
    ),
    "rows sorted by expert with what is looked up for others": Program(
        sorted_by_expert(put_back, also=lambda p, index: p["bias"][jnp.roll(index, 1)]),
        EXPERTS | {"bias": (3, UNITS)},
        WHOLE,
    ),
    "rows sorted by two routers": Program(sorted_twice, ONE_OUTPUT | {"other": (FEATURES, 3)}, [(UNITS,)]),
    "rows sorted in every step": Program(sorted_in_every_step, ONE_OUTPUT | {"shift": (2, 3)}, [(2,), (UNITS,)]),
    "rows sorted in a while loop": Program(
        sorted_in_a_while_loop, {"router": (FEATURES, 3), "in": (3, FEATURES, UNITS), "shift": (FEATURES,)}, [(UNITS,)]
    ),
    "rows sorted on each device": Program(sorted_on_each_device, ONE_OUTPUT, [(UNITS,)]),
    "singular values of weights": weights(lambda a: jnp.linalg.svd(a, compute_uv=False), [], (4, 6)),
    "equal rows by groups": weights(
        lambda w, v: (jax.lax.ragged_dot(jnp.ones((6, 3)), w, jnp.array([2, 3, 1])) * v.reshape(-1, 1)).sum(0),
        [(3, 4, 3)],
        (3, 3, 4),
        (6,),
    ),
    "positions that are copied and counted as they were": Program(counted_as_another, ONE_OUTPUT, WHOLE),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_program_has_its_freedom(name):
    check_freedom(PROGRAMS[name])


def test_rules_have_programs(monkeypatch):
    assert not unused_rules(products, PROGRAMS, monkeypatch)
