"""Count the models of published runs on fake tensors: each model once, at two microbatch sizes."""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import meshwise as mw
from meshwise.cost.deepen import deepened
from meshwise.cost.profile import Profile
from meshwise.cost.scaling import at_microbatch
from meshwise.runtime.counted import count_sizes

from .language import Language, Masked, Sizes, cross_entropy
from .practice import Practice
from .rows import Row
from .vision import VISION, Image, image_loss, vision_model

COUNTED = (11, 13)  # samples; primes, so that no two products have one shape by chance
FEW_LAYERS = 3  # of a deep transformer are counted; the rest are like the middle one
BERT_VOCABULARY = 30_528
MASKED_TOKENS = {128: 20, 512: 80}  # most predicted tokens of a sequence, as NVIDIA's recipe has them


class Unknown(ValueError):
    """Raised for a row whose model or hardware the benchmark cannot rebuild."""


@functools.cache
def counted(sizes: Sizes | Image, half: bool) -> tuple[Profile, Profile]:
    """Count one model at two sizes."""
    if isinstance(sizes, Sizes) and sizes.layers > FEW_LAYERS:
        few = counted(replace(sizes, layers=FEW_LAYERS), half)
        return deepened(few[0], "layers", sizes.layers), deepened(few[1], "layers", sizes.layers)
    with torch.device("meta"):
        model = build(sizes)
        model = model.to(torch.float16) if half else model
    batches = [batch_of(sizes, size, half) for size in COUNTED]
    loss = image_loss if isinstance(sizes, Image) else cross_entropy
    job = mw.Job(model=model, loss=loss, optimizer=_sgd, train_data=_Nothing(), batch_size=1, batch_norm="microbatch")
    one, two = count_sizes(job, model, batches)
    return one, two


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


class _Nothing(torch.utils.data.Dataset[None]):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> None:
        return None


def build(sizes: Sizes | Image) -> nn.Module:
    """Make a model, on the device that is the default."""
    if isinstance(sizes, Image):
        return vision_model(sizes)
    return Language(sizes) if sizes.causal else Masked(sizes, MASKED_TOKENS.get(sizes.seq, sizes.seq // 6))


def batch_of(sizes: Sizes | Image, size: int, half: bool) -> tuple[Tensor, Tensor]:
    """Make a microbatch without memory."""
    with torch.device("meta"):
        if isinstance(sizes, Image):
            x = torch.empty(size, 3, sizes.side, sizes.side, dtype=torch.float16 if half else torch.float32)
            return x, torch.empty(size, *sizes.target, dtype=torch.float16 if sizes.target and half else torch.long)
        tokens = torch.empty(size, sizes.seq, dtype=torch.long)
        if sizes.causal:
            return tokens, tokens
        return tokens, torch.empty(size, MASKED_TOKENS.get(sizes.seq, sizes.seq // 6), dtype=torch.long)


def sizes_of(row: Row, practice: Practice) -> Sizes | Image:
    """Find the model of a row. Raises Unknown."""
    for name, image in VISION.items():
        if name in row.model:
            return image
    if "u-net" in row.model:
        return _unet(row)
    if not row.layers or not row.hidden:
        raise Unknown("the source does not state the model's size")
    if not row.seq:
        raise Unknown("the source does not state the length of sequences")
    return _language(row, practice)


def _unet(row: Row) -> Image:
    found = re.search(r"b=(\d+),c=(\d+)", row.model)
    if not found:
        raise Unknown("the U-Net's size is not stated")
    return Image(kind="unet", side=192, blocks=int(found.group(1)), channels=int(found.group(2)))


def _language(row: Row, practice: Practice) -> Sizes:
    heads = row.heads or max(1, row.hidden // (64 if row.hidden <= 1024 else 128))
    plain = Sizes(
        layers=row.layers,
        hidden=row.hidden,
        heads=heads,
        kv_heads=row.kv_heads or heads,
        ffn=row.ffn or 4 * row.hidden,
        seq=row.seq,
        vocab=row.vocab or 50_304,
        fused=practice.fused_attention,
    )
    if "bert" in row.model:
        return replace(
            plain, causal=False, vocab=BERT_VOCABULARY, post_norm=True, dropout=0.1, ffn=row.ffn or 4 * row.hidden
        )
    if "llama" in row.family or "llama" in row.model:
        return replace(plain, gated=True, bias=False, rms=True, rotary=True, learned_positions=False, tied=False)
    if "mpt" in row.family:
        return replace(plain, bias=False)
    return replace(plain, dropout=0.1, wide_softmax="megatron-v1" in row.framework)


def profile_of(row: Row, practice: Practice, micro_batch: int) -> Profile:
    """Give the profile of a row's model at a microbatch size."""
    one, two = counted(sizes_of(row, practice), practice.half)
    return _scaled(one, two, micro_batch)


@functools.lru_cache(maxsize=256)
def _scaled_by_id(one: int, two: int, size: int) -> Profile:
    return at_microbatch(_KEPT[one], _KEPT[two], size)


_KEPT: dict[int, Profile] = {}


def _scaled(one: Profile, two: Profile, size: int) -> Profile:
    _KEPT[id(one)], _KEPT[id(two)] = one, two
    return _scaled_by_id(id(one), id(two), size)
