"""A small vision transformer for CIFAR-10, and the images it learns from, for the command line.

    apoptosis train experiments/small_vit.py:make --data experiments/small_vit.py:batches --optimizer adamw \
        --learning-rate 0.002 --weight-decay 0.05 --epochs 10 --out data/small_vit

0.3 M parameters, patches of 4×4: what can be trained on a CPU in half an hour, as something to prune. The best epoch is
that of the last 2,000 training images; the test images are not read. `untrained.py --network small_vit --weights data`
prunes it.
"""

from pathlib import Path

from cifar import load_cifar

from apoptosis.data import Augmentation, Batches
from apoptosis.models import ViT, ViTOptions, vit

CIFAR = Path(__file__).parents[1] / "data" / "cifar10.npz"
NUM_HELD_OUT = 2000


def make() -> ViT:
    sizes = ViTOptions(
        image_size=32, patch_size=4, width=96, depth=4, num_heads=4, mlp_width=192, num_classes=10
    )
    return vit(sizes)


def batches() -> dict[str, Batches]:
    images, labels = load_cifar(CIFAR).train
    moved = Augmentation(pad=4)
    return {
        "training": Batches(
            images[:-NUM_HELD_OUT],
            labels[:-NUM_HELD_OUT],
            size=100,
            shuffle_seed=0,
            augmentation=moved,
        ),
        "validation": Batches(images[-NUM_HELD_OUT:], labels[-NUM_HELD_OUT:], size=500),
    }
