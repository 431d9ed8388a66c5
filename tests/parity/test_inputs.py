"""Inputs beside token ids: embeddings of some tokens, and trees of candidates."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Q

from octavo import _native
from octavo.backends.base import (
    BLOCK,
    Floats,
    ProgramOptions,
    Span,
    StepInput,
    StepLimits,
    tree_spans,
)
from octavo.backends.cpu import load, lower
from octavo.backends.cpu.executor import block_bytes, footprint
from octavo.backends.torch.reference import Reference
from octavo.checkpoint import open_checkpoint
from octavo.checkpoint.dequantize import dequantize
from octavo.models import build_program
from octavo.program import Branch, Builder, Embed, LayerCache, Program, branches
from tests.conftest import Runner
from tests.parity.test_cpu import Divergence, divergence
from tests.small_models import Small, save_gguf, save_hf

LIMIT = 2e-3  # largest difference of any logit between the reference and transformers
LLAMA = Small(heads=6, kv_heads=2, hidden=96)
GEMMA = Small(family="gemma3", heads=4, kv_heads=1, layers=7, head_dim=40)  # scaled, windows of 24
FAMILIES = pytest.mark.parametrize("small", [LLAMA, GEMMA], ids=lambda s: s.family)


def ints(values: object) -> np.ndarray:
    return np.array(values, np.int32)


def tokens(small: Small, count: int, seed: int = 4) -> list[int]:
    return np.random.default_rng(seed).integers(3, small.vocabulary, count).tolist()


def image_rows(width: int, at: list[int]) -> Floats:
    """A row for each of the tokens `at`, always the same for a token."""
    rows = [np.random.default_rng(t).normal(size=width) for t in at]
    return np.array(rows, np.float32).reshape(len(at), width)


def step(
    runner: Runner, ids: list[int], at: list[int], start: int, stop: int, rows: Floats
) -> np.ndarray:
    """Logits of tokens [start, stop); `rows` are the embeddings of tokens `at`."""
    here = [i for i, t in enumerate(at) if start <= t < stop]
    n = stop - start
    runner.executable.step(
        StepInput(
            ints(ids[start:stop]), ints(range(start, stop)), [Span(0, n, start, 0)],
            ints(range(-(-stop // BLOCK))), ints(range(n)), embeddings=rows[here],
            embedding_rows=ints([at[i] - start for i in here]),
        )
    )  # fmt: skip
    return runner.executable.logits(n)


def table_rows(program: Program, ids: list[int]) -> Floats:
    op = next(op for op in program.ops if isinstance(op, Embed) and op.replaceable)
    table = np.array(dequantize(op.table.tensor))
    return np.ascontiguousarray(table[ids] * np.float32(op.scale))


@pytest.mark.parametrize("quant", [None, Q.Q4_1, Q.Q8_0, Q.BF16], ids=str)
@FAMILIES
def test_rows_of_the_table_change_nothing(small: Small, quant: Q | None, tmp_path: Path) -> None:
    """Embeddings that are what the table gives, scale included, give the same bits."""
    if quant is not None and small.family == "llama":
        path = tmp_path / "m.gguf"
        save_gguf(small, path, quant)
    else:
        path = tmp_path
        save_hf(small, path)
    runner = Runner(path)
    ids, at = tokens(small, 60), [0, 1, 7, 8, 9, 40, 59]
    rows = table_rows(runner.program, [ids[t] for t in at])
    assert (step(runner, ids, at, 0, 60, rows) == runner.logits(ids)).all()


@FAMILIES
def test_embeddings_against_transformers(small: Small, tmp_path: Path) -> None:
    """They replace what the table gives after its scale, as an image's do in transformers."""
    oracle = save_hf(small, tmp_path)
    reference = Reference(build_program(open_checkpoint(tmp_path)))
    ids, at = tokens(small, 50), [3, 4, 5, 30]
    rows = torch.from_numpy(image_rows(small.hidden, at))
    with torch.inference_mode():
        given = oracle.get_input_embeddings()(torch.tensor(ids))
        given[at] = rows
        expected = oracle(inputs_embeds=given[None]).logits[0]
    got = reference.logits(ids, embeddings=dict(zip(at, rows, strict=True)))
    assert (expected - got).abs().max().item() <= LIMIT
    assert (expected - reference.logits(ids)).abs().max().item() > 100 * LIMIT


