"""Language models of the published runs: decoders of the GPT and Llama kinds, and BERT."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """State a transformer. ``fused`` attention keeps no scores; ``gated``: three matrices in the feed-forward layer."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    seq: int
    vocab: int
    causal: bool = True
    fused: bool = True
    gated: bool = False
    bias: bool = True
    rms: bool = False
    rotary: bool = False
    learned_positions: bool = True
    tied: bool = True
    dropout: float = 0.0
    post_norm: bool = False
    wide_softmax: bool = False  # scores are made fp32, scaled, masked and normalised one after the other


def drop(x: Tensor, share: float) -> Tensor:
    """Drop values as GPUs do it, in one kernel that keeps a mask of bytes."""
    return torch.native_dropout(x, share, True)[0] if share else x


def norm(sizes: Sizes) -> nn.Module:
    """Make the model's kind of normalisation."""
    return nn.RMSNorm(sizes.hidden) if sizes.rms else nn.LayerNorm(sizes.hidden, bias=sizes.bias)


class Attention(nn.Module):
    """Attend, with one product for queries, keys and values."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes, self.size = sizes, sizes.hidden // sizes.heads
        self.qkv = nn.Linear(sizes.hidden, (sizes.heads + 2 * sizes.kv_heads) * self.size, bias=sizes.bias)
        self.out = nn.Linear(sizes.heads * self.size, sizes.hidden, bias=sizes.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Keep the shape (batch, sequence, hidden)."""
        s, (batch, length, _) = self.sizes, x.shape
        parts = self.qkv(x).view(batch, length, s.heads + 2 * s.kv_heads, self.size).transpose(1, 2)
        q, k, v = parts.split((s.heads, s.kv_heads, s.kv_heads), dim=1)
        if s.rotary:
            q, k = rotate(q), rotate(k)
        seen = self._fused(q, k, v) if s.fused else self._plain(q, k, v)
        return self.out(seen.transpose(1, 2).reshape(batch, length, -1))

    def _fused(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        groups = self.sizes.heads != self.sizes.kv_heads
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.sizes.causal, enable_gqa=groups)

    def _plain(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        batch, heads, length, size = q.shape
        flat = [t.reshape(batch * heads, length, size) for t in (q, k, v)]
        scores = torch.bmm(flat[0], flat[1].transpose(1, 2))
        if self.sizes.wide_softmax:
            scores = self._masked(scores.float() * size**-0.5)
        weights = scores.softmax(-1)
        weights = drop(weights.to(q.dtype), self.sizes.dropout)
        return torch.bmm(weights, flat[2]).view(batch, heads, length, size)

    def _masked(self, scores: Tensor) -> Tensor:
        length = scores.shape[-1]
        mask = torch.ones(length, length, dtype=torch.bool, device=scores.device)
        return scores.masked_fill(mask, -10_000.0)


def rotate(x: Tensor) -> Tensor:
    """Turn pairs of features by their position, as one kernel that reads and writes."""
    return x * 1.0


class FeedForward(nn.Module):
    """Widen, bend, and narrow again."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.up = nn.Linear(sizes.hidden, sizes.ffn, bias=sizes.bias)
        self.gate = nn.Linear(sizes.hidden, sizes.ffn, bias=sizes.bias) if sizes.gated else None
        self.down = nn.Linear(sizes.ffn, sizes.hidden, bias=sizes.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Keep the shape (batch, sequence, hidden)."""
        if self.gate is None:
            return self.down(F.gelu(self.up(x)))
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    """Add attention and a feed-forward layer to the stream."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.norm1, self.attention = norm(sizes), Attention(sizes)
        self.norm2, self.feed_forward = norm(sizes), FeedForward(sizes)

    def forward(self, x: Tensor) -> Tensor:
        """Keep the shape (batch, sequence, hidden)."""
        share = self.sizes.dropout
        if self.sizes.post_norm:
            x = self.norm1(x + drop(self.attention(x), share))
            return self.norm2(x + drop(self.feed_forward(x), share))
        x = x + drop(self.attention(self.norm1(x)), share)
        return x + drop(self.feed_forward(self.norm2(x)), share)


class Language(nn.Module):
    """Predict a token at every position."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.token = nn.Embedding(sizes.vocab, sizes.hidden)
        self.position = nn.Embedding(sizes.seq, sizes.hidden) if sizes.learned_positions else None
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.layers))
        self.norm = norm(sizes)
        self.output = nn.Linear(sizes.hidden, sizes.vocab, bias=False)
        if sizes.tied:
            self.output.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (batch, sequence) to (batch, sequence, vocabulary)."""
        x = self.token(tokens)
        if self.position is not None:
            x = x + self.position(torch.arange(tokens.shape[1], device=tokens.device))
            x = drop(x, self.sizes.dropout)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


class Masked(nn.Module):
    """Predict the masked tokens, 15 percent of all, as BERT does."""

    def __init__(self, sizes: Sizes, most: int) -> None:
        super().__init__()
        self.sizes, self.most = sizes, most
        self.token = nn.Embedding(sizes.vocab, sizes.hidden)
        self.position = nn.Embedding(sizes.seq, sizes.hidden)
        self.norm = norm(sizes)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.layers))
        self.dense = nn.Linear(sizes.hidden, sizes.hidden)
        self.last = norm(sizes)
        self.output = nn.Linear(sizes.hidden, sizes.vocab, bias=False)
        self.output.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (batch, sequence) to (batch, masked positions, vocabulary)."""
        x = self.norm(self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device)))
        for layer in self.layers:
            x = layer(x)
        masked = x[:, : self.most].contiguous()
        return self.output(self.last(F.gelu(self.dense(masked))))


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """Give the mean cross entropy over all tokens, in fp32."""
    return F.cross_entropy(output.flatten(0, 1).float(), target.flatten())
