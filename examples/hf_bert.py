"""Train a tiny Hugging Face BERT to tell which module of Python's library a line of code is from.

It shows a model that is not ours, taken as it is: dict batches, an attention mask, and a loss that the model
returns itself, so the job names none. The weights are random; nothing is downloaded. It needs transformers
(`pip install -e ".[transformers]"`):

    meshwise train examples/hf_bert.py --devices 2 --layout pp=2
    meshwise train examples/hf_bert.py:job_small --devices 4 --layout dp=2,pp=2
"""

import argparse
import inspect
import tarfile
import typing
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification

import meshwise as mw

MODULES: tuple[ModuleType, ...] = (argparse, inspect, tarfile, typing)
PADDING, START, FIRST_BYTE = 0, 1, 2  # the vocabulary: two marks, then the 256 bytes
LENGTH = 48  # tokens of a line, the start mark included
SHORTEST = 20  # bytes; shorter lines say too little


class Lines(Dataset[dict[str, Tensor]]):
    """Give lines of code as bytes, padded to one length, each with the number of its module."""

    def __init__(self, lines: list[tuple[bytes, int]]) -> None:
        self.lines = lines

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        line, label = self.lines[index]
        tokens = [START, *(FIRST_BYTE + byte for byte in line[: LENGTH - 1])]
        padding = [PADDING] * (LENGTH - len(tokens))
        return {
            "input_ids": torch.tensor(tokens + padding),
            "attention_mask": torch.tensor([1] * len(tokens) + [0] * len(padding)),
            "labels": torch.tensor(label),
        }


def read_lines(num_lines: int) -> list[tuple[bytes, int]]:
    """Read ``num_lines`` different lines of each module, one module after the other."""
    found: list[tuple[bytes, int]] = []
    for label, module in enumerate(MODULES):
        stripped = (line.strip() for line in Path(str(module.__file__)).read_bytes().splitlines())
        lines = list(dict.fromkeys(line for line in stripped if len(line) >= SHORTEST))
        if len(lines) < num_lines:
            raise ValueError(f"{module.__name__} has {len(lines)} lines, {num_lines} were asked for")
        found += [(line, label) for line in lines[:num_lines]]
    return found


def bert(width: int, depth: int) -> nn.Module:
    """Build the classifier with random weights."""
    config = BertConfig(
        vocab_size=FIRST_BYTE + 256,
        hidden_size=width,
        num_hidden_layers=depth,
        num_attention_heads=4,
        intermediate_size=2 * width,
        max_position_embeddings=LENGTH,
        num_labels=len(MODULES),
        pad_token_id=PADDING,
    )
    return BertForSequenceClassification(config)


def accuracy(output: Any, labels: Tensor) -> float:
    """Give the share of lines whose module is named rightly; a metric may be a plain function."""
    return (output["logits"].argmax(-1) == labels).float().mean().item()


def job(width: int = 64, depth: int = 4, num_lines: int = 400, epochs: int = 5) -> mw.Job:
    """State the job: 32 lines a step, every fifth line kept for the evaluation."""
    lines = read_lines(num_lines)
    return mw.Job(
        name="hf_bert",
        model=partial(bert, width, depth),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
        train_data=Lines([line for index, line in enumerate(lines) if index % 5]),
        eval_data=Lines(lines[::5]),
        metrics={"accuracy": accuracy},
        batch_size=32,
        clip_grad_norm=1.0,
        epochs=epochs,
    )


def job_small() -> mw.Job:
    """State the job with two narrow layers and 80 training lines: three steps, the last one of 16."""
    return job(width=16, depth=2, num_lines=25, epochs=1).with_fields(name="hf_bert_small")


if __name__ == "__main__":
    print(mw.train(job(), devices=2, layout="pp=2"))