@FAMILIES
def test_embeddings_against_the_reference(small: Small, tmp_path: Path) -> None:
    save_hf(small, tmp_path)
    runner, d = Runner(tmp_path), Divergence()
    reference = Reference(runner.program)
    for seed in range(4):
        ids = tokens(small, 500, seed)
        at = sorted(np.random.default_rng(seed).choice(500, 120, replace=False).tolist())
        rows = image_rows(small.hidden, at)
        given = dict(zip(at, torch.from_numpy(rows), strict=True))
        d.add(reference.logits(ids, embeddings=given), step(runner, ids, at, 0, 500, rows), ids)
    d.check()


@pytest.mark.parametrize("threads", [1, 3])
@FAMILIES
def test_embeddings_in_any_chunks_and_company(small: Small, threads: int, tmp_path: Path) -> None:
    save_hf(small, tmp_path)
    runner = Runner(tmp_path, threads=threads)
    ids, at = tokens(small, 90), [2, 3, 17, 18, 19, 60, 89]
    rows = image_rows(small.hidden, at)
    whole = step(runner, ids, at, 0, 90, rows)
    for cuts in ([0, 18, 19, 89, 90], [0, 1, 2, 3, 64, 90], list(range(0, 91, 15))):
        parts = [step(runner, ids, at, a, b, rows) for a, b in zip(cuts, cuts[1:], strict=False)]
        assert (np.concatenate(parts) == whole).all()
    other = tokens(small, 30, 9)  # a sequence before it, without embeddings
    alone = Runner(tmp_path, threads=threads).logits(other)
    runner.executable.step(
        StepInput(
            ints(other + ids), ints([*range(30), *range(90)]),
            [Span(0, 30, 0, 0), Span(30, 90, 0, 2)], ints(range(2 + 6)), ints(range(120)),
            embeddings=rows, embedding_rows=ints(at) + np.int32(30),
        )
    )  # fmt: skip
    both = runner.executable.logits(120)
    assert (both[:30] == alone).all()
    assert (both[30:] == whole).all()


def random_tree(rng: np.random.Generator, size: int) -> list[int]:
    """Parents of a tree of `size` tokens, depth first."""
    parents: list[int] = []
    path: list[int] = []
    for token in range(size):
        if path and rng.random() < 0.4:
            path = path[: int(rng.integers(0, len(path)))]
        parents.append(path[-1] if path else -1)
        path.append(token)
    return parents


