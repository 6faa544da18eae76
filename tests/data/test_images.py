"""CIFAR from parquet: decoded correctly, augmented reproducibly."""

from __future__ import annotations

import io

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from blocktrain.data.images import MEAN, PAD, STD, ImageConfig, crop_and_flip, open_images
from blocktrain.errors import ConfigError, DataError

Image = pytest.importorskip("PIL.Image", reason="needs pillow")


@pytest.fixture(scope="module")
def cifar(shared_data, tmp_path_factory):
    """The two test shards, one to train on and one to validate on: 10,000 images decode in about 2 seconds."""
    folder = shared_data / "cifar10"
    return open_images(
        ImageConfig(
            source=str(folder / "test-00000-of-00002.parquet"),
            validation=str(folder / "test-00001-of-00002.parquet"),
            cache=str(tmp_path_factory.mktemp("cache")),
        )
    )


def test_cifar_is_decoded_as_published(cifar):
    """Over both shards: 1,000 images per class, and the known mean and deviation of the test set."""
    counts = np.bincount(cifar.train.labels) + np.bincount(cifar.validation.labels)
    assert counts.tolist() == [1000] * 10
    assert cifar.classes == tuple(map(str, range(10)))
    batch = cifar.validation.batch(range(5000))
    assert batch["pixel_values"].shape == (5000, 3, 32, 32)
    assert (batch["pixel_values"].dtype, batch["labels"].dtype) == (torch.float32, torch.int64)
    pixels = batch["pixel_values"] * torch.from_numpy(STD)[:, None, None] + torch.from_numpy(MEAN)[:, None, None]
    torch.testing.assert_close(pixels.mean((0, 2, 3)), torch.tensor([0.4942, 0.4851, 0.4504]), atol=5e-3, rtol=0)
    torch.testing.assert_close(pixels.std((0, 2, 3)), torch.tensor([0.2467, 0.2429, 0.2616]), atol=5e-3, rtol=0)


def test_pixels_equal_those_in_the_file(cifar, shared_data):
    row = (
        pq.ParquetFile(shared_data / "cifar10" / "test-00001-of-00002.parquet")
        .read_row_group(0)
        .slice(7, 1)
        .to_pylist()[0]
    )
    expected = np.asarray(Image.open(io.BytesIO(row["image"]["bytes"])))
    batch = cifar.validation.batch([7])
    pixels = batch["pixel_values"][0].permute(1, 2, 0).numpy() * STD + MEAN
    np.testing.assert_array_equal(np.rint(pixels * 255), expected)
    assert batch["labels"].tolist() == [row["label"]]


def test_augmentation_is_a_function_of_seed_row_and_variant(cifar):
    rows = cifar.train
    one = rows.batch([5, 9, 3], variant=2)["pixel_values"]
    assert torch.equal(one, rows.batch([5, 9, 3], variant=2)["pixel_values"])
    assert torch.equal(one[1:2], rows.batch([9], variant=2)["pixel_values"])  # whatever else is in the batch
    assert not torch.equal(one, rows.batch([5, 9, 3], variant=3)["pixel_values"])
    plain = cifar.validation
    assert torch.equal(plain.batch([1], variant=0)["pixel_values"], plain.batch([1], variant=9)["pixel_values"])


def _one_at_a_time(image, down, right, mirror):
    """The obvious crop and flip of one image."""
    padded = np.zeros((image.shape[0] + 2 * PAD, image.shape[1] + 2 * PAD, 3), np.uint8)
    padded[PAD:-PAD, PAD:-PAD] = image
    crop = padded[down : down + image.shape[0], right : right + image.shape[1]]
    return crop[:, ::-1] if mirror else crop


def test_every_crop_and_flip_is_drawn_equally_often_and_matches_the_obvious_way():
    image = np.random.default_rng(0).integers(1, 256, (6, 5, 3), np.uint8)
    possible = {
        _one_at_a_time(image, down, right, mirror).tobytes(): (down, right, mirror)
        for down in range(2 * PAD + 1)
        for right in range(2 * PAD + 1)
        for mirror in (False, True)
    }
    draws = 20_000
    out = crop_and_flip(np.broadcast_to(image, (draws, 6, 5, 3)), np.arange(draws), seed=1, variant=0)
    drawn = np.array([possible[crop.tobytes()] for crop in out])
    for choices, column in ((9, 0), (9, 1), (2, 2)):
        counts = np.bincount(drawn[:, column], minlength=choices)
        assert np.abs(counts - draws / choices).max() < 5 * np.sqrt(draws / choices)
    pairs = np.bincount(drawn[:, 0] * 18 + drawn[:, 1] * 2 + drawn[:, 2], minlength=162)
    assert ((pairs - draws / 162) ** 2 / (draws / 162)).sum() < 161 + 5 * np.sqrt(2 * 161)  # independent: chi-square


