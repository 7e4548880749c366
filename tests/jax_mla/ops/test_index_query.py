"""``index_query`` against complex numbers and exact scales in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import TypeCheckError

from jax_mla import E4M3FN, E4M3FNUZ, cos_sin_table, index_query
from tests.jax_mla import oracles
from tests.numerics import assert_bitwise_equal

POSITIONS = [0, 1, 63, 64, 299, 298, 3]


def queries(heads: int, dtype=jnp.bfloat16) -> dict:
    rng = np.random.default_rng(heads)
    q = rng.standard_normal((7, heads, 128)) * 10.0 ** rng.uniform(-3, 3, (7, heads, 1))
    q[2, 0] = 0
    return dict(
        q=jnp.asarray(q, dtype),
        weights=jnp.asarray(rng.standard_normal((7, heads)), dtype),
        cos_sin=cos_sin_table(300, factor=40.0),
        positions=jnp.asarray(POSITIONS, jnp.int32),
    )


def check(data, q8, weights, fp8, interleaved=False, hadamard=False):
    y = oracles.rope(data["q"], data["cos_sin"], POSITIONS, interleaved)
    y, scale = oracles.index_quantise(y @ oracles.hadamard(128) if hadamard else y, fp8.name)
    assert q8.dtype == jnp.dtype(oracles.FP8[fp8.name]) and q8.shape == data["q"].shape
    oracles.assert_codes_are_nearest(np.asarray(q8).view(np.uint8), y, fp8.name, 1e-6 * fp8.max)
    want = np.asarray(data["weights"]).astype(np.float64) * scale / np.sqrt(128 * y.shape[1])
    assert weights.dtype == jnp.float32
    np.testing.assert_allclose(weights, want, rtol=1e-6)


@pytest.mark.parametrize("heads", [1, 5, 8, 64])
def test_each_number_of_heads(how, heads):
    data = queries(heads)
    check(data, *index_query(**data, **how), E4M3FN)


@pytest.mark.parametrize("interleaved, hadamard", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("fp8", [E4M3FN, E4M3FNUZ], ids=str)
def test_each_kind_of_rope_with_and_without_hadamard(how, interleaved, hadamard, fp8):
    data = queries(8, jnp.float32)
    kind = dict(fp8=fp8, interleaved=interleaved, hadamard=hadamard)
    check(data, *index_query(**data, **kind, **how), **kind)


def test_weights_in_float32_beside_queries_in_bf16(how):
    data = queries(8) | dict(weights=queries(8, jnp.float32)["weights"])
    check(data, *index_query(**data, **how), E4M3FN)


def test_a_row_does_not_depend_on_the_others(how):
    data = queries(8)
    q8, weights = index_query(**data, **how)
    alone = {name: x if name == "cos_sin" else x[4:5] for name, x in data.items()}
    q8_alone, weights_alone = index_query(**alone, **how)
    assert_bitwise_equal(q8[4:5], q8_alone)
    assert_bitwise_equal(weights[4:5], weights_alone)


def test_under_jit_a_position_outside_gives_nan_in_its_row_only(how):
    data = queries(8)
    outside = data | dict(positions=jnp.asarray([0, 300, 63, -1, 299, -300, 3], jnp.int32))
    q8, weights = jax.jit(lambda x: index_query(**x, **how))(outside)
    want_q8, want = index_query(**data, **how)
    lost = [1, 3, 5]
    assert np.isnan(np.asarray(q8)[lost, :, :64].astype(np.float32)).all()
    assert_bitwise_equal(np.delete(np.asarray(weights), lost, 0), np.delete(np.asarray(want), lost, 0))
    assert_bitwise_equal(np.delete(np.asarray(q8), lost, 0), np.delete(np.asarray(want_q8), lost, 0))


BAD_CALLS = [
    (
        "a position beyond",
        dict(positions=jnp.full(7, 300)),
        ValueError,
        r"index_query: positions.*\[0, 300\).*got 300 to 300",
    ),
    (
        "a position before",
        dict(positions=jnp.full(7, -1)),
        ValueError,
        r"positions expected values in \[0, 300\).*got -1",
    ),
    ("too few positions", dict(positions=jnp.zeros(6, jnp.int32)), TypeCheckError, "positions"),
    ("heads of 64", dict(q=jnp.zeros((7, 8, 64))), TypeCheckError, "'q'"),
    ("weights of other heads", dict(weights=jnp.zeros((7, 4))), TypeCheckError, "weights"),
    ("a table of 32", dict(cos_sin=jnp.zeros((300, 32))), TypeCheckError, "cos_sin"),
    ("no such format", dict(fp8="e4m3fn"), TypeCheckError, "fp8"),
    ("no such implementation", dict(implementation="cpu"), TypeCheckError, "implementation"),
    (
        "no GPU",
        dict(implementation="pallas"),
        NotImplementedError,
        "index_query: implementation='pallas' expected a GPU",
    ),
]


@pytest.mark.parametrize("bad, error, says", [case[1:] for case in BAD_CALLS], ids=[case[0] for case in BAD_CALLS])
def test_refusals(bad, error, says):
    with pytest.raises(error, match=says):
        index_query(**(queries(8) | bad))
