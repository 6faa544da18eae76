"""Crop and flip for small images (He et al., arXiv 1512.03385, section 4.2), as a function of (seed, row, variant).

No random generator carries a state: the augmentation of a row in an epoch does not depend on its batch or rank, and a
variant that is used again has the same pixels, which a prefix cache needs.
"""

from __future__ import annotations

import numpy as np

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
