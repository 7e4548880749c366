"""What each op should have given, in numpy and float64, and how far from it a result is.

Independent of jax_mla: bytes are taken apart and formulas are written out here once more. Every function takes numpy
arrays and looks at ``rows`` only, some row numbers drawn for this check, where the op treats rows alike.
"""

import ml_dtypes
import numpy as np

FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
FP8_MAX = 448.0
BITS = {"fp8": (3, -6), "bf16": (7, -126)}  # of mantissa; exponent of the least normal number


def half_ulps(stored, exact, dtype: str, scale=1.0) -> float:
    """The largest ``|stored - exact|`` in halves of a unit in the last place of ``dtype`` at ``exact / scale``: 1 at
    most where ``stored`` is the nearest ``dtype`` number times ``scale``."""
    mantissa, least = BITS[dtype]
    with np.errstate(divide="ignore"):
        exponent = np.floor(np.log2(np.abs(exact / scale)))
    ulp = scale * 2.0 ** (np.maximum(exponent, least) - mantissa)
    return _worst(np.abs(stored - exact) / (ulp / 2))


def calc_diff(x, y) -> float:
    """DeepGEMM's: ``1 - 2 <x, y> / (|x|² + |y|²)``, half the squared relative error."""
    return float(np.sum((x - y) ** 2) / np.sum(x * x + y * y))


def _worst(x) -> float:
    """The largest, or infinity if there is a NaN."""
    worst = np.max(x)
    return float(worst) if np.isfinite(worst) else float("inf")


def block_scale(x, ue8m0: bool, floor: float):
    """float64 ``[..., 1]``: the scale of each block, the last axis of ``x``."""
    amax = np.maximum(np.abs(x).max(axis=-1, keepdims=True), floor)
    return 2.0 ** np.ceil(np.log2(amax / FP8_MAX)) if ue8m0 else amax / FP8_MAX


def rope(x, cos_sin, positions, interleaved: bool = False):
    """Rotation of the first 64 of ``x`` ``[T, ..., 128]``: of i with i + 32 (NeoX), or of 2 i with 2 i + 1."""
    cos, sin = np.split(cos_sin.astype(np.float64)[positions], 2, axis=-1)
    shape = (len(positions), *(1,) * (x.ndim - 2), 32)
    cos, sin = cos.reshape(shape), sin.reshape(shape)
    first, second = (slice(0, 64, 2), slice(1, 64, 2)) if interleaved else (slice(0, 32), slice(32, 64))
    rotated = x.copy()
    rotated[..., first] = x[..., first] * cos - x[..., second] * sin
    rotated[..., second] = x[..., second] * cos + x[..., first] * sin
    return rotated


def unpack_index(pool, slots):
    """float64 keys ``[T, 128]`` and scales ``[T, 1]`` at ``slots`` of pages of 64 tokens."""
    page, token = slots // 64, slots % 64
    keys = pool[page[:, None], token[:, None] * 128 + np.arange(128)].view(FP8).astype(np.float64)
    scale = np.ascontiguousarray(pool[page[:, None], 8192 + token[:, None] * 4 + np.arange(4)])
    return keys, scale.view(np.float32).astype(np.float64)


def unpack_kv(rows, layout: str, kv_scale: float, scale: str = "f32"):
    """float64 ``[..., 576]`` of rows of a KV pool. ``scale``: "f32", or "bf16" as a reader sees them that rounds the
    scales of fp8_656 rows."""
    if layout == "bf16":
        return rows.astype(np.float64)
    if layout == "fp8_576":
        return rows.view(FP8).astype(np.float64) * kv_scale
    latent = rows[..., :512].view(FP8).astype(np.float64).reshape(*rows.shape[:-1], 4, 128)
    scales = np.ascontiguousarray(rows[..., 512:528]).view(np.float32)
    if scale == "bf16":
        scales = scales.astype(ml_dtypes.bfloat16)
    rope_part = np.ascontiguousarray(rows[..., 528:]).view(ml_dtypes.bfloat16).astype(np.float64)
    latent = (latent * scales.astype(np.float64)[..., None]).reshape(*rows.shape[:-1], 512)
    return np.concatenate([latent, rope_part], axis=-1)


