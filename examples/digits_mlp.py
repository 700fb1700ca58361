"""Train a two-layer network on 1,797 handwritten digits; the first thing to run.

It reaches about 98 % of 300 test images in some seconds, and the same numbers to the last bit on one device
or on several, whatever the layout:

    meshwise train examples/digits_mlp.py --devices 2
    meshwise train examples/digits_mlp.py --devices 2 --layout pp=2 --set epochs=1
    meshwise verify examples/digits_mlp.py --layout dp=2,pp=2 --steps 3
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from torchmetrics.classification import MulticlassAccuracy

import meshwise as mw

NUM_TRAIN = 1497  # of 1,797 images; the other 300 are the test set


class Net(nn.Module):
    """Classify 28x28 images of digits by one hidden layer."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(784, 256)
        self.relu = nn.ReLU()
        self.output = nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Map images of shape (batch, 1, 28, 28) to logits of shape (batch, 10)."""
        x = x.view(-1, 784)
        x = self.relu(self.hidden(x))
        return self.output(x)


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Load the digits at 28x28 with values in 0..1, and split them in the same way every time."""
    raw = load_digits()
    small = torch.tensor(raw.images, dtype=torch.float32).unsqueeze(1) / 16
    images = F.interpolate(small, size=(28, 28), mode="bilinear", align_corners=False)
    labels = torch.tensor(raw.target, dtype=torch.int64)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[:NUM_TRAIN], order[NUM_TRAIN:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def job() -> mw.Job:
    """State the job: 20 epochs of SGD with momentum, 64 samples a step."""
    train, test = digits()
    return mw.Job(
        name="digits_mlp",
        model=Net,
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        train_data=train,
        eval_data=test,
        metrics={"accuracy": MulticlassAccuracy(num_classes=10, average="micro")},
        batch_size=64,
        epochs=20,
    )


if __name__ == "__main__":
    print(mw.train(job(), devices=2))
