"""What each thing means, in numpy and float64. Nothing in here comes from jax_mla.

An fp8 format is its name here, a cache's layout its parameters.
"""

import ml_dtypes
import numpy as np

from tests.numerics import assert_bitwise_equal, assert_within_one_ulp

FP8 = {"e4m3fn": ml_dtypes.float8_e4m3fn, "e4m3fnuz": ml_dtypes.float8_e4m3fnuz}
LARGEST = {"e4m3fn": 448.0, "e4m3fnuz": 240.0}
NAN_BYTE = {"e4m3fn": 0xFF, "e4m3fnuz": 0x80}

DIVISION = 2.0**-22
"""Relative error of a division in float32 as compilers do it: by the reciprocal."""


def fp8_name(layout) -> str:
    """The name of a KV layout's format; none for bf16."""
    return layout.fp8.name if layout.fp8 else ""


def fp8_values(codes, fp8: str) -> np.ndarray:
    return np.asarray(codes, np.uint8).view(FP8[fp8]).astype(np.float64)


def fp8_codes(x, fp8: str) -> np.ndarray:
    """Codes of the nearest numbers, saturating."""
    with np.errstate(invalid="ignore"):
        return np.clip(x, -LARGEST[fp8], LARGEST[fp8]).astype(FP8[fp8]).view(np.uint8)


def power_of_two(x) -> np.ndarray:
    """The smallest power of two that is not under ``x``."""
    mantissa, exponent = np.frexp(np.asarray(x, np.float64))
    return np.ldexp(1.0, np.where(mantissa == 0.5, exponent - 1, exponent))


def assert_codes_are_nearest(codes, x, fp8: str, slack) -> None:
    """``codes`` are those of float64 ``x``, or of a number at most ``slack`` away: seldom, beside a midpoint."""
    codes, x = np.asarray(codes, np.uint8), np.asarray(x, np.float64)
    value, exact = fp8_values(codes, fp8), fp8_values(fp8_codes(x, fp8), fp8)
    low, high = (fp8_values(fp8_codes(x + d, fp8), fp8) for d in (-slack, slack))
    wrong = ~((low <= value) & (value <= high))
    assert not wrong.any(), f"{wrong.sum()} codes, first {value[wrong][0]} for {x[wrong][0]}"
    apart = (value != exact).mean()
    assert apart <= 1e-3, f"{apart:.2%} of the codes lie on the other side of a midpoint"


def layer_norm(k, weight, bias, eps=1e-6) -> np.ndarray:
    k = np.asarray(k).astype(np.float64)
    centred = k - k.mean(axis=-1, keepdims=True)
    normal = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + eps)
    return normal * np.asarray(weight).astype(np.float64) + np.asarray(bias).astype(np.float64)


def rope(x, cos_sin, positions, interleaved: bool) -> np.ndarray:
    """The first 64 of the last axis as 32 complex numbers, each turned by its angle. ``x``: ``[T, ..., D]``."""
    y = np.array(x).astype(np.float64)
    table = np.asarray(cos_sin, np.float64)
    for t, position in enumerate(positions):
        turn = table[position, :32] + 1j * table[position, 32:]
        real, imag = (slice(0, 64, 2), slice(1, 64, 2)) if interleaved else (slice(0, 32), slice(32, 64))
        z = (y[t, ..., real] + 1j * y[t, ..., imag]) * turn
        y[t, ..., real], y[t, ..., imag] = z.real, z.imag
    return y


def hadamard(n: int) -> np.ndarray:
    h = np.ones((1, 1))
    while len(h) < n:
        h = np.kron(np.array([[1, 1], [1, -1]]), h)
    return h / np.sqrt(n)


def index_quantise(y, fp8: str) -> tuple[np.ndarray, np.ndarray]:
    """``(y / scale, scale)`` of each last axis: DeepSeek's rule for the indexer."""
    scale = power_of_two(np.maximum(np.abs(y).max(axis=-1), 1e-4) / LARGEST[fp8])
    return y / scale[..., None], scale


def index_logits(q, weights, k, k_scale) -> np.ndarray:
    """float64 ``[T, S]`` of q ``[T, H, 128]``, weights ``[T, H]``, k ``[S, 128]``, k_scale ``[S]``."""
    q, weights, k, k_scale = (np.asarray(x).astype(np.float64) for x in (q, weights, k, k_scale))
    return np.einsum("ths,th->ts", np.maximum(np.einsum("thd,sd->ths", q, k), 0.0), weights) * k_scale


