"""Labelled images in parquet files (CIFAR-10, CIFAR-100): decoded once, then read as normalized, augmented batches.

Training images are cropped and flipped (He et al., arXiv 1512.03385, section 4.2) as a function of (seed, row,
variant). No random generator carries a state: the augmentation of a row in an epoch does not depend on its batch or
rank, and a variant that is used again has the same pixels, which a prefix cache needs.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from blocktrain.data.cache_folder import cache_home, cached_folder
from blocktrain.data.files import Files, SourceFile, files_state, find_files
from blocktrain.data.kinds import DataKind, TrainingData, register
from blocktrain.data.records import table_columns, table_rows
from blocktrain.errors import ConfigError, DataError
from blocktrain.units import format_count

PAD = 4  # zero pixels added on every side before cropping

_U64 = np.uint64


def crop_and_flip(pixels: np.ndarray, rows: np.ndarray, *, seed: int, variant: int) -> np.ndarray:
    """Each image of `pixels`, uint8 (B, H, W, C), shifted by up to 4 pixels in each direction and mirrored with
    probability 1/2.

    rows: the index of each image in the data set, int64 (B,).
    """
    batch, height, width, _ = pixels.shape
    down, right, flip = _draws(rows, seed, variant)
    padded = np.pad(pixels, ((0, 0), (PAD, PAD), (PAD, PAD), (0, 0)))
    across = np.where(flip[:, None], np.arange(width)[::-1], np.arange(width))  # (B, W)
    y = down[:, None] + np.arange(height)  # (B, H)
    x = right[:, None] + across
    return padded[np.arange(batch)[:, None, None], y[:, :, None], x[:, None, :]]


def _draws(rows: np.ndarray, seed: int, variant: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each row two crop offsets in [0, 2 * PAD] and whether to mirror."""
    bits = _mix(np.array([seed], _U64))
    bits = _mix(bits ^ np.array([variant], _U64))
    bits = _mix(bits ^ rows.astype(_U64))  # (B,)
    low = _U64(0xFFFFFFFF)
    places = _U64(2 * PAD + 1)
    # The low 32 bits and the next 31 bits, scaled to offsets; the top bit decides the flip.
    down = ((bits & low) * places) >> _U64(32)
    right = (((bits >> _U64(32)) & (low >> _U64(1))) * places) >> _U64(31)
    return down.astype(np.int64), right.astype(np.int64), (bits >> _U64(63)).astype(bool)


def _mix(bits: np.ndarray) -> np.ndarray:
    """A step of SplitMix64 (Steele, Lea, Flood 2014): every bit of the result depends on every bit of the input."""
    bits = bits + _U64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> _U64(27))) * _U64(0x94D049BB133111EB)
    return bits ^ (bits >> _U64(31))


# The mean and standard deviation of CIFAR-10 per channel, with pixels in [0, 1].
MEAN = np.array([0.4914, 0.4822, 0.4465], np.float32)
STD = np.array([0.2470, 0.2435, 0.2616], np.float32)

IMAGE_COLUMNS = ("image", "img")
LABEL_COLUMNS = ("label", "fine_label")

Augment = Literal["crop-flip", "none"]

_FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class ImageConfig:
    """Which images to train on.

    source: a parquet file or a folder of them, with `train*` and `test*` files.
    validation: another source; none: the source's own validation or test files.
    augment: how training images are augmented; validation images never are.
    cache: a folder for the decoded pixels; none: blocktrain's folder in the user's cache.
    """

    source: str
    validation: str | None = None
    augment: Augment = "crop-flip"
    cache: str | None = None

    def __post_init__(self) -> None:
        if self.augment not in ("crop-flip", "none"):
            raise ConfigError(f"augment is '{self.augment}'; known: 'crop-flip', 'none'")


