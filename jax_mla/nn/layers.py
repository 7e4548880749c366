"""What all parts are made of. Parameters have Hugging Face's names and shapes: a matrix is ``[out, in]``."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float, Float32, Int32

from jax_mla.pallas_triton import target
from jax_mla.rope import rotate, rotation


@dataclasses.dataclass(frozen=True)
class Build:
    """How parts are made: matrices are N(0, ``std``²) of ``param_dtype``, and are multiplied in ``dtype``."""

    rngs: nnx.Rngs
    std: float
    dtype: jnp.dtype
    param_dtype: jnp.dtype

    def matrix(self, *shape: int) -> nnx.Param:
        """A random matrix, or several."""
        return nnx.Param(jax.random.normal(self.rngs.params(), shape, self.param_dtype) * self.std)

    def full(self, size: int, value: float) -> nnx.Param:
        """A vector that holds ``value``."""
        return nnx.Param(jnp.full(size, value, self.param_dtype))


def product(equation: str, x: Array, y: Array, out: jnp.dtype | None = None) -> Array:
    """``einsum`` whose float32 is float32 on every device, and whose bfloat16 is summed in float32.

    On a CPU bfloat16 is multiplied as float32, which is the same: XLA has no code there for some products, and says so
    only when they run ("BF16 x BF16 = F32", jaxlib 0.11.2 and 0.12.0.1).
    """
    out = out or x.dtype
    if not target().is_gpu:
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    return jnp.einsum(equation, x, y, precision="highest", preferred_element_type=jnp.float32).astype(out)


class Linear(nnx.Module):
    """``y = W x``, without a bias: ``[..., in]`` to ``[..., out]`` of ``dtype``."""

    def __init__(self, in_features: int, out_features: int, *, build: Build, dtype: jnp.dtype | None = None):
        self.weight = build.matrix(out_features, in_features)
        self.dtype = dtype or build.dtype

    def __call__(self, x: Float[Array, "... i"]) -> Float[Array, "... o"]:
        return product("...i,oi->...o", x.astype(self.dtype), self.weight[...].astype(self.dtype))


class Embed(nnx.Module):
    """Rows of a table: int32 ``[...]`` to ``[..., size]`` of ``dtype``."""

    def __init__(self, rows: int, size: int, *, build: Build):
        self.weight, self.dtype = build.matrix(rows, size), build.dtype

    def __call__(self, ids: Int32[Array, "..."]) -> Float[Array, "... size"]:
        return self.weight[...].at[ids].get(mode="fill", fill_value=jnp.nan).astype(self.dtype)


class RMSNorm(nnx.Module):
    r"""$\gamma\, x\, (\overline{x^2} + \epsilon)^{-1/2}$, in float32 up to γ."""

    def __init__(self, size: int, eps: float, *, build: Build):
        self.weight, self.eps = build.full(size, 1.0), eps

    def __call__(self, x: Float[Array, "... size"]) -> Float[Array, "... size"]:
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        return self.weight[...].astype(x.dtype) * y.astype(x.dtype)


class LayerNorm(nnx.Module):
    r"""$\gamma\, (x - \bar x)\, (\mathrm{var}(x) + \epsilon)^{-1/2} + \beta$, all in float32.

    Returns float32, as ``index_write`` has it.
    """

    def __init__(self, size: int, eps: float, *, build: Build):
        self.weight, self.bias, self.eps = build.full(size, 1.0), build.full(size, 0.0), eps

    def __call__(self, x: Float[Array, "... size"]) -> Float32[Array, "... size"]:
        y = x.astype(jnp.float32)
        y = y - jnp.mean(y, axis=-1, keepdims=True)
        y = y / jnp.sqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        return y * self.weight[...].astype(jnp.float32) + self.bias[...].astype(jnp.float32)


class MLP(nnx.Module):
    """``down(silu(gate x) * up x)``."""

    def __init__(self, hidden: int, inner: int, *, build: Build):
        self.gate_proj = Linear(hidden, inner, build=build)
        self.up_proj = Linear(hidden, inner, build=build)
        self.down_proj = Linear(inner, hidden, build=build)

    def __call__(self, x: Float[Array, "... hidden"]) -> Float[Array, "... hidden"]:
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


def rope(
    x: Float[Array, "B T heads D"], cos_sin: Float32[Array, "T rope"] | Float32[Array, "B T rope"], interleaved: bool
) -> Float[Array, "B T heads D"]:
    """The first ``rope`` columns of each head turned by its token's angles, in float32; ``x``'s dtype."""
    half = cos_sin.shape[-1] // 2
    partner, f, sign, rotated = rotation(jnp.arange(x.shape[-1], dtype=jnp.int32), 2 * half, interleaved)
    cos = jnp.where(rotated, cos_sin[..., f], 1.0)[..., None, :]
    sin = jnp.where(rotated, cos_sin[..., half + f], 0.0)[..., None, :]
    y = x.astype(jnp.float32)
    return rotate(y, y[..., partner], cos, sin, sign).astype(x.dtype)