def test_seed_and_variant_draw_differently():
    pixels = np.random.default_rng(0).integers(0, 256, (64, 32, 32, 3), np.uint8)
    rows = np.arange(64)
    outcomes = {
        crop_and_flip(pixels, rows, seed=seed, variant=variant).tobytes() for seed in range(3) for variant in range(3)
    }
    assert len(outcomes) == 9


def _parquet(path, *, size=(32, 32), image="image", label="label", labels=(0, 1, 2), broken=False):
    def encoded(value):
        buffer = io.BytesIO()
        Image.new("RGB", size, (value * 10, 0, 0)).save(buffer, "PNG")
        return b"broken" if broken else buffer.getvalue()

    images = [{"bytes": encoded(value), "path": None} for value in range(len(labels))]
    pq.write_table(pa.table({image: images, label: list(labels)}), path)
    return str(path)


def _open(tmp_path, source, **options):
    return open_images(ImageConfig(source=str(source), cache=str(tmp_path / "cache"), **options))


def test_cifar_100_layout_and_a_folders_splits(tmp_path):
    folder = tmp_path / "cifar100"
    folder.mkdir()
    _parquet(folder / "train-00000-of-00002.parquet", image="img", label="fine_label", labels=(0, 1))
    _parquet(folder / "train-00001-of-00002.parquet", image="img", label="fine_label", labels=(99,))
    _parquet(folder / "test-00000-of-00001.parquet", image="img", label="fine_label", labels=(7,))
    data = _open(tmp_path, folder, augment="none")
    assert (len(data.train), len(data.validation), len(data.classes or ())) == (3, 1, 100)
    assert data.train.batch([2, 0])["labels"].tolist() == [99, 0]


def test_decoded_again_when_a_file_changes(tmp_path):
    train, test = tmp_path / "a.parquet", _parquet(tmp_path / "b.parquet")
    _parquet(train, labels=(0, 1, 2))
    assert len(_open(tmp_path, train, validation=test).train) == 3
    _parquet(train, labels=(0, 1, 2, 3))
    assert len(_open(tmp_path, train, validation=test).train) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"image": "picture"}, r"no column 'image' \(or 'img'\); its columns: picture, label"),
        ({"label": "class"}, r"no column 'label' \(or 'fine_label'\); its columns: image, class"),
        ({"broken": True}, r"row 0: the image cannot be decoded"),
        ({"labels": (0, -1)}, r"row 1: label is -1; labels must be 0, 1, 2"),
        ({"labels": (0, None)}, r"row 1: label is None; labels must be"),
        ({"labels": ()}, r"contains no image|no column"),
    ],
)
def test_wrong_files(tmp_path, options, message):
    with pytest.raises(DataError, match=message):
        _open(tmp_path, _parquet(tmp_path / "a.parquet", **options), validation=_parquet(tmp_path / "b.parquet"))


def test_a_damaged_file_is_a_data_error_and_not_a_storage_error(tmp_path):
    """The file is read while the cache is written; the message must not send the user to look for disk space."""
    path = tmp_path / "a.parquet"
    _parquet(path, labels=range(200))
    data = bytearray(path.read_bytes())
    data[4 : len(data) // 2] = bytes(len(data) // 2 - 4)
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"a.parquet' cannot be read as a .parquet table"):
        _open(tmp_path, path, validation=_parquet(tmp_path / "b.parquet"))


def test_images_of_two_sizes(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    _parquet(folder / "train-0.parquet")
    _parquet(folder / "train-1.parquet", size=(16, 32))
    _parquet(folder / "test.parquet")
    with pytest.raises(
        DataError, match=r"train-1.parquet' row 0: an image of \(32, 16\) pixels among images of \(32, 32\)"
    ):
        _open(tmp_path, folder)


def test_wrong_sources(tmp_path):
    one, other = _parquet(tmp_path / "a.parquet"), _parquet(tmp_path / "b.parquet", labels=(0, 5))
    with pytest.raises(DataError, match=r"no file or folder 'nowhere'.* parquet files"):
        _open(tmp_path, "nowhere")
    with pytest.raises(DataError, match="has no validation or test files; name some with validation"):
        _open(tmp_path, one)
    with pytest.raises(DataError, match=r"a.parquet' would be in both training and validation data"):
        _open(tmp_path, one, validation=one)
    with pytest.raises(DataError, match="validation images have class 5, training images only 0 to 2"):
        _open(tmp_path, one, validation=other)
    with pytest.raises(ConfigError, match="augment is 'cutout'; known: 'crop-flip', 'none'"):
        ImageConfig(source=one, augment="cutout")  # pyright: ignore[reportArgumentType]
