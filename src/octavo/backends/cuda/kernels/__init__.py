"""The operations of the CUDA backend as Triton kernels; `host` has their meaning in plain torch."""

from octavo.backends.cuda.kernels.attention import attention
from octavo.backends.cuda.kernels.draw import draw
from octavo.backends.cuda.kernels.embed import embed, give, select
from octavo.backends.cuda.kernels.glu import combine, glu, permute
from octavo.backends.cuda.kernels.head import argmax
from octavo.backends.cuda.kernels.linear import linear
from octavo.backends.cuda.kernels.moe import (
    expert_glu,
    expert_linear,
    expert_sum,
    route,
    sort_pairs,
)
from octavo.backends.cuda.kernels.norm import add_layer_norm, add_norm, norm_add
from octavo.backends.cuda.kernels.rope import copy_slots, rope_kv
from octavo.backends.cuda.kernels.worklist import build_work

__all__ = [
    "add_layer_norm",
    "add_norm",
    "argmax",
    "attention",
    "build_work",
    "combine",
    "copy_slots",
    "draw",
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
