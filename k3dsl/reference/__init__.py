"""The oracle: every operation in plain torch, on any device, rounded where the kernels round.

Read it as the second specification, in this order: rounding (number formats), paged (cache formats), projection
(MlaQuery), attend (the core), combine (merge and MlaValue), layer (all of it), context and parallel (context
parallelism: who holds what, and the step of D ranks), epilogues. The AMD half has modules of its own: mxfp4 (the
four-bit format) and mla_pre (the step and its stages). Sums are float32 with torch's order; the `64` functions do the
same in float64 without rounding and tell how far off a float32 result may be. Requests are looped over, keys never.

float32 products must be float32: leave torch's TF32 switch for matmul off (its default) when this runs on a GPU.
"""

from k3dsl.reference.attend import LOG2E, PROBABILITIES, core, core64, visible_keys
from k3dsl.reference.combine import EMPTY, finite_lse, merge, published, up_project, value, value64
from k3dsl.reference.context import local_len, local_slots, owner
from k3dsl.reference.epilogues import (
    context_pack,
    context_pack_fp8,
    fused_mla_decode_q_concat_kv_cache_insert,
    fused_mla_key_concat_ds_mla_insert,
    fused_mla_key_concat_kv_cache_insert,
    fused_mla_qkv_quant_kv_cache_fp8_insert,
    rotate,
)
from k3dsl.reference.layer import decode_layer, decode_layer64, gate_of, pad_metadata, scales
from k3dsl.reference.paged import (
    ENTRY,
    LATENT,
    RECORD,
    ROPE,
    ds_mla_pack,
    ds_mla_scales,
    ds_mla_unpack,
    entries_of,
    read_entries,
    write_entries,
)
from k3dsl.reference.parallel import (
    ARMED_LSE,
    ARMED_PARTIAL,
    ARMED_QUERY,
    MAILBOX_ROWS,
    Shard,
    gathered,
    head_block,
    parallel_layer,
    partial_mailbox,
    partial_of,
    projected_block,
    query_mailbox,
    received,
    shard_cache,
    split_lengths,
)
from k3dsl.reference.projection import entry, entry64, insert, query, query64, rms_norm
from k3dsl.reference.rounding import bf, bits, f8, f8_clamped

__all__ = [
    "ARMED_LSE",
    "ARMED_PARTIAL",
    "ARMED_QUERY",
    "EMPTY",
    "ENTRY",
    "LATENT",
    "LOG2E",
    "MAILBOX_ROWS",
    "PROBABILITIES",
    "RECORD",
    "ROPE",
    "Shard",
    "bf",
    "bits",
    "context_pack",
    "context_pack_fp8",
    "core",
    "core64",
    "decode_layer",
    "decode_layer64",
    "ds_mla_pack",
    "ds_mla_scales",
    "ds_mla_unpack",
    "entries_of",
    "entry",
    "entry64",
    "f8",
    "f8_clamped",
    "finite_lse",
    "fused_mla_decode_q_concat_kv_cache_insert",
    "fused_mla_key_concat_ds_mla_insert",
    "fused_mla_key_concat_kv_cache_insert",
    "fused_mla_qkv_quant_kv_cache_fp8_insert",
    "gate_of",
    "gathered",
    "head_block",
    "insert",
    "local_len",
    "local_slots",
    "merge",
    "owner",
    "pad_metadata",
    "parallel_layer",
    "partial_mailbox",
    "partial_of",
    "projected_block",
    "published",
    "query",
    "query64",
    "query_mailbox",
    "read_entries",
    "received",
    "rms_norm",
    "rotate",
    "scales",
    "shard_cache",
    "split_lengths",
    "up_project",
    "value",
    "value64",
    "visible_keys",
    "write_entries",
]
