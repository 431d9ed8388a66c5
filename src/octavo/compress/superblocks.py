"""Encoders of the K formats: 256 weights whose groups share the scale of their scales.

Group grids are found first, then their scales (and minima) are rounded to what the format holds.
That rounding is searched too: each group takes the best of the neighbouring scales, the two shared
factors are solved for by least squares over all 256 weights, and so on while it gains.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from octavo.compress.fit import F32, I32, affine, codes_of, divide, steps_of, symmetric
from octavo.compress.packing import (
    U8,
    bit_planes,
    half,
    pairs_of_halves,
    six_bit_pairs,
    six_bits,
    stack,
    two_bits,
)

ROUNDS = 3
SIZE = 256


class _Factors(NamedTuple):
    """Scales and minima of groups as codes `[n, groups]`, and what one of each stands for `[n]`."""

    d: F32
    scales: I32
    dmin: F32
    minima: I32


class _Groups:
    """Blocks `[n, 256]` in groups, with their weights and the codes that a group may have.

    most, high: the largest code of a scale and of a weight; symmetric grids begin at -most - 1 and
    -high - 1, others at 0.
    """

    def __init__(self, x: F32, w: F32, size: int, high: int, most: int, with_minima: bool) -> None:
        self.shape = (len(x), SIZE // size, size)
        self.x, self.w = x.reshape(self.shape), w.reshape(self.shape)
        self.high, self.most, self.with_minima = high, most, with_minima

    def start(self) -> _Factors:
        """The best grid of each group by itself, its scale and minimum rounded."""
        flat = (-1, self.shape[2])
        x, w = self.x.reshape(flat), self.w.reshape(flat)
        n, groups, _ = self.shape
        if self.with_minima:
            grid = affine(x, w, self.high, below=True)
            scale = np.maximum(grid.scale, 0).reshape(n, groups)
            minimum = -grid.minimum.reshape(n, groups)
            d = half(scale.max(axis=1) / np.float32(self.most))[1]
            dmin = half(minimum.max(axis=1) / np.float32(self.most))[1]
            return _Factors(d, self._scales(scale, d), dmin, self._scales(minimum, dmin))
        scale = symmetric(x, w, -self.high - 1, self.high).scale.reshape(n, groups)
        at = np.abs(scale).argmax(axis=1, keepdims=True)
        widest = np.take_along_axis(scale, at, axis=1)[:, 0]
        d = half(widest / np.float32(-self.most - 1))[1]
        none = np.zeros_like(d)
        return _Factors(d, self._scales(scale, d), none, np.zeros((n, groups), np.int32))

    def _scales(self, values: F32, unit: F32) -> I32:
        low = 0 if self.with_minima else -self.most - 1
        return codes_of(values, unit, low, self.most)

    def codes(self, f: _Factors) -> I32:
        """`[n, groups, size]`."""
        return self._steps(f)[0].astype(np.int32)

    def _steps(self, f: _Factors) -> tuple[F32, F32, F32]:
        """The codes as floats, and the scales and minima of groups `[n, groups, 1]`."""
        scale = (f.d[:, None] * f.scales).astype(np.float32)[:, :, None]
        minimum = (f.dmin[:, None] * f.minima).astype(np.float32)[:, :, None]
        shifted = self.x + minimum
        low = 0 if self.with_minima else -self.high - 1
        return np.clip(steps_of(shifted, scale, shifted), low, self.high), scale, minimum

    def errors(self, f: _Factors) -> F32:
        """Weighted error of each group, `[n, groups]`."""
        lost, scale, minimum = self._steps(f)
        lost *= scale
        lost -= minimum
        lost -= self.x
        lost *= lost
        return np.asarray(np.einsum("ngs,ngs->ng", self.w, lost), np.float32)

    def neighbours(self, f: _Factors) -> _Factors:
        """The same with each group's scale and minimum moved by one where that loses less."""
        best, error = f, self.errors(f)
        low = 0 if self.with_minima else -self.most - 1
        for ds in (-1, 0, 1):
            for dm in (-1, 0, 1) if self.with_minima else (0,):
                moved = f._replace(
                    scales=np.clip(f.scales + ds, low, self.most),
                    minima=np.clip(f.minima + dm, 0, self.most),
                )
                found = self.errors(moved)
                better = found < error
                best = best._replace(
                    scales=np.where(better, moved.scales, best.scales),
                    minima=np.where(better, moved.minima, best.minima),
                )
                error = np.where(better, found, error)
        return best

    def shared(self, f: _Factors) -> _Factors:
        """The same with the least-squares `d` and `dmin` for its codes, where they lose less."""
        a = (f.scales[:, :, None] * self.codes(f)).astype(np.float32).reshape(-1, SIZE)
        b = np.repeat(-f.minima, self.shape[2], axis=1).astype(np.float32)
        x, w = self.x.reshape(-1, SIZE), self.w.reshape(-1, SIZE)
        aa, ab, bb = (w * a * a).sum(1), (w * a * b).sum(1), (w * b * b).sum(1)
        ax, bx = (w * a * x).sum(1), (w * b * x).sum(1)
        det = aa * bb - ab * ab
        both = det > 1e-6 * aa * bb
        d = np.where(both, divide(ax * bb - bx * ab, det), divide(ax - f.dmin * ab, aa))
        dmin = np.where(both, divide(bx * aa - ax * ab, det), f.dmin)
        moved = f._replace(d=half(d)[1], dmin=half(np.maximum(dmin, 0))[1])
        better = self.errors(moved).sum(1) < self.errors(f).sum(1)
        return f._replace(
            d=np.where(better, moved.d, f.d), dmin=np.where(better, moved.dmin, f.dmin)
        )

    def fit(self) -> tuple[_Factors, I32]:
        """Factors, and codes `[n, 256]`."""
        f = self.start()
        for _ in range(ROUNDS):
            f = self.shared(self.neighbours(f))
        return f, self.codes(f).reshape(-1, SIZE)


