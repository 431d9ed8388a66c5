"""The operations in plain torch: what each means. They run on the CPU; rows are independent."""

from octavo.backends.cuda.host.attention import attention, build_work, copy_slots, rope_kv
from octavo.backends.cuda.host.linear import expert_linear, linear
from octavo.backends.cuda.host.moe import expert_glu, expert_sum, route, sort_pairs
from octavo.backends.cuda.host.rows import (
    add_layer_norm,
    add_norm,
    argmax,
    combine,
    embed,
    give,
    glu,
    norm_add,
    permute,
    select,
)

__all__ = [
    "add_layer_norm",
    "add_norm",
    "argmax",
    "attention",
    "build_work",
    "combine",
    "copy_slots",
    "embed",
    "expert_glu",
    "expert_linear",
    "expert_sum",
    "give",
    "glu",
    "linear",
    "norm_add",
    "permute",
    "rope_kv",
    "route",
    "select",
    "sort_pairs",
]
