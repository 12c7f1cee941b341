"""An orthogonal rotation that spreads every direction over all coordinates.

Hidden states have outlier dimensions (largest over root mean square about 12), so eight bits a
coordinate would spend most of them on a few. The inner product of two vectors does not change when
both are rotated; a rotated one looks like Gaussian noise, whoever made it, and eight bits are
enough. The rotation is R = (C ⊗ H) S: S a diagonal of fixed random signs, H the Walsh–Hadamard
matrix of order p over √p, C the discrete cosine transform of order m, with width p · m, p the
largest power of two in it.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import fft

MULTIPLE = 64  # widths are padded with zeros to a multiple of this


@dataclass(frozen=True, eq=False)
class Rotation:
    """R for vectors of width d, padded with zeros to `width` = power · order.

    Attributes:
        signs: ±1, float32 [width].
        cosines: C, float64 [order, order]; [[1]] where the width is a power of two.
    """

    d: int
    width: int
    power: int
    order: int
    signs: NDArray[np.float32]
    cosines: NDArray[np.float64]

    @property
    def error(self) -> float:
        """How far a computed R w lies from the exact one, at most, in units of u · ‖w‖.

        u is the unit roundoff of the arithmetic. Every one of the log2(power) stages adds and
        subtracts once: u · ‖w‖ each. A row of C is a sum of `order` products with rounded entries:
        (order + 2) · u · ‖its slice‖, over `order` rows. See docs/exact-scoring.md.
        """
        cosine = math.sqrt(self.order) * (self.order + 2) if self.order > 1 else 0.0
        return 1.01 * (math.log2(self.power) + cosine + 2)

    def apply(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        """R x for rows x, float64 [n, d] → [n, width]."""
        padded = np.zeros((len(x), self.width))
        padded[:, : self.d] = x
        padded *= self.signs
        y: NDArray[np.float64] = padded.reshape(len(x), self.order, self.power)
        half = 1
        while half < self.power:
            z = y.reshape(len(x), self.order, -1, 2, half)
            y = np.stack((z[..., 0, :] + z[..., 1, :], z[..., 0, :] - z[..., 1, :]), axis=-2)
            half *= 2
        y = y.reshape(len(x), self.order, self.power) / math.sqrt(self.power)
        if self.order > 1:
            y = np.matmul(self.cosines, y)
        return np.ascontiguousarray(y.reshape(len(x), self.width))


@functools.cache
def rotation(d: int) -> Rotation:
    """The rotation for width d; always the same one."""
    width = -(-d // MULTIPLE) * MULTIPLE
    power = width & -width
    order = width // power
    signs = np.random.Generator(np.random.PCG64(d)).integers(0, 2, width)
    return Rotation(
        d,
        width,
        power,
        order,
        (2 * signs - 1).astype(np.float32),
        np.asarray(fft.dct(np.eye(order), axis=0, norm="ortho"), dtype=np.float64),
    )