def changed_elsewhere(before, after, written) -> bool:
    """Whether rows of a pool, each a multiple of 8 bytes, differ other than ``written``."""
    changed = (before.view(np.uint64) != after.view(np.uint64)).any(axis=1)
    changed[written] = False
    return bool(changed.any())


def quantize(x, codes, scales, rows) -> float:
    """Half ulps of FP8 between what reads back and ``x``, in blocks of 128 with fp32 scales."""
    exact = x[rows].astype(np.float64).reshape(len(rows), -1, 128)
    back = codes[rows].view(FP8).astype(np.float64).reshape(exact.shape) * scales[rows][..., None]
    return half_ulps(back, exact, "fp8", block_scale(exact, False, 0.0))


def index_write(
    before, after, slots, k, norm_weight, norm_bias, cos_sin, positions, rows, interleaved=False, ue8m0=True
) -> float:
    """Half ulps of FP8 between the keys that ``after`` holds and the exact ones; infinite if another slot changed.

    - `interleaved`: as ``rope``'s; `ue8m0`: whether scales are powers of two, as ``block_scale``'s. Peers differ there.
    """
    k, weight, bias = (x.astype(np.float64) for x in (k[rows], norm_weight, norm_bias))
    centred = k - k.mean(axis=1, keepdims=True)
    normal = centred / np.sqrt((centred**2).mean(axis=1, keepdims=True) + 1e-6)
    exact = rope(normal * weight + bias, cos_sin, positions[rows], interleaved)
    keys, scale = unpack_index(after, slots[rows])
    if _index_changed_elsewhere(before, after, slots):
        return float("inf")
    return half_ulps(keys * scale, exact, "fp8", block_scale(exact, ue8m0, 1e-4))