class ImageRows:
    """Decoded images, memory-mapped, with their labels."""

    def __init__(self, folder: Path, *, augment: Augment = "none", seed: int = 0):
        """Map a folder that `open_images` filled: `pixels.npy`, uint8 (N, H, W, 3), and `labels.npy`, int64 (N,)."""
        try:
            self._pixels = np.load(folder / "pixels.npy", mmap_mode="r")
            self.labels = np.load(folder / "labels.npy")
        except (OSError, ValueError) as error:
            raise DataError(f"'{folder}' is not a folder of decoded images ({error}); delete it") from error
        self.folder = folder
        self.augment: Augment = augment
        self._seed = seed

    def __len__(self) -> int:
        return len(self._pixels)

    def __repr__(self) -> str:
        _, height, width, _ = self._pixels.shape
        return f"ImageRows({format_count(len(self))} images of {height}x{width}, augment {self.augment})"

    @property
    def fingerprint(self) -> str:
        """Names these images; the name of the folder depends on the files that they were decoded from."""
        return f"{self.folder.parent.name}/{self.folder.name}, augment {self.augment}, seed {self._seed}"

    def weights(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """One prediction per image: ones, int64 (B,)."""
        return np.ones(len(indices), np.int64)

    def batch(self, indices: Sequence[int] | np.ndarray, *, variant: int = 0) -> dict[str, torch.Tensor]:
        """Images `indices` as `pixel_values`, float32 (B, 3, H, W), and their `labels`, int64 (B,).

        `variant` numbers the augmentations of an image; the trainer passes the epoch. Without augmentation it changes
        nothing.
        """
        rows = np.asarray(indices, np.int64)
        pixels = self._pixels[rows]
        if self.augment == "crop-flip":
            pixels = crop_and_flip(pixels, rows, seed=self._seed, variant=variant)
        values = pixels * (1 / (255 * STD)) - MEAN / STD  # (B, H, W, 3) float32
        return {
            "pixel_values": torch.from_numpy(values).permute(0, 3, 1, 2).contiguous(),
            "labels": torch.from_numpy(self.labels[rows]),
        }


def open_images(config: ImageConfig, *, seed: int = 0) -> TrainingData[ImageRows]:
    """The images of `config`, decoded now if they are not in the cache yet; `seed` decides the augmentation.

    The columns are those of Hugging Face's CIFAR-10 and CIFAR-100: `image` or `img`, and `label` or `fine_label`.
    Raises `DataError` when files or columns are missing, an image cannot be decoded or differs in size, or a label has
    no class; `StorageError` when the cache cannot be written.
    """
    training_files, validation_files = _split_files(config)

    def decoded(files: tuple[SourceFile, ...]) -> Path:
        home = cache_home(config.cache)
        return cached_folder(
            home,
            "images",
            source=[str(file.path.resolve()) for file in files],
            key={"format": _FORMAT},
            state=files_state({"train": files}, home),
            write=lambda folder: _decode(files, folder),
        )

    train = ImageRows(decoded(training_files), augment=config.augment, seed=seed)
    validation = ImageRows(decoded(validation_files))
    num_classes = int(train.labels.max()) + 1
    if int(validation.labels.max()) >= num_classes:
        raise DataError(
            f"validation images have class {int(validation.labels.max())}, training images only 0 to "
            f"{num_classes - 1} ('{config.source}')"
        )
    return TrainingData(
        unit="images",
        train=train,
        validation=validation,
        units_per_row=1,
        classes=tuple(str(number) for number in range(num_classes)),
        augmented=config.augment != "none",
        fingerprint=train.fingerprint,
    )


def _split_files(config: ImageConfig) -> tuple[tuple[SourceFile, ...], tuple[SourceFile, ...]]:
    """Training and validation files; the two sets are disjoint."""
    files = _files(config.source)
    if "train" not in files:
        raise DataError(f"'{config.source}' has no training files, only {' and '.join(files)} files")
    other = files if config.validation is None else _files(config.validation)
    validation = other.get("validation") or other.get("test")
    if config.validation is not None:
        validation = validation or other.get("train")
    if not validation:
        raise DataError(f"'{config.source}' has no validation or test files; name some with validation")
    for shared in {file.path.resolve() for file in files["train"]} & {file.path.resolve() for file in validation}:
        raise DataError(f"'{shared}' would be in both training and validation data")
    return files["train"], validation


def _files(source: str) -> Files:
    path = Path(source).expanduser()
    if not path.exists() and not path.is_symlink():
        raise DataError(f"no file or folder '{source}' (looked in '{Path.cwd()}'); images are read from parquet files")
    return find_files(path, {".parquet"})


def _decode(files: tuple[SourceFile, ...], folder: Path) -> None:
    """Write `pixels.npy` and `labels.npy`, one image after the other.

    The pixels are appended and not written through a memory map, which on a full disk kills the process by a signal.
    """
    labels: list[int] = []
    size: tuple[int, ...] | None = None
    with (folder / "pixels.npy").open("wb") as file:
        for place, image, label in _examples(files):
            pixels = _pixels(image, place)
            if size is None:
                size = pixels.shape
                _write_header(file, (0, *size))
            if pixels.shape != size:
                raise DataError(f"{place}: an image of {pixels.shape[:2]} pixels among images of {size[:2]}")
            if not isinstance(label, int) or label < 0:
                raise DataError(f"{place}: label is {label}; labels must be 0, 1, 2, ...")
            file.write(pixels.data)
            labels.append(label)
        if size is None:
            raise DataError(f"'{files[0].path}' contains no image")
        file.seek(0)
        _write_header(file, (len(labels), *size))  # numpy reserves room in the header for a larger count
    np.save(folder / "labels.npy", np.array(labels, np.int64))


def _write_header(file: io.BufferedIOBase, shape: tuple[int, ...]) -> None:
    np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": shape})


def _examples(files: tuple[SourceFile, ...]) -> Iterator[tuple[str, object, object]]:
    """The place of each example for an error message, its encoded image, and its label."""
    for file in files:
        known = table_columns(file.path)
        image, label = (_first(names, known, file) for names in (IMAGE_COLUMNS, LABEL_COLUMNS))
        for row, example in enumerate(table_rows(file.path, [image, label])):
            yield f"'{file.path}' row {row}", example[image], example[label]


def _first(names: Sequence[str], known: Sequence[str], file: SourceFile) -> str:
    for name in names:
        if name in known:
            return name
    raise DataError(f"'{file.path}' has no column '{names[0]}' (or '{names[1]}'); its columns: {', '.join(known)}")


def _pixels(image: object, place: str) -> np.ndarray:
    """One image, uint8 (H, W, 3), from its encoded bytes or from Hugging Face's struct of bytes and path."""
    try:
        from PIL import Image
    except ImportError as error:
        raise DataError('images are decoded by Pillow; pip install "blocktrain[images]"') from error
    data = image.get("bytes") if isinstance(image, dict) else image
    if not isinstance(data, bytes):
        raise DataError(f"{place}: the image has no bytes (a path alone is not followed)")
    try:
        with Image.open(io.BytesIO(data)) as picture:
            return np.asarray(picture.convert("RGB"))
    except (OSError, ValueError) as error:
        raise DataError(f"{place}: the image cannot be decoded: {error}") from error


register(
    DataKind(
        name="images",
        config=ImageConfig,
        open=open_images,
        describe=lambda config: f"Images: `{config.source}`.",
        has_variants=True,
    )
)
