"""Plan the training of Llama-3 models that no laptop holds; nothing of them is ever allocated.

    meshwise plan examples/llama.py:llama_8b --cluster 2x8xH100
    meshwise plan examples/llama.py:llama_405b --cluster 2048x8xH100
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import meshwise as mw


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """State a Llama-3 model (arXiv:2407.21783, table 3)."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int = 128_256
    sequence: int = 8192


class Attention(nn.Module):
    """Attend to what came before; groups of queries share keys and values."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads, self.kv_heads = sizes.heads, sizes.kv_heads
        self.size = sizes.hidden // sizes.heads
        self.wq = nn.Linear(sizes.hidden, sizes.heads * self.size, bias=False)
        self.wk = nn.Linear(sizes.hidden, sizes.kv_heads * self.size, bias=False)
        self.wv = nn.Linear(sizes.hidden, sizes.kv_heads * self.size, bias=False)
        self.wo = nn.Linear(sizes.heads * self.size, sizes.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Keep the shape (batch, sequence, hidden)."""
        b, s, _ = x.shape
        q = self.wq(x).view(b, s, self.heads, self.size).transpose(1, 2)
        k = self.wk(x).view(b, s, self.kv_heads, self.size).transpose(1, 2)
        v = self.wv(x).view(b, s, self.kv_heads, self.size).transpose(1, 2)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(seen.transpose(1, 2).reshape(b, s, -1))


class FeedForward(nn.Module):
    """Apply a gated linear unit."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.w1 = nn.Linear(sizes.hidden, sizes.ffn, bias=False)
        self.w3 = nn.Linear(sizes.hidden, sizes.ffn, bias=False)
        self.w2 = nn.Linear(sizes.ffn, sizes.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Keep the shape (batch, sequence, hidden)."""
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Layer(nn.Module):
    """Add attention and a feed-forward layer to the stream."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(sizes.hidden), nn.RMSNorm(sizes.hidden)
        self.attention, self.feed_forward = Attention(sizes), FeedForward(sizes)

    def forward(self, x: Tensor) -> Tensor:
        """Keep the shape (batch, sequence, hidden)."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    """Predict the next token."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.hidden)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.hidden)
        self.output = nn.Linear(sizes.hidden, sizes.vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Map (batch, sequence) to (batch, sequence, vocabulary)."""
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


class Tokens(Dataset[tuple[Tensor, Tensor]]):
    """Stand in for a corpus: sequences of one token, and the next tokens."""

    def __init__(self, length: int, count: int = 1 << 20) -> None:
        self.length, self.count = length, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(self.length, dtype=torch.long), torch.zeros(self.length, dtype=torch.long)


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Give the mean cross entropy over all tokens."""
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def job(sizes: Sizes, batch_size: int, name: str) -> mw.Job:
    """Train one of the models in bf16 with AdamW."""
    return mw.Job(
        model=lambda: Llama(sizes),
        loss=loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=8e-5, weight_decay=0.1),
        train_data=Tokens(sizes.sequence),
        batch_size=batch_size,
        precision="bf16",
        clip_grad_norm=1.0,
        name=name,
    )


def llama_8b() -> mw.Job:
    """Give Llama-3 8B with 512 sequences a step."""
    return job(Sizes(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14_336), 512, "llama-8b")


def llama_70b() -> mw.Job:
    """Give Llama-3 70B with 1,024 sequences a step."""
    return job(Sizes(layers=80, hidden=8192, heads=64, kv_heads=8, ffn=28_672), 1024, "llama-70b")


def llama_405b() -> mw.Job:
    """Give Llama-3 405B with 2,048 sequences a step, as it was trained on 16,384 H100."""
    return job(Sizes(layers=126, hidden=16_384, heads=128, kv_heads=8, ffn=53_248), 2048, "llama-405b")
