"""Seconds of one kernel on a GPU that is not here: products by their tiles, what streams by its bytes.

::

    a product of 4096 x 6144, tiles of 128 x 256:  32 x 24 = 768 tiles
    108 multiprocessors:  768 / 108 = 7.1  ->  8 waves, the last one almost empty: 89% of the rate

The rate itself is what large products reach on the device; small or odd ones reach less, because tiles and waves are
whole ("tile and wave quantization" in NVIDIA's guide to the performance of matrix products).
"""

from __future__ import annotations

import functools
import math

# Tiles (rows, columns) of a product, and what they reach beside the largest: smaller ones read each value more often
# (NVIDIA's guide states the order; shares are those of the reuse of values, rows * columns / (rows + columns)).
TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.94), (128, 64, 0.82), (64, 128, 0.82), (64, 64, 0.7))
SPLITS = (1, 2, 4, 8)  # a long sum may be parted among multiprocessors
TILE_START = 1.5e-6  # seconds: the first values of a tile come from memory, its last ones go there; two round trips


@functools.lru_cache(maxsize=65536)
def product_share(shape: tuple[int, ...], multiprocessors: int, rate: float) -> float:
    """Give the share of ``rate`` (FLOP/s that large products reach) that a product of this shape reaches."""
    number, rows, columns, depth = (max(1, n) for n in shape)
    flops = 2.0 * number * rows * columns * depth
    each = rate / multiprocessors
    best = math.inf
    for high, wide, share in TILES:
        tiles = number * -(-rows // high) * -(-columns // wide)
        for split in SPLITS:
            if split > 1 and (depth < 512 * split or tiles >= multiprocessors):
                continue
            waves = math.ceil(tiles * split / multiprocessors)
            work = 2.0 * high * wide * -(-depth // split)
            best = min(best, waves * (work / (each * share) + TILE_START))
    return min(1.0, flops / rate / best)