def index_pool(codes, scales, page_size: int, preshuffle: bool) -> np.ndarray:
    """uint8 ``[pages, page_size * 132]`` that holds ``codes`` ``[slots, 128]`` and ``scales`` ``[slots]``."""
    pages = len(codes) // page_size
    keys = np.asarray(codes, np.uint8).reshape(pages, page_size, 128)
    if preshuffle:
        keys = keys.reshape(pages, page_size // 16, 16, 8, 16).transpose(0, 1, 3, 2, 4)
    scales = np.asarray(scales, "<f4").reshape(pages, page_size).view(np.uint8)
    return np.concatenate([keys.reshape(pages, -1), scales], axis=1)


def index_pool_rows(pool, page_size: int, preshuffle: bool) -> tuple[np.ndarray, np.ndarray]:
    """The other way: codes ``[slots, 128]`` and scales ``[slots]``."""
    pool = np.asarray(pool)
    keys, scales = pool[:, : page_size * 128], pool[:, page_size * 128 :]
    if preshuffle:
        keys = keys.reshape(-1, page_size // 16, 8, 16, 16).transpose(0, 1, 3, 2, 4)
    return keys.reshape(-1, 128), np.ascontiguousarray(scales).view("<f4").reshape(-1)


def assert_kv_rows(rows, k_nope, k_rope, layout: str, fp8: str, kv_scale: float) -> None:
    """uint8 ``rows`` ``[T, row_bytes]`` hold the values by the layout's rule: bit for bit, but for float32 division."""
    rows = np.ascontiguousarray(rows)
    nope, rope = (np.asarray(x).astype(np.float64) for x in (k_nope, k_rope))
    both = np.concatenate([nope, rope], axis=1)
    if layout == "bf16":
        assert_bitwise_equal(rows, both.astype(ml_dtypes.bfloat16).view(np.uint8))
        return
    if layout == "fp8_576":
        x = both / np.float64(np.float32(kv_scale))
        assert_codes_are_nearest(rows, x, fp8, DIVISION * np.abs(x))
        return
    tiles = nope.reshape(-1, 4, 128)
    scale = np.ascontiguousarray(rows[:, 512:528]).view("<f4")
    assert_within_one_ulp(scale, (np.abs(tiles).max(axis=2) / 448).astype(np.float32))
    x = tiles / np.where(scale == 0, 1, scale.astype(np.float64))[..., None]
    assert_codes_are_nearest(rows[:, :512].reshape(tiles.shape), x, fp8, DIVISION * np.abs(x))
    assert_bitwise_equal(rows[:, 528:], rope.astype(ml_dtypes.bfloat16).view(np.uint8))


def kv_values(rows, layout: str, fp8: str, kv_scale: float) -> np.ndarray:
    """float64 ``[N, 576]`` of uint8 rows."""
    rows = np.ascontiguousarray(rows)
    if layout == "bf16":
        return rows.view(ml_dtypes.bfloat16).astype(np.float64)
    if layout == "fp8_576":
        return fp8_values(rows, fp8) * float(np.float32(kv_scale))
    scale = np.repeat(np.ascontiguousarray(rows[:, 512:528]).view("<f4").astype(np.float64), 128, axis=1)
    latent = fp8_values(rows[:, :512], fp8) * scale
    rope = np.ascontiguousarray(rows[:, 528:]).view(ml_dtypes.bfloat16).astype(np.float64)
    return np.concatenate([latent, rope], axis=1)


def sparse_attention(q_nope, q_rope, kv, slots, softmax_scale: float) -> tuple[np.ndarray, np.ndarray]:
    """float64 ``out [T, H, 512]`` and ``lse [T, H]`` over the rows of ``kv`` ``[N, 576]`` that ``slots`` names."""
    q = np.concatenate([np.asarray(q_nope), np.asarray(q_rope)], axis=-1).astype(np.float64)
    out, lse = np.zeros((*q.shape[:2], 512)), np.full(q.shape[:2], -np.inf)
    for t, row in enumerate(np.asarray(slots)):
        keys = kv[[slot for slot in row if slot >= 0]]
        if len(keys):
            scores = q[t] @ keys.T * softmax_scale
            lse[t] = np.logaddexp.reduce(scores, axis=1)
            out[t] = np.exp(scores - lse[t][:, None]) @ keys[:, :512]
    return out, lse


def top_k(logits, start: int, length: int, k: int) -> list[int]:
    """Positions in the window, ascending: by value, NaN after everything, ties by the lower position."""
    window = [float(x) for x in np.asarray(logits)[start : start + max(length, 0)]]

    def rank(p):
        return (1, 0.0, p) if window[p] != window[p] else (0, -window[p], p)

    return sorted(sorted(range(len(window)), key=rank)[:k])


def padded(rows: list[list[int]], k: int) -> np.ndarray:
    out = np.full((len(rows), k), -1, np.int32)
    for t, row in enumerate(rows):
        out[t, : len(row)] = row
    return out
