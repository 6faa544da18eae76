"""The CIFAR ResNets: sizes, shapes, and that real pretrained weights classify real images."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch.nn import functional as F

from blocktrain.chain.discovery import find_chain
from blocktrain.chain.resnet import BASIC_DEPTHS, BOTTLENECK_STAGES, ResNet, resnet
from blocktrain.errors import ConfigError

# He et al. 2015, table 6, in millions.
PUBLISHED = {20: 0.27, 32: 0.46, 44: 0.66, 56: 0.85}


def num_parameters(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("depth", PUBLISHED)
def test_sizes_of_the_published_family(depth: int):
    assert round(num_parameters(resnet(depth)) / 1e6, 2) == PUBLISHED[depth]


def test_the_papers_memory_table_is_that_of_projected_shortcuts():
    """Table 10: 2.01 MB for ResNet-14 trained in full with SGD and momentum, 12 bytes a parameter."""
    projected, padded = (num_parameters(resnet(14, shortcut=kind)) for kind in ("projected", "padded"))
    assert (projected, padded) == (175_258, 172_506)
    assert round(12 * projected / 2**20, 2) == 2.01
    assert round(12 * padded / 2**20, 2) == 1.97


@pytest.mark.parametrize("depth", [*BASIC_DEPTHS, *BOTTLENECK_STAGES])
def test_the_depth_counts_the_convolutions_and_the_head(depth: int):
    with torch.device("meta"):
        model = resnet(depth, num_classes=100)
    convolutions = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Conv2d)]
    assert len([name for name in convolutions if "shortcut" not in name]) + 1 == depth
    units = sum(BOTTLENECK_STAGES[depth]) if depth in BOTTLENECK_STAGES else (depth - 2) // 2
    chain = find_chain(model)
    assert len(chain.layers) == units + 2
    assert sum(p.numel() for mine in chain.owned for p in mine.values()) == sum(p.numel() for p in model.parameters())
    output = model(torch.zeros(2, 3, 32, 32, device="meta"))
    assert tuple(output.logits.shape) == (2, 100)


def test_loss_is_the_mean_cross_entropy_and_absent_without_labels():
    model, x, labels = resnet(8), torch.randn(4, 3, 32, 32), torch.tensor([0, 1, 2, 3])
    output = model(pixel_values=x, labels=labels)
    assert output.loss is not None
    assert torch.equal(output.loss, F.cross_entropy(output.logits, labels))
    assert model(x).loss is None


@pytest.mark.parametrize("model", [resnet(50), resnet(8, shortcut="projected")], ids=["bottleneck", "projected"])
def test_every_parameter_learns(model: ResNet):
    loss = model(torch.randn(2, 3, 32, 32), torch.tensor([0, 1])).loss
    assert loss is not None
    loss.backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in model.parameters())


def test_an_unknown_depth_names_the_known_ones():
    with pytest.raises(ConfigError, match="ResNet depth 18 is unknown; known: 8, 14, 20, 32, 44, 50, 56, 101"):
        resnet(18)


def test_a_shortcut_that_does_not_exist_is_refused():
    with pytest.raises(ConfigError, match="shortcut 'project' is unknown; did you mean 'projected'"):
        resnet(8, shortcut="project")  # pyright: ignore[reportArgumentType] - the point of the test
    with pytest.raises(ConfigError, match="ResNet-50 has projected shortcuts"):
        resnet(50, shortcut="padded")


def test_pretrained_weights_classify_cifar10(shared_data: Path):
    """Weights trained elsewhere load under their own names and classify as their author says: 91.73 % of all 10,000.

    These are 500 of them; the bound is two standard errors of such a sample, sqrt(.9173 * .0827 / 500) = .0123.
    (Measured once on all 10,000: 9,173 right.)
    """
    model = resnet(20).eval()
    model.load_state_dict(load_file(shared_data / "checkpoints/resnet_cifar10/resnet20-12fca82f.safetensors"))
    table = pq.read_table(shared_data / "cifar10/test-00000-of-00002.parquet").slice(0, 500)
    pixels = [np.asarray(Image.open(io.BytesIO(row["bytes"]))) for row in table["image"].to_pylist()]
    x = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2) / 255  # (500, 3, 32, 32)
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    with torch.no_grad():
        logits = model((x - mean[:, None, None]) / std[:, None, None]).logits
    accuracy = (logits.argmax(dim=1) == torch.tensor(table["label"].to_pylist())).float().mean().item()
    assert accuracy == pytest.approx(0.9173, abs=2 * 0.0123)