def _index_changed_elsewhere(before, after, slots) -> bool:
    changed = before != after
    page, token = (slots // 64)[:, None], (slots % 64)[:, None]
    changed[page, token * 128 + np.arange(128)] = False
    changed[page, 8192 + token * 4 + np.arange(4)] = False
    return bool(changed.any())


def index_query(q, weights, cos_sin, positions, q8, out_weights, rows, interleaved=False, ue8m0=True) -> float:
    """Half ulps of FP8 between the queries, read back by the scales that the weights carry, and the exact ones.

    - `interleaved`, `ue8m0`: as ``index_write``'s."""
    exact = rope(q[rows].astype(np.float64), cos_sin, positions[rows], interleaved)
    folded = weights[rows].astype(np.float64) * 128**-0.5 * q.shape[1] ** -0.5
    scale = out_weights[rows] / folded
    back = q8[rows].astype(np.float64) * scale[..., None]
    return half_ulps(back, exact, "fp8", block_scale(exact, ue8m0, 1e-4))


def index_logits(q8, weights, keys, scale, visible, logits) -> float:
    """``calc_diff`` of rows of logits ``[T, S]``; infinite if -inf stands elsewhere than outside of ``visible``.

    - `q8` ``[T, Hi, 128]``, `weights` ``[T, Hi]``; `keys` ``[T or 1, S, 128]`` float64, `scale` ``[T or 1, S]``.
    """
    exact = np.zeros(logits.shape)
    for t in range(len(q8)):
        k = keys[t % len(keys)]
        exact[t] = weights[t].astype(np.float64) @ np.maximum(q8[t].astype(np.float64) @ k.T, 0)
    exact *= scale
    if not np.array_equal(logits == -np.inf, ~visible):
        return float("inf")
    diff = calc_diff(logits[visible].astype(np.float64), exact[visible])
    return diff if np.isfinite(diff) else float("inf")


def select(logits, k: int, positions, rows) -> float:
    """How many of ``positions`` are not those of a stable sort, ascending."""
    order = np.argsort(-logits[rows], axis=1, kind="stable")[:, :k]
    return float(np.sum(np.sort(order, axis=1) != positions[rows]))


def select_values(logits, k: int, positions, rows) -> float:
    """For peers that give any order, and ties anyhow: how many of the k values are not those of the k largest."""
    largest = np.sort(logits[rows], axis=1)[:, ::-1][:, :k]
    got = np.sort(np.take_along_axis(logits[rows], positions[rows].astype(np.int64), axis=1), axis=1)[:, ::-1]
    return float(np.sum(largest != got))


def kv_write(before, after, slots, k_nope, k_rope, layout: str, kv_scale: float, rows) -> float:
    """Half ulps of what a number is stored in; infinite if another row changed."""
    back = unpack_kv(after[slots[rows]], layout, kv_scale)
    exact = np.concatenate([k_nope, k_rope], axis=1)[rows].astype(np.float64)
    if changed_elsewhere(before, after, slots):
        return float("inf")
    if layout == "bf16":
        return half_ulps(back, exact, "bf16")
    if layout == "fp8_576":
        return half_ulps(back, exact, "fp8", kv_scale)
    tiles = exact[:, :512].reshape(-1, 4, 128)
    latent = half_ulps(back[:, :512].reshape(tiles.shape), tiles, "fp8", block_scale(tiles, False, 0.0))
    return max(latent, half_ulps(back[:, 512:], exact[:, 512:], "bf16"))


def sparse_mla(
    q_nope,
    q_rope,
    pool,
    slots,
    layout: str,
    kv_scale: float,
    softmax_scale: float,
    out,
    lse,
    rows,
    *,
    scale: str = "f32",
    difference_only: bool = False,
) -> float:
    """The largest share of FlashMLA's bars that is used up: out abs 1e-3 + rel 2.01 / 128 and ``calc_diff`` 5e-6; lse
    abs 1e-6 + rel 8.01 / 65536.

    - `lse`: None from a peer that gives none.
    - `scale`: as ``unpack_kv``'s.
    - `difference_only`: ``calc_diff`` itself, of a peer that rounds more.
    """
    worst = []
    for t in rows:
        kv = unpack_kv(pool[slots[t]], layout, kv_scale, scale)
        q = np.concatenate([q_nope[t], q_rope[t]], axis=1).astype(np.float64)
        s = q @ kv.T * softmax_scale
        peak = s.max(axis=1, keepdims=True)
        p = np.exp(s - peak)
        total = p.sum(axis=1, keepdims=True)
        exact, exact_lse = p @ kv[:, :512] / total, (peak + np.log(total))[:, 0]
        got = out[t].astype(np.float64)
        difference = calc_diff(got, exact)
        if difference_only:
            worst.append(difference)
            continue
        worst += [np.max(np.abs(got - exact) / (1e-3 + 2.01 / 128 * np.abs(exact))), difference / 5e-6]
        if lse is not None:
            worst.append(np.max(np.abs(lse[t] - exact_lse) / (1e-6 + 8.01 / 65536 * np.abs(exact_lse))))
    return _worst(worst)


def selection(q8, weights, pool, slots, chosen) -> float:
    """Of one query's selection among ``slots``, how far below the k-th largest score the least selected one lies, in
    units of 0.3 % of the scores' root mean square, which is what ``index_logits`` lets them be off; infinite if a slot
    is selected twice or isn't one of ``slots``.

    - `q8` ``[Hi, 128]``, `weights` ``[Hi]``; `chosen` ``[k]``, k at most the number of ``slots``.
    """
    keys, scale = unpack_index(pool, slots)
    scores = weights.astype(np.float64) @ np.maximum(q8.astype(np.float64) @ keys.T, 0) * scale[:, 0]
    place = {int(slot): i for i, slot in enumerate(slots)}
    found = {place.get(int(slot), -1) for slot in chosen}
    if len(found) != len(chosen) or -1 in found:
        return float("inf")
    kth = np.sort(scores)[-len(chosen)]
    allowed = 3e-3 * np.sqrt(np.mean(scores**2))
    return _worst(max(0.0, kth - scores[list(found)].min()) / allowed)
