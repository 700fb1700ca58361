"""Train VGG16 as a user writes it: a plain module with in-place ReLU, dropout and a `flatten`.

It shows that such a network is cut in stages as it is, without `Sequential`, and that microbatches may be of
uneven sizes. The full network takes seconds per image on a CPU core; start with the reduced one:

    meshwise train examples/vgg16.py:job_small --devices 2 --layout pp=2
    meshwise train examples/vgg16.py:job_uneven_small --devices 2 --layout pp=2
    meshwise train examples/vgg16.py --devices 2 --layout pp=2 --steps 1
"""

from functools import partial

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import Dataset
from torchmetrics.classification import MulticlassAccuracy

import meshwise as mw

NUM_TRAIN = 1497  # of 1,797 images; the other 300 are the test set
UNEVEN = [53] + [96] * 11 + [16]  # samples of each microbatch, 1,125 a step


class VGG16(nn.Module):
    """Classify RGB images by 13 convolutions and 3 linear layers (Simonyan and Zisserman 2014, column D).

    ``width`` scales the number of channels, ``image`` is the side in pixels (a multiple of 32).
    """

    def __init__(self, width: float = 1.0, image: int = 224, classes: int = 1000) -> None:
        super().__init__()
        if image % 32 != 0:
            raise ValueError(f"image={image}: five poolings halve the side, so it must be a multiple of 32")
        c1, c2, c3, c4, hidden = (max(1, round(n * width)) for n in (64, 128, 256, 512, 4096))
        self.conv1_1 = nn.Conv2d(3, c1, 3, padding=1)
        self.conv1_2 = nn.Conv2d(c1, c1, 3, padding=1)
        self.conv2_1 = nn.Conv2d(c1, c2, 3, padding=1)
        self.conv2_2 = nn.Conv2d(c2, c2, 3, padding=1)
        self.conv3_1 = nn.Conv2d(c2, c3, 3, padding=1)
        self.conv3_2 = nn.Conv2d(c3, c3, 3, padding=1)
        self.conv3_3 = nn.Conv2d(c3, c3, 3, padding=1)
        self.conv4_1 = nn.Conv2d(c3, c4, 3, padding=1)
        self.conv4_2 = nn.Conv2d(c4, c4, 3, padding=1)
        self.conv4_3 = nn.Conv2d(c4, c4, 3, padding=1)
        self.conv5_1 = nn.Conv2d(c4, c4, 3, padding=1)
        self.conv5_2 = nn.Conv2d(c4, c4, 3, padding=1)
        self.conv5_3 = nn.Conv2d(c4, c4, 3, padding=1)
        self.linear6 = nn.Linear(c4 * (image // 32) ** 2, hidden)
        self.linear7 = nn.Linear(hidden, hidden)
        self.linear8 = nn.Linear(hidden, classes)
        self.relu = nn.ReLU(inplace=True)
        self.pool = nn.MaxPool2d(2)
        self.dropout6 = nn.Dropout(0.5)
        self.dropout7 = nn.Dropout(0.5)
        self.apply(_initialise)

    def forward(self, x: Tensor) -> Tensor:
        """Map images of shape (batch, 3, image, image) to logits of shape (batch, classes)."""
        x = self.relu(self.conv1_1(x))
        x = self.relu(self.conv1_2(x))
        x = self.pool(x)
        x = self.relu(self.conv2_1(x))
        x = self.relu(self.conv2_2(x))
        x = self.pool(x)
        x = self.relu(self.conv3_1(x))
        x = self.relu(self.conv3_2(x))
        x = self.relu(self.conv3_3(x))
        x = self.pool(x)
        x = self.relu(self.conv4_1(x))
        x = self.relu(self.conv4_2(x))
        x = self.relu(self.conv4_3(x))
        x = self.pool(x)
        x = self.relu(self.conv5_1(x))
        x = self.relu(self.conv5_2(x))
        x = self.relu(self.conv5_3(x))
        x = self.pool(x)
        x = x.flatten(1)
        x = self.dropout6(self.relu(self.linear6(x)))
        x = self.dropout7(self.relu(self.linear7(x)))
        return self.linear8(x)


def _initialise(layer: nn.Module) -> None:
    """Draw weights that keep the scale of activations through 16 layers (He et al. 2015)."""
    if isinstance(layer, (nn.Conv2d, nn.Linear)):
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        nn.init.zeros_(layer.bias)


def vgg16(width: float = 1.0, image: int = 224, classes: int = 1000) -> VGG16:
    """Build the network; the defaults are the published one with 138,357,544 parameters."""
    return VGG16(width=width, image=image, classes=classes)


class DigitImages(Dataset[tuple[Tensor, Tensor]]):
    """Give digits as RGB images of shape (3, image, image), enlarged from 8x8 when one is asked for."""

    def __init__(self, pixels: Tensor, labels: Tensor, image: int) -> None:
        self.pixels = pixels
        self.labels = labels
        self.image = image

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        size = (self.image, self.image)
        large = F.interpolate(self.pixels[index][None, None], size=size, mode="bilinear", align_corners=False)
        return large[0].expand(3, -1, -1), self.labels[index]


def digits(image: int) -> tuple[DigitImages, DigitImages]:
    """Load the digits with values in -1..1, and split them in the same way every time."""
    raw = load_digits()
    pixels = torch.tensor(raw.images, dtype=torch.float32) / 8 - 1
    labels = torch.tensor(raw.target, dtype=torch.int64)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[:NUM_TRAIN], order[NUM_TRAIN:]
    return DigitImages(pixels[train], labels[train], image), DigitImages(pixels[test], labels[test], image)


def job(width: float = 1.0, image: int = 224, classes: int = 1000) -> mw.Job:
    """State the job with the published network: 64 images a step, 8 a microbatch."""
    train, test = digits(image)
    return mw.Job(
        name="vgg16",
        model=partial(vgg16, width=width, image=image, classes=classes),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9, weight_decay=5e-4),
        train_data=train,
        eval_data=test,
        metrics={"accuracy": MulticlassAccuracy(num_classes=classes, average="micro")},
        batch_size=64,
        microbatch_size=8,
    )


def job_small() -> mw.Job:
    """State the job with an eighth of the channels on 32x32 images: seconds, not hours, an epoch."""
    return job(width=0.125, image=32, classes=10).with_fields(name="vgg16_small", epochs=5)


def job_uneven(width: float = 1.0, image: int = 224, classes: int = 1000) -> mw.Job:
    """State the job with 13 uneven microbatches a step: 53, then 11 of 96, then 16, together 1,125 images."""
    uneven = job(width=width, image=image, classes=classes)
    return uneven.with_fields(name="vgg16_uneven", batch_size=sum(UNEVEN), microbatch_size=UNEVEN)


def job_uneven_small() -> mw.Job:
    """State the uneven job with the reduced network."""
    return job_uneven(width=0.125, image=32, classes=10).with_fields(name="vgg16_uneven_small")


if __name__ == "__main__":
    print(mw.train(job_small(), devices=2, layout="pp=2"))
