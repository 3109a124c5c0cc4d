"""The fused epilogues as one Triton kernel: a program a (token, head), and one a cache entry. For comparison only."""

import triton
import triton.language as tl


@triton.jit
def quantize(x, scale, FP8: tl.constexpr):
    if FP8:
        return tl.minimum(tl.maximum(x.to(tl.float32) * scale, -448.0), 448.0).to(tl.float8e4nv)
    else:
        return x


@triton.jit
def kernel(
    main, main_t, main_h, rope, rope_t, rope_h, out, q, q_t, q_h, q_out, v, v_t, v_h, v_out,
    kv_c, k_pe, k_pe_t, cache, cache_scales, cache_rope, page_stride, row_stride, slots, page_size,
    q_scale, k_scale, v_scale, cache_scale,
    H: tl.constexpr, MAIN: tl.constexpr, FP8: tl.constexpr, RECORD: tl.constexpr, CACHE: tl.constexpr,
    QV: tl.constexpr, V: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    r = tl.arange(0, 64)
    if head < H:
        m = tl.arange(0, MAIN)
        scale = tl.load(k_scale) if SCALED else 1.0
        row = out + (token * H + head) * (MAIN + 64)
        tl.store(row + m, quantize(tl.load(main + token * main_t + head * main_h + m), scale, FP8))
        tl.store(row + MAIN + r, quantize(tl.load(rope + token * rope_t + head * rope_h + r), scale, FP8))
        if QV:
            n = tl.arange(0, 256)
            scale = tl.load(q_scale)
            x = tl.load(q + token * q_t + head * q_h + n, mask=n < 192)
            tl.store(q_out + (token * H + head) * 192 + n, quantize(x, scale, FP8), mask=n < 192)
        if V:
            n = tl.arange(0, 128)
            scale = tl.load(v_scale) if SCALED else 1.0
            x = tl.load(v + token * v_t + head * v_h + n)
            tl.store(v_out + (token * H + head) * 128 + n, quantize(x, scale, FP8))
    elif CACHE:
        slot = tl.load(slots + token)
        at = (slot // page_size) * page_stride + (slot % page_size) * row_stride
        pe = tl.load(k_pe + token * k_pe_t + r)
        if RECORD:
            tile = tl.arange(0, 4)
            n = tile[:, None] * 128 + tl.arange(0, 128)[None, :]
            x = tl.load(kv_c + token * 512 + n).to(tl.float32)
            t = tl.maximum(tl.max(tl.abs(x), 1) / 448.0, 1e-4)
            scale = tl.exp2(tl.ceil(tl.log2(t)))
            tl.store(cache + at + n, (x / scale[:, None]).to(tl.float8e4nv), mask=slot + 0 * n >= 0)
            tl.store(cache_scales + at // 4 + 128 + tile, scale, mask=slot + 0 * tile >= 0)
            tl.store(cache_rope + at // 2 + 264 + r, pe, mask=slot + 0 * r >= 0)
        else:
            n = tl.arange(0, 512)
            scale = tl.load(cache_scale) if SCALED else 1.0
            tl.store(cache + at + n, quantize(tl.load(kv_c + token * 512 + n), scale, FP8), mask=slot + 0 * n >= 0)
            tl.store(cache + at + 512 + r, quantize(pe, scale, FP8), mask=slot + 0 * r >= 0)
