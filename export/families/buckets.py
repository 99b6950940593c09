"""T5's relative position bias: distances fall into buckets, each with a number for every head."""

import math

import torch
from torch import Tensor


def bucket_table(numbers: Tensor, *, is_bidirectional: bool, max_distance: int = 128) -> Tensor:
    """
    Return the bias of every distance t - s from -max_distance to max_distance, by its row.

    Distances up to half of the buckets of their direction have one each, longer ones share the
    rest on a logarithmic scale, and all from `max_distance` on fall into the last (Raffel et al.
    2020, section 2.1; `relative_position_bucket` in transformers.models.mpnet.modeling_mpnet and
    `_relative_position_bucket` in transformers.models.t5.modeling_t5, in FP32 as there).  Without
    `is_bidirectional` all later keys fall into the bucket of distance 0.

    Shapes:
        numbers   [buckets, H], what is learned
        returned  [2 * max_distance + 1, H]
    """
    distances = torch.arange(-max_distance, max_distance + 1)
    buckets = len(numbers) // 2 if is_bidirectional else len(numbers)
    offset = (distances > 0).long() * buckets if is_bidirectional else 0
    sizes = distances.abs() if is_bidirectional else (-distances).clamp(min=0)
    exact = buckets // 2
    growth = torch.log(sizes.float() / exact) / math.log(max_distance / exact) * (buckets - exact)
    # log(0) is -inf, which is of no bucket; `where` below does not take it.
    shared = (exact + growth.clamp(min=0).long()).clamp(max=buckets - 1)
    return numbers[offset + torch.where(sizes < exact, sizes, shared)]