def q2_k(x: F32, w: F32) -> U8:
    f, codes = _Groups(x, w, 16, 3, 15, True).fit()
    scales = (f.scales | f.minima << 4).astype(np.uint8)
    return np.concatenate([scales, two_bits(codes), half(f.d)[0], half(f.dmin)[0]], axis=1)


def q3_k(x: F32, w: F32) -> U8:
    f, codes = _Groups(x, w, 16, 3, 31, False).fit()
    codes = codes + 4
    parts = [bit_planes(codes, 2), two_bits(codes), six_bits(f.scales + 32), half(f.d)[0]]
    return np.concatenate(parts, axis=1)


def q4_k(x: F32, w: F32) -> U8:
    f, codes = _Groups(x, w, 32, 15, 63, True).fit()
    head = [half(f.d)[0], half(f.dmin)[0], six_bit_pairs(f.scales, f.minima)]
    return np.concatenate([*head, pairs_of_halves(codes)], axis=1)


def q5_k(x: F32, w: F32) -> U8:
    f, codes = _Groups(x, w, 32, 31, 63, True).fit()
    head = [half(f.d)[0], half(f.dmin)[0], six_bit_pairs(f.scales, f.minima)]
    return np.concatenate([*head, bit_planes(codes, 4), pairs_of_halves(codes)], axis=1)


def q6_k(x: F32, w: F32) -> U8:
    f, codes = _Groups(x, w, 16, 31, 127, False).fit()
    codes = codes + 32
    four = (codes & 15).astype(np.uint8).reshape(-1, 2, 2, 64)
    low = (four[:, :, 0] | four[:, :, 1] << 4).reshape(-1, 128)
    high = (codes >> 4).astype(np.uint8).reshape(-1, 2, 4, 32)
    top = stack(high[:, :, 0], high[:, :, 1], high[:, :, 2], high[:, :, 3])
    scales = f.scales.astype(np.int8).view(np.uint8)
    return np.concatenate([low, top.reshape(-1, 64), scales, half(f.d)[0]], axis=1)
