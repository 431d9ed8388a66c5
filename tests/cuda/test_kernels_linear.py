"""Linear layers by kernels: exact on small whole numbers, so slices, tiles and codes are right."""

from __future__ import annotations

import pytest
import torch

from octavo.backends.cuda.constants import PARTIAL_TOKENS, slices, up
from octavo.backends.cuda.kernels import many
from octavo.backends.cuda.kernels.configs import TILES, Tile, many_tile
from octavo.backends.cuda.tensors import Matrix
from tests.cuda.both import act, bf16, both, coded, kernels, whole

FORMATS = [
    ("int4", 32, False), ("int4", 16, True), ("int4", 128, True), ("int8", 32, False),
    ("int8", 16, True), ("table4", 32, False), ("fp8", 128, False),
]  # fmt: skip


def weights(kind: str, n: int, k: int, group: int = 0, minima: bool = False) -> Matrix:
    return bf16(n, k) if kind == "bf16" else coded(kind, n, k, group, minima)


@pytest.mark.parametrize("tokens", [1, 24, 96])
@pytest.mark.parametrize(("n", "k"), [(100, 600), (130, 300), (64, 64)])
def test_slices(tokens: int, n: int, k: int) -> None:
    w = bf16(n, k)
    parts = slices(n, k) if tokens <= PARTIAL_TOKENS else 1
    storage = torch.full((parts, tokens, n + 5), 77.0)
    host, ours = both("linear", act(whole(tokens, k)), w, storage[:, :, :n])
    assert torch.equal(host[2], ours[2])
    assert bool((ours[2].as_strided(storage.shape, storage.stride())[:, :, n:] == 77).all())


@pytest.mark.parametrize("tokens", [3, 80])
@pytest.mark.parametrize(("kind", "group", "minima"), FORMATS)
def test_codes(kind: str, group: int, minima: bool, tokens: int) -> None:
    n, k = 70, 320
    w = coded(kind, n, k, group, minima)
    parts = slices(n, k) if tokens <= PARTIAL_TOKENS else 1
    x = act(whole(tokens, k))
    host, ours = both("linear", x, w, torch.zeros(parts, tokens, n))
    assert torch.equal(host[2], ours[2])
    assert bool(host[2].any())


def test_every_code() -> None:
    """Each of 16 or 256 codes, multiplied with 1; 0x7f of fp8 is 480."""
    for kind in ("int4", "table4", "int8", "fp8"):
        w = coded(kind, 64, 64, 32)
        codes = torch.arange(64 * w.codes.shape[-1]).reshape(w.codes.shape).to(torch.uint8)
        table = torch.linspace(-1, 1, 16).pow(3) if kind == "table4" else None
        w = w._replace(codes=codes, table=table, scales=torch.full_like(w.scales, 0.75))
        host, ours = both("linear", act(torch.eye(64)), w, torch.zeros(1, 64, 64))
        assert torch.equal(host[2], ours[2]), kind


def test_many_tokens_add_the_slices_of_few() -> None:
    w, x = bf16(90, 700), act(whole(128, 700))
    few, many = torch.zeros(slices(90, 700), 32, 90), torch.zeros(1, 128, 90)
    kernels.linear(x[:32], w, few)
    kernels.linear(x, w, many)
    assert torch.equal(many[0, :32], few.sum(0))


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(("n", "k", "tokens"), [(200, 320, 300), (130, 700, 70)])
def test_tiles(tile: Tile, n: int, k: int, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever computes it; with several tiles of tokens beside each other."""
    monkeypatch.setattr(many, "many_tile", lambda *_: tile)
    monkeypatch.setattr(many, "BESIDE", 2)
    host, ours = both("linear", act(whole(tokens, k)), bf16(n, k), torch.zeros(1, tokens, n))
    assert torch.equal(host[2], ours[2])


def test_rows_that_no_descriptor_can_read() -> None:
    n, k, tokens = 130, 704, 100
    x, w = act(whole(tokens, k)), bf16(n, k)
    assert many.described(x) and many.described(w.codes)
    odd = torch.zeros(tokens, k + 4, dtype=torch.bfloat16)[:, :k]
    odd.copy_(x)
    assert not many.described(odd)
    expected, found = torch.zeros(1, tokens, n), torch.zeros(1, tokens, n)
    kernels.linear(x, w, expected)
    kernels.linear(odd, w, found)
    assert torch.equal(found, expected)


@pytest.mark.parametrize(("kind", "group", "minima"), FORMATS)
def test_codes_become_bf16(kind: str, group: int, minima: bool) -> None:
    """The same values, and with them the same sums."""
    n, k, tokens = 130, 320, 80
    w, x = coded(kind, n, k, group, minima), act(whole(tokens, k))
    unpacked = torch.full((up(n), up(k)), 77.0, dtype=torch.bfloat16)
    host, ours = both("linear", x, w, torch.zeros(1, tokens, n), unpacked)
    assert torch.equal(host[3], ours[3])
    assert torch.equal(host[2], ours[2])
    direct = torch.zeros(1, tokens, n)
    kernels.linear(x, w, direct)
    assert torch.equal(ours[2], direct)


def test_the_tile_that_takes_the_fewest_waves() -> None:
    found = [many_tile(n, t)[:2] for n, t in [(28672, 2048), (4096, 512), (4096, 256), (1024, 128)]]
    assert found == [(128, 256), (128, 128), (64, 128), (64, 32)]