class TreeRunner:
    """A sequence with a tree of candidates after it, each branch in blocks of its own."""

    def __init__(self, runner: Runner, context: list[int]) -> None:
        self.runner, self.context = runner, context
        runner.logits(context)

    def run(self, ids: list[int], parents: list[int]) -> np.ndarray:
        """Logits of the tree's tokens, in one step with another sequence before it."""
        c, executable = len(self.context), self.runner.executable
        shared, taken = list(range(c // BLOCK)), -(-c // BLOCK) + 1
        tables: list[int] = [taken - 1]  # of the other sequence
        offsets = []
        for b in branches(parents):
            end = c + len(b.ancestors) + b.count
            own = list(range(taken, taken + -(-end // BLOCK) - len(shared)))
            taken += len(own)
            if c % BLOCK:
                executable.copy_block(c // BLOCK, own[0])
            offsets.append(len(tables))
            tables += shared + own
        spans, writes = tree_spans(parents, 2, c, offsets)
        depths = {
            b.first + i: len(b.ancestors) + i for b in branches(parents) for i in range(b.count)
        }
        positions = [0, 1] + [c + depths[i] for i in range(len(ids))]
        executable.step(
            StepInput(
                ints([5, 6, *ids]), ints(positions), [Span(0, 2, 0, 0), *spans], ints(tables),
                ints(range(2 + len(ids))), kv_writes=ints(writes).reshape(-1, 2),
            )
        )  # fmt: skip
        self.tables = [
            tables[o : o + -(-(c + len(b.ancestors) + b.count) // BLOCK)]
            for o, b in zip(offsets, branches(parents), strict=True)
        ]
        return executable.logits(2 + len(ids))[2:]


def path_of(b: Branch) -> list[int]:
    return [*b.ancestors, *range(b.first, b.first + b.count)]


def check_tree(path: Path, small: Small, kv_dtype: str, context: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    parents = random_tree(rng, 14)
    ids, before = tokens(small, 14, seed), tokens(small, context, seed + 1)
    runner, plain = (Runner(path, blocks=256, kv_dtype=kv_dtype) for _ in range(2))
    tree = TreeRunner(runner, before)
    got = tree.run(ids, parents)
    for i, b in enumerate(branches(parents)):
        rows = path_of(b)
        expected = plain.logits(before + [ids[r] for r in rows])[context:]
        assert (got[rows] == expected).all()
        # an accepted branch is the sequence: its blocks hold all of it
        table, end = tree.tables[i], context + len(rows)
        table = table + [200] * (end % BLOCK == 0)
        runner.executable.step(
            StepInput(
                ints([7]), ints([end]), [Span(0, 1, end, 0)], ints(table), ints([0])
            )
        )  # fmt: skip
        assert (runner.executable.logits(1) == plain.logits([7], end)).all()


@pytest.mark.parametrize("kv_dtype", ["f32", "bf16", "int8"])
@FAMILIES
def test_a_tree_is_its_paths(small: Small, kv_dtype: str, tmp_path: Path) -> None:
    """Each row's logits are bit for bit those of its path as a plain sequence."""
    save_hf(small, tmp_path)
    for seed, context in enumerate((1, 15, 16, 37, 250)):
        check_tree(tmp_path, small, kv_dtype, context, seed)


@pytest.mark.parametrize("isa", _native.isas())
def test_a_tree_on_every_instruction_set(
    isa: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTAVO_ISA", isa)
    save_hf(LLAMA, tmp_path)
    check_tree(tmp_path, LLAMA, "bf16", 41, 11)


def test_siblings_only(tmp_path: Path) -> None:
    """Every branch is a single token without ancestors: keys are written by who attends to them."""
    save_hf(LLAMA, tmp_path)
    context, ids = tokens(LLAMA, 20), [11, 12, 13]
    got = TreeRunner(Runner(tmp_path), context).run(ids, [-1, -1, -1])
    plain = Runner(tmp_path)
    expected = [plain.logits([*context, t])[-1] for t in ids]
    assert (got == np.array(expected)).all()


@FAMILIES
def test_trees_of_the_reference(small: Small, tmp_path: Path) -> None:
    save_hf(small, tmp_path)
    reference = Reference(build_program(open_checkpoint(tmp_path)))
    context, ids = tokens(small, 40), tokens(small, 12, 8)
    parents = random_tree(np.random.default_rng(3), 12)
    whole = [*range(-1, 39), *(p + 40 for p in parents)]  # what follows -1 follows the context
    got = reference.logits(context + ids, parents=whole)[40:]
    for b in branches(parents):
        rows = path_of(b)
        expected = reference.logits(context + [ids[r] for r in rows])[40:]
        assert (got[rows] - expected).abs().max().item() <= LIMIT


def encoder(folder: Path) -> torch.nn.Module:
    from transformers import BertConfig, BertModel

    torch.manual_seed(6)
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 48}
    config = BertConfig(vocab_size=90, num_hidden_layers=2, max_position_embeddings=40, **sizes)
    model = BertModel(config, add_pooling_layer=False).eval()
    with torch.no_grad():
        model.embeddings.token_type_embeddings.weight.mul_(50)  # the usual 0.02 is hardly seen
    model.save_pretrained(folder)
    return model


def test_segments(tmp_path: Path) -> None:
    oracle = encoder(tmp_path)
    reference = Reference(build_program(open_checkpoint(tmp_path)))
    ids, segments = [4, 9, 60, 7, 8], [0, 0, 1, 1, 0]
    with torch.inference_mode():
        expected = oracle(torch.tensor([ids]), token_type_ids=torch.tensor([segments]))
    got = reference.logits(ids, token_type_ids=segments)
    assert (expected.last_hidden_state[0] - got).abs().max().item() <= LIMIT
    assert (reference.logits(ids) - got).abs().max().item() > 100 * LIMIT


def test_what_is_not_declared_is_refused(tmp_path: Path) -> None:
    encoder(tmp_path)
    program = build_program(open_checkpoint(tmp_path))
    reference = Reference(program)
    for given in ({"embeddings": {0: torch.zeros(32)}}, {"parents": [-1, 0]}):
        with pytest.raises(ValueError, match="no input"):
            reference.logits([1, 2], **given)
    executable = load(lower(program), ProgramOptions(StepLimits(16, 16, 4), 2, "f32"))
    plain = StepInput(ints([1, 2]), ints([0, 1]), [Span(0, 2, 0, 0)], ints([0]), ints([0]))
    executable.step(plain)
    with pytest.raises(ValueError, match="no embeddings"):
        executable.step(
            StepInput(
                plain.ids, plain.positions, plain.spans, plain.block_tables, plain.logits_indices,
                embeddings=np.zeros((1, 32), np.float32), embedding_rows=ints([0]),
            )
        )  # fmt: skip


@pytest.mark.parametrize("kv_dtype", ["f32", "bf16", "int8"])
def test_layers_of_different_heads(kv_dtype: str, tmp_path: Path) -> None:
    """Layers with caches of their own sizes, one of them without."""
    small = Small(heads=4, kv_heads=2, head_dim=16, hidden=64)
    save_hf(small, tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    b = Builder(checkpoint)
    x = b.embed("model.embed_tokens.weight", small.vocabulary, 64)
    for layer, heads, kv_heads, window in ((0, 4, 2, 0), (2, 2, 1, 9), (3, 8, 8, 0)):
        name = f"model.layers.{layer % 3}."
        y = b.rms_norm(x, name + "input_layernorm.weight", 1e-5)
        q = b.linear(y, name + "self_attn.q_proj.weight", 64)
        if layer == 3:
            k, v = q, b.linear(y, name + "self_attn.o_proj.weight", 64)
        else:
            k, v = (b.linear(y, f"{name}self_attn.{p}_proj.weight", 32) for p in "kv")
        a = b.attention(
            q, k, v, layer=layer, heads=heads, kv_heads=kv_heads, scale=(64 // heads) ** -0.5,
            window=window,
        )  # fmt: skip
        x = b.add(x, b.linear(a, name + "self_attn.o_proj.weight", 64))
    y = b.rms_norm(b.select_rows(x), "model.norm.weight", 1e-5)
    logits = b.linear(y, "model.embed_tokens.weight", small.vocabulary)
    program = b.build(2048, logits, hidden=y)
    assert program.cache == (
        LayerCache(2, 16), LayerCache(0, 0), LayerCache(1, 32, 9), LayerCache(8, 8),
    )  # fmt: skip
    lowered, options = lower(program), ProgramOptions(StepLimits(512, 512, 40), 2, kv_dtype)
    each = [_native.cache_block_bytes(c.kv_heads, c.head_dim, kv_dtype) for c in program.cache]
    assert each[1] == 0 and block_bytes(lowered, kv_dtype) == sum(each)
    executable = load(lowered, options)
    assert executable.model.cache_bytes == footprint(lowered, options).cache == 40 * sum(each)
    runner = Runner.__new__(Runner)
    runner.program, runner.executable = program, executable
    reference = Reference(program)
    for seed in range(3):
        ids = tokens(small, 400, seed)
        whole = runner.logits(ids)
        assert divergence(reference.logits(ids), whole) <= 1e-3
        parts = [runner.logits(ids[a : a + 50], a) for a in range(0, 400, 50)]
        assert (np.concatenate(parts) == whole).all()
