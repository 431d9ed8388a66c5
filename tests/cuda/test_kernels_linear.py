"""Linear layers by kernels: exact on small whole numbers, so slices, tiles and codes are right."""

from __future__ import annotations

import pytest
import torch

from octavo.backends.cuda.constants import PARTIAL_TOKENS, slices, up
from octavo.backends.cuda.host.linear import e4m3, values
from octavo.backends.cuda.kernels import many
from octavo.backends.cuda.kernels.configs import TILES, Tile, many_tile
from octavo.backends.cuda.pack import tiles
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
    parts = slices(w.kind, n, k) if tokens <= PARTIAL_TOKENS else 1
    storage = torch.full((parts, tokens, n + 5), 77.0)
    host, ours = both("linear", act(whole(tokens, k)), w, storage[:, :, :n])
    assert torch.equal(host[2], ours[2])
    assert bool((ours[2].as_strided(storage.shape, storage.stride())[:, :, n:] == 77).all())


@pytest.mark.parametrize("tokens", [3, 80])
@pytest.mark.parametrize(("kind", "group", "minima"), FORMATS)
def test_codes(kind: str, group: int, minima: bool, tokens: int) -> None:
    n, k = 70, 320
    w = coded(kind, n, k, group, minima)
    parts = slices(w.kind, n, k) if tokens <= PARTIAL_TOKENS else 1
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


@pytest.mark.parametrize("scale", [torch.float16, torch.float32])
@pytest.mark.parametrize(("kind", "group", "minima"), FORMATS)
def test_weights(kind: str, group: int, minima: bool, scale: torch.dtype) -> None:
    """Multiplied with 1: the bits of the plain operation, and a rounding from what is meant."""
    w = coded(kind, 64, 128, group, minima)
    w = w._replace(scales=torch.rand(w.scales.shape).add(0.01).to(scale))
    if minima:
        w = w._replace(minima=torch.randn(w.minima.shape).to(scale))
    if kind == "table4":
        w = w._replace(table=torch.randn(16))
    got, ours = both("linear", act(torch.eye(128)), w, torch.zeros(1, 128, 64))
    assert torch.equal(got[2], ours[2])
    assert torch.equal(ours[2][0].T, values(w))
    meant = exact(w)
    slack = 2.0**-8 * meant.abs() + 2.0**-16 * w.scales.max()
    assert bool(((ours[2][0].T - meant).abs() <= slack).all())


def exact(w: Matrix) -> torch.Tensor:
    """The weights `[N, K]` in fp64, one by one."""
    out = torch.zeros(w.codes.shape[0] * 64, w.codes.shape[1] * 64, dtype=torch.float64)
    nibbles, zero = w.kind in ("int4", "table4"), {"int4": 8, "int8": 128}.get(w.kind, 0)
    for n in range(out.shape[0]):
        for k in range(out.shape[1]):
            code = code_at(w.codes[n // 64, k // 64].flatten(), n % 64, k % 64, nibbles)
            place = k // w.group, n // 16 * 16 + n % 8 * 2 + n % 16 // 8
            scale = float(w.scales[place])
            if w.minima is not None:
                out[n, k] = scale * code + float(w.minima[place])
            elif w.kind == "table4":
                out[n, k] = scale * float(w.table[code])
            elif w.kind == "fp8":
                out[n, k] = scale * float(e4m3(torch.tensor([code]))[0])
            else:
                out[n, k] = scale * (code - zero)
    return out


def code_at(tile: torch.Tensor, row: int, column: int, nibbles: bool) -> int:
    """A code of a tile. A lane of a warp has the rows and columns of the first operand of wgmma
    (PTX, "Register Fragments for wgmma.mma_async.m64nNk16"): 16 bytes of each 32 columns."""
    warp, lane = row // 16, row % 8 * 4 + column % 8 // 2
    register = column % 16 // 8 * 2 + row % 16 // 8  # of the four of 16 columns, two values each
    place = (warp * 32 + lane) * 16 + column % 32 // 16 * 8 + register * 2 + column % 2
    if nibbles:
        return int(tile[place]) >> (column // 32 * 4) & 15
    return int(tile[column // 32 * 2048 + place])


def test_tiles_are_read_back() -> None:
    for nibbles in (True, False):
        codes = torch.randint(0, 16 if nibbles else 256, (64, 64)).to(torch.uint8)
        tile = torch.from_numpy(tiles(codes.numpy(), nibbles)).flatten()
        got = [[code_at(tile, n, k, nibbles) for k in range(64)] for n in range(64)]
        assert got == codes.tolist()


def test_many_tokens_add_the_slices_of_few() -> None:
    w, x = bf16(90, 700), act(whole(128, 700))
    few, many = torch.zeros(slices("bf16", 90, 700), 32, 90), torch.zeros(1, 128, 90)
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
    assert found == [(128, 256), (128, 128), (64, 128), (64, 64)]
