"""Deep models are counted by a few layers: the same profile, or none at all where layers differ."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import meshwise as mw
from meshwise.cost.deepen import deepened
from meshwise.runtime.counted import count_sizes
from meshwise.runtime.shallow import count_shallow, cut_to, repeated_layers


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Deep(nn.Module):
    def __init__(self, widths: tuple[int, ...] = (8,) * 14, skip: bool = False) -> None:
        super().__init__()
        self.inside, self.skip = nn.Linear(4, 8), skip
        self.layers = nn.ModuleList(Layer(w) for w in widths)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inside(x)
        for k, layer in enumerate(self.layers):
            x = x if self.skip and k % 2 else layer(x)
        return self.head(x)


def job(model: nn.Module) -> mw.Job:
    data = [(torch.zeros(4), 0)] * 8
    return mw.Job(model=model, loss=nn.CrossEntropyLoss(), optimizer=torch.optim.Adam, train_data=data, batch_size=8)


def batch(size: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(size, 4), torch.zeros(size, dtype=torch.long)


def test_a_few_layers_tell_what_all_would() -> None:
    model = Deep()
    found = count_shallow(job(model), model, [batch(2), batch(3)])
    whole = count_sizes(job(model), model, [batch(2), batch(3)])
    assert found == whole and len(model.layers) == 14


def test_layers_that_differ_are_all_counted() -> None:
    class Other(Layer):
        pass

    model = Deep()
    model.layers[5] = Other(8)
    assert repeated_layers(model) is None


def test_a_layer_used_twice_is_not_one_of_many() -> None:
    model = Deep()
    model.layers[5].up.weight = model.layers[6].up.weight
    assert repeated_layers(model) is None


def test_layers_that_are_alike_but_do_not_act_alike_are_all_counted() -> None:
    model = Deep(skip=True)
    assert repeated_layers(model) == "layers" and count_shallow(job(model), model, [batch(2)]) is None


def test_a_shallow_model_is_counted_as_it_is() -> None:
    assert repeated_layers(Deep((8,) * 4)) is None


def test_the_layers_come_back_when_counting_fails() -> None:
    model = Deep()
    try:
        with cut_to(model.layers, 3):
            assert len(model.layers) == 3
            raise KeyError
    except KeyError:
        assert len(model.layers) == 14


def test_a_deeper_profile_names_its_layers() -> None:
    model = Deep((8,) * 3)
    few = count_sizes(job(model), model, [batch(2)])[0]
    names = [u.name for u in deepened(few, "layers", 5).units]
    assert [n for n in names if n.endswith("up")] == [f"layers.{k}.up" for k in range(5)]
    assert {n for n in deepened(few, "layers", 5).parameters if "norm.bias" in n} == {
        f"layers.{k}.norm.bias" for k in range(5)
    }
