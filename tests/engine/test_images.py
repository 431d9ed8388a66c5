"""Images in an engine: exact in any company, encoded once, no request's business but its own."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from octavo.backends.base import BLOCK
from octavo.client.process import EngineProcessClient
from octavo.engine.constraint import TokenTable
from octavo.engine.drafts import Lookup
from octavo.engine.engine import Engine
from octavo.engine.events import Ended, Token
from octavo.engine.images import EncoderCache, ImageQueue
from octavo.engine.loader import load_executable, load_images
from octavo.engine.open import OpenModel, open_model
from octavo.engine.pace import LEAST, Pace
from octavo.engine.plan import Plan, make_plan
from octavo.engine.policy import PROMPT, FairPolicy
from octavo.engine.request import Request, SamplingParams
from octavo.engine.self_draft import SelfDraft
from octavo.errors import RequestError
from octavo.vision.image import ImageInput
from tests.property.test_speculation import AnyDepths, Knowing
from tests.vision_models import PLACEHOLDER, VISION_FAMILIES, VisionFamily

FAMILIES = ("llava", "gemma3", "llava_next", "qwen2_vl", "qwen2_5_vl", "qwen3_vl")
Result = list[tuple[int, float]]


class Loaded:
    """A model of which engines can be made that share nothing but weights."""

    def __init__(self, family: VisionFamily, folder: Path, threads: int = 2) -> None:
        family.save(folder)
        self.family, self.folder = family, folder
        self.open: OpenModel = open_model(folder)
        self.plan: Plan = make_plan(
            self.open.compiled, name="x", memory="1GiB", threads=threads, encoder=self.open.encoder
        )
        self.threads = threads

    def engine(
        self, capacity: int = 1 << 20, blocks: int = 200, rows: int = 32,
        skip: list[int] | None = None, **options: Any,
    ) -> Engine:  # fmt: skip
        """skip: parts that drafts do without; None: the model writes none."""
        limits = replace(self.plan.limits, blocks=blocks, selected=rows)
        plan = replace(self.plan, limits=limits, image_cache=capacity)
        executable, images = load_executable(self.open, plan), load_images(self.open, plan)
        assert images is not None
        writer = SelfDraft(executable, skip) if skip is not None else None
        return Engine(
            executable, 320, 1000, frozenset({2}), images=images, writer=writer, **options
        )

    def request(self, name: str, seeds: tuple[int, ...], text: int = 9, **more: Any) -> Request:
        """Text, images with a token between them, text."""
        rng = np.random.default_rng(text)
        ids = [int(i) for i in rng.integers(3, 290, text)]
        offsets = []
        for seed in seeds:
            ids.append(298)
            offsets.append(len(ids))
            ids += [PLACEHOLDER] * self.family.image(seed).tokens
        ids += [int(i) for i in rng.integers(3, 290, 4)]
        params = SamplingParams(temperature=0, max_tokens=8, logprobs=0, ignore_eos=True)
        images = [self.family.image(s) for s in seeds]
        given = {"params": params, "images": images, "image_offsets": offsets}
        return Request(id=name, prompt=ids, **(given | more))


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Loaded]:
    return {name: Loaded(VISION_FAMILIES[name], tmp_path_factory.mktemp(name)) for name in FAMILIES}


def queue(engine: Engine) -> ImageQueue:
    assert engine._images is not None
    return engine._images


def run(engine: Engine, requests: list[Request]) -> dict[str, Result]:
    """All at once; leaves nothing behind."""
    out: dict[str, Result] = {r.id: [] for r in requests}
    for r in requests:
        engine.add(r)
    for _ in range(2000):
        if not engine.has_work:
            break
        for event in engine.step():
            assert isinstance(event, Token), event
            out[event.id].append((event.token, event.logprob))
    assert not engine.has_work and not engine.scheduler.running
    assert not queue(engine).cache._users
    return out


@pytest.mark.parametrize("name", FAMILIES)
def test_exact_in_any_company(name: str, loaded: dict[str, Loaded]) -> None:
    m = loaded[name]
    requests = [
        m.request("a", (1,)), m.request("b", (2, 1), text=40), m.request("c", ()),
        m.request("d", (3, 3, 1), text=21), m.request("e", (1,), text=30),
    ]  # fmt: skip
    alone = {r.id: run(m.engine(), [r])[r.id] for r in requests}
    assert all(len(tokens) == 8 for tokens in alone.values())
    assert len({tuple(tokens) for tokens in alone.values()}) == 5
    assert run(m.engine(), requests) == alone  # a batch
    assert run(m.engine(prefix_caching=False), requests) == alone
    warm = m.engine()
    assert run(warm, requests) == alone and run(warm, requests) == alone  # prefix hits
    images = [image for r in requests for image in r.images]
    most = max(map(queue(warm).encoder.bytes, images))
    assert run(m.engine(capacity=2 * most, budget=2 * m.family.tokens), requests) == alone
    largest = -(-max(len(r.prompt) + 8 for r in requests) // BLOCK)
    crowded = [m.engine(blocks=largest + more) for more in range(3, 15, 2)]
    for engine in crowded:
        _encode_for(queue(engine), 60.0)  # else those that come later might end before the next
    assert all(run(engine, requests) == alone for engine in crowded)
    assert sum(engine.stats().preemptions for engine in crowded) > 0
    sliced = m.engine()
    _encode_for(queue(sliced), 0.0)
    assert run(sliced, requests) == alone


@pytest.mark.parametrize("name", FAMILIES)
def test_drafts_after_images(
    name: str, loaded: dict[str, Loaded], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found in texts with images or written without some layers, verified along chains and trees."""
    monkeypatch.setattr("octavo.engine.speculation.LEEWAY", 1e9)
    monkeypatch.setattr("octavo.engine.cost.LEAST_CHANCE", 0.0)
    m = loaded[name]
    params = SamplingParams(temperature=0, max_tokens=24, logprobs=0, ignore_eos=True)
    requests = [
        m.request("a", (1,), params=params), m.request("b", (2, 1), text=40, params=params), m.request("c", (), params=params),
    ]  # fmt: skip
    alone = {r.id: run(m.engine(), [r])[r.id] for r in requests}
    known = {id: [(token, 0.0, [], None) for token, _ in result] for id, result in alone.items()}
    given = [Knowing(known, 1, 0.3), Lookup()]
    found = m.engine(multi_step=0.0, depths=AnyDepths(1), sources=given)
    assert run(found, requests) == alone and run(found, requests) == alone
    assert 0 < found.stats().accepted_lookup < found.stats().drafted_lookup
    own = m.engine(skip=[1], multi_step=0.0, depths=AnyDepths(2), sources=[])
    assert run(own, requests) == alone and own.stats().drafted_self > 0


def _encode_for(images: ImageQueue, seconds: float) -> None:
    """Gives encoding so much time a step, however fast the machine is; 0: for one operation."""
    run = images.encoder.run
    images.encoder.run = lambda _: run(seconds)  # type: ignore[method-assign]


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava_next"])
def test_tokens_after_images_are_where_the_reference_has_them(
    name: str, loaded: dict[str, Loaded]
) -> None:
    """Texts of 2 and of 3 images, and what is drawn after them: log-probabilities as those of
    transformers."""
    m = loaded[name]
    model = m.family.load(m.folder)
    for seeds, text in (((1, 4), 9), ((2, 3, 5), 33)):
        request = m.request("a", seeds, text=text)
        tokens = run(m.engine(budget=40), [request])["a"]
        ids = request.prompt + [token for token, _ in tokens]
        logits = torch.from_numpy(m.family.logits(model, ids, seeds)).log_softmax(-1)
        at = range(len(request.prompt) - 1, len(ids) - 1)
        expected = [float(logits[i, ids[i + 1]]) for i in at]
        assert np.abs(np.array(expected) - [logprob for _, logprob in tokens]).max() < 0.02


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl"])
def test_one_thread_gives_the_same(name: str, loaded: dict[str, Loaded], tmp_path: Path) -> None:
    m = loaded[name]
    single = Loaded(m.family, tmp_path, threads=1)
    request = m.request("a", (1, 2))
    assert run(single.engine(), [request]) == run(m.engine(), [request])


def test_images_matter(loaded: dict[str, Loaded]) -> None:
    m = loaded["llava"]
    first, second = m.request("a", (1,)), m.request("a", (2,))
    assert first.prompt == second.prompt
    engine = m.engine()
    assert run(engine, [first]) != run(engine, [second])  # equal tokens are no equal prefix
    assert engine.stats().cached_tokens < 16


def test_a_second_question_costs_no_encoder_and_no_prefill(loaded: dict[str, Loaded]) -> None:
    m = loaded["llava"]
    engine = m.engine()
    first = m.request("a", (7,))
    end = first.image_offsets[0] + m.family.tokens
    second = Request(
        id="b", prompt=first.prompt[:end] + [11, 12, 13], params=first.params,
        images=first.images, image_offsets=first.image_offsets,
    )  # fmt: skip
    run(engine, [first])
    assert engine.stats().images_encoded == 1
    run(engine, [second])
    stats = engine.stats()
    assert stats.images_encoded == 1 and stats.image_hits == 0
    assert stats.cached_tokens == end
    # elsewhere in a prompt its keys are others, but its embeddings are the same
    run(engine, [m.request("c", (7,), text=30)])
    stats = engine.stats()
    assert stats.images_encoded == 1 and stats.image_hits == 1
    assert stats.image_bytes == m.family.tokens * 64 * 4


def test_an_image_that_is_there_counts_once(loaded: dict[str, Loaded]) -> None:
    """Though its request is preempted while it holds it, and needs it again."""
    m = loaded["llava"]
    engine = m.engine(budget=8, prefix_caching=False)
    run(engine, [m.request("a", (7,))])
    engine.add(m.request("b", (7,), text=6))
    engine.step()
    (sequence,) = engine.scheduler.running
    assert sequence.images[0].embeddings is not None and engine.stats().image_hits == 1
    engine.scheduler.preempt(sequence)
    while engine.has_work:
        engine.step()
    stats = engine.stats()
    assert stats.images_encoded == stats.image_hits == stats.preemptions == 1


def test_salts_share_no_embeddings(loaded: dict[str, Loaded]) -> None:
    """Nor does anybody wait for, or save, what another salt has shown."""
    m = loaded["llava"]
    engine, salts = m.engine(), {"a": "x", "b": "y", "c": "x"}
    asked = [m.request(name, (5,), text=9 + ord(name), salt=salt) for name, salt in salts.items()]
    expected = {r.id: run(m.engine(), [r])[r.id] for r in asked}
    assert [run(engine, [r]) for r in asked] == [{r.id: expected[r.id]} for r in asked]
    assert engine.stats().images_encoded == 2 and engine.stats().image_hits == 1
    assert run(m.engine(), asked) == expected


def test_choices_of_one_prompt_encode_once(loaded: dict[str, Loaded]) -> None:
    engine = loaded["llava"].engine()
    out = run(engine, [loaded["llava"].request(name, (5,)) for name in "abcd"])
    assert len({tuple(tokens) for tokens in out.values()}) == 1
    stats = engine.stats()
    assert stats.images_encoded == 1
    assert stats.cached_tokens == 3 * (len(loaded["llava"].request("a", (5,)).prompt) - 1)


def test_others_decode_while_an_image_is_encoded(loaded: dict[str, Loaded]) -> None:
    """Text before the image is computed meanwhile, and who decodes gets a token every step."""
    m = loaded["llava"]
    engine = m.engine()
    images = queue(engine)
    engine.add(
        m.request(
            "text",
            (),
        )
    )
    while not any(isinstance(e, Token) for e in engine.step()):
        pass
    _encode_for(images, 0.0)
    engine.add(m.request("image", (9,), text=40))
    steps, tokens = 0, 0
    while not images.encoded:
        steps += 1
        tokens += sum(e.id == "text" for e in engine.step() if isinstance(e, Token))
        sequence = engine._requests["image"]
        assert sequence.kv.computed <= sequence.images[0].start
        if tokens == 7:
            break
    assert tokens == steps == 7  # it is done before the image is
    assert engine._requests["image"].kv.computed == 41


def test_an_image_that_is_computed_whole_does_not_wait_for_texts_to_end(
    loaded: dict[str, Loaded], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though it has more tokens than a step beside texts has time for."""
    m = loaded["gemma3"]
    alone = run(m.engine(), [m.request("image", (1,))])["image"]
    engine = m.engine()
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    engine.add(m.request("text", (), params=params))
    while not any(isinstance(e, Token) for e in engine.step()):
        pass
    monkeypatch.setattr(Pace, "fitting", lambda *_: 0)
    assert m.family.image(1).tokens > LEAST
    engine.add(m.request("image", (1,)))
    found: Result = []
    while len(found) < 8:
        events = [e for e in engine.step() if isinstance(e, Token)]
        assert "text" in engine._requests
        found += [(e.token, e.logprob) for e in events if e.id == "image"]
    assert found == alone


def test_a_failing_encoder_fails_only_its_requests(loaded: dict[str, Loaded]) -> None:
    m = loaded["llava"]
    engine = m.engine()
    images, whole = queue(engine), queue(engine).encoder.run
    bad = m.family.image(66).digest

    def poisoned(seconds: float) -> Any:
        if any(image.digest == bad for image in images._batch.values()):
            raise ValueError("no")
        return whole(seconds)

    images.encoder.run = poisoned  # type: ignore[method-assign]
    names = {"a": (1,), "b": (66,), "c": (2,), "d": ()}
    for name, seeds in names.items():
        engine.add(m.request(name, seeds))
    ended: dict[str, str | None] = {}
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, Ended) or (isinstance(event, Token) and event.finish):
                ended[event.id] = event.finish
    assert ended == {"a": "length", "b": "error", "c": "length", "d": "length"}
    free = engine.stats()
    assert free.blocks_held == 0 and not images.cache._users
    assert images.cache.used == 2 * images.encoder.bytes(m.family.image(1))


def test_more_images_than_the_cache_holds(loaded: dict[str, Loaded]) -> None:
    """Each is encoded once: those that are computed, or were found in the prefix cache, no more."""
    m = loaded["llava"]
    engine = m.engine(capacity=2 * m.family.tokens * 64 * 4)
    queue(engine).encoder.batch = 1
    run(engine, [m.request("a", (1, 2, 3, 4, 5))])
    assert engine.stats().images_encoded == 5
    run(engine, [m.request("b", (1, 2, 3, 4, 5, 6))])
    assert engine.stats().images_encoded == 6


def test_beams_hold_images_each_for_itself(loaded: dict[str, Loaded]) -> None:
    m = loaded["llava"]
    engine = m.engine()
    engine.add(m.request("a", (1,)))
    sequence = engine._requests["a"]
    while sequence.images[0].embeddings is None:
        engine.step()
        queue(engine).share(sequence.kv, sequence.images, sequence.kv.pending, 512)
    child = sequence.fork()
    assert child.images[0].embeddings is None
    assert queue(engine).share(child.kv, child.images, 50, 512) > child.images[0].start
    queue(engine).release(child.images)
    assert sequence.images[0].embeddings is not None
    assert queue(engine).cache._users == {sequence.images[0].key: 1}
    engine.abort("a")
    assert not queue(engine).cache._users


def test_text_and_image_may_both_fail(loaded: dict[str, Loaded]) -> None:
    m = loaded["llava"]
    engine = m.engine()

    def broken(*_: Any) -> Any:
        raise ValueError("no")

    engine._executable.step = broken  # type: ignore[method-assign]
    queue(engine).encoder.run = broken  # type: ignore[method-assign]
    engine.add(m.request("a", (1,)))
    events = engine.step()
    assert [(e.id, e.finish) for e in events if isinstance(e, Ended)] == [("a", "error")]
    assert not engine.has_work and engine.stats().blocks_held == 0


def test_who_waits_for_an_image_gives_no_row_to_another(loaded: dict[str, Loaded]) -> None:
    m = loaded["llava"]
    engine = m.engine(rows=2)
    _encode_for(queue(engine), 0.0)
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, prompt_logprobs=0)
    first = m.request("a", (1,))
    engine.add(
        Request(
            id="a", prompt=first.prompt, params=params, images=first.images,
            image_offsets=first.image_offsets,
        )
    )  # fmt: skip
    for name in "bcd":
        engine.add(m.request(name, ()))
    most = 0
    while engine.has_work:
        engine.step()
        most = max(most, len(engine.scheduler.running))
    assert most == 2


def test_aborted_while_it_waits(loaded: dict[str, Loaded]) -> None:
    m = loaded["llava"]
    engine = m.engine()
    images = queue(engine)
    whole = images.encoder.run
    _encode_for(images, 0.0)
    engine.add(m.request("a", (1,)))
    engine.step()
    engine.abort("a")
    assert not engine.has_work and engine.stats().blocks_held == 0
    assert not images._batch and images.cache.used == 0 and images.encoder._step is None
    images.encoder.run = whole  # type: ignore[method-assign]
    assert run(engine, [m.request("b", (2,))]) == run(m.engine(), [m.request("b", (2,))])


def test_an_image_goes_on_while_one_waits_for_it(loaded: dict[str, Loaded]) -> None:
    m = loaded["llava"]
    engine = m.engine()
    images = queue(engine)
    _encode_for(images, 0.0)
    for name in "ab":
        engine.add(m.request(name, (1,), text=9 + ord(name)))
    engine.step()
    engine.abort("a")
    (image,) = images._batch.values()
    assert images.cache.used == images.encoder.bytes(image)
    engine.abort("b")
    assert not images._batch and images.cache.used == 0


def test_an_image_that_cannot_be_begun(loaded: dict[str, Loaded]) -> None:
    m = loaded["llava"]
    engine = m.engine()
    images = queue(engine)
    whole = images.encoder.begin

    def broken(given: list[ImageInput]) -> None:
        if any(image.digest == m.family.image(66).digest for image in given):
            raise MemoryError
        whole(given)

    images.encoder.begin = broken  # type: ignore[method-assign]
    for name, seed in (("a", 1), ("b", 66)):
        engine.add(m.request(name, (seed,)))
    ended: dict[str, str | None] = {}
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, Ended) or (isinstance(event, Token) and event.finish):
                ended[event.id] = event.finish
    assert ended == {"a": "length", "b": "error"}
    assert images.cache.used == images.encoder.bytes(m.family.image(1))
    assert not images.cache._users


def test_encoding_is_work_of_who_asks(loaded: dict[str, Loaded]) -> None:
    """A tenant's images count like tokens of prompts, one that is found again counts nothing."""
    m = loaded["llava"]
    policy = FairPolicy()
    engine = m.engine(policy=policy, prefix_caching=False)
    assert m.open.encoder is not None
    rows = m.open.encoder.vision.rows
    for name, seeds in (("a", (1, 2)), ("b", (1, 2)), ("c", (3, 3))):
        before = policy.work.get("a", 0)
        request = m.request(name, seeds, tenant="a")
        run(engine, [msgspec.structs.replace(request, params=SamplingParams(max_tokens=1))])
        encoded = {"a": 2, "b": 0, "c": 1}[name] * rows
        assert policy.work["a"] - before == PROMPT * (len(request.prompt) + encoded)


def _wrong(m: Loaded) -> Iterator[tuple[dict[str, Any], str]]:
    image, offset = m.family.image(1), m.request("a", (1,)).image_offsets
    yield {"images": [image], "image_offsets": []}, "offset"
    yield {"images": [image], "image_offsets": [offset[0] - 1]}, "placeholders"
    yield {"images": [image], "image_offsets": [-3]}, "placeholders"
    yield {"images": [image, image], "image_offsets": offset * 2}, "placeholders"
    small = ImageInput.of(np.zeros((1, 12, 12, 3), np.uint8), (12, 12), 25)
    yield {"images": [small], "image_offsets": offset}, r"\[1, 12, 12, 3\]"
    pixels = image.array
    yield (
        {"images": [ImageInput.of(pixels, (1, 1), 24)], "image_offsets": offset},
        "24 placeholders",
    )


def test_refusals(loaded: dict[str, Loaded]) -> None:
    m = loaded["llava"]
    engine = m.engine()
    for given, said in _wrong(m):
        with pytest.raises(RequestError, match=said):
            engine.add(m.request("a", (1,), **given))
    with pytest.raises(RequestError, match="prompt_logprobs"):
        gemma = loaded["gemma3"]
        params = SamplingParams(max_tokens=1, prompt_logprobs=1)
        request = gemma.request("a", (1,))
        gemma.engine().add(
            Request(
                id="a", prompt=request.prompt, params=params, images=request.images,
                image_offsets=request.image_offsets,
            )
        )  # fmt: skip
    assert not engine.has_work


def test_a_death_in_the_middle_changes_nothing(loaded: dict[str, Loaded], tmp_path: Path) -> None:
    """Whether images are being encoded then or tokens are drawn."""
    m = Loaded(loaded["llava"].family, tmp_path)
    long = SamplingParams(temperature=0, max_tokens=200, logprobs=0, ignore_eos=True)
    requests = [m.request("a", (1,)), m.request("b", (2, 3)), m.request("c", (), params=long)]
    expected = {r.id: [token for token, _ in run(m.engine(), [r])[r.id]] for r in requests}
    files = m.open.checkpoint.states

    async def ask(client: EngineProcessClient, request: Request, kill: bool) -> list[int]:
        tokens = []
        async with aclosing(client.submit(request)) as events:
            async for event in events:
                assert isinstance(event, Token)
                tokens.append(event.token)
                if kill and len(tokens) == 4:
                    assert client.pid is not None
                    os.kill(client.pid, signal.SIGKILL)
        return tokens

    async def serve() -> dict[str, list[int]]:
        client = EngineProcessClient(str(tmp_path), m.plan, 320, files=files)
        client.use(TokenTable([], [], [2]))
        await client.start()
        try:
            async with asyncio.timeout(120):
                tasks = [ask(client, r, r.id == "c") for r in requests]
                found = await asyncio.gather(*tasks)
            assert client.restarts == 1
            return dict(zip(expected, found, strict=True))
        finally:
            await client.close()

    assert asyncio.run(serve()) == expected


def test_the_plan_counts_what_is_loaded(loaded: dict[str, Loaded]) -> None:
    m = loaded["gemma3"]
    without = make_plan(m.open.compiled, name="x", memory="1GiB", threads=2)
    plan, images = m.plan, load_images(m.open, m.plan)
    assert images is not None
    parts = [images.encoder._tower, *images.encoder._projectors]
    models = [part.model for part in parts]  # type: ignore[attr-defined]
    assert plan.encoder == sum(x.weight_bytes + x.buffer_bytes + x.cache_bytes for x in models)
    together = images.encoder.batch // 64 * images.encoder.bytes(m.family.image(1))
    assert plan.image_cache == images.cache.capacity >= 2 * together
    assert plan.total <= 1 << 30
    assert without.cache - plan.cache - plan.encoder - plan.image_cache < plan.block


def test_cache_keeps_within_its_bytes() -> None:
    cache = EncoderCache(300)
    each = np.zeros(25, np.float32)  # 100 bytes
    for digest in (b"a", b"b", b"c"):
        assert cache.reserve(100)
        cache.put(digest, each)
    assert cache.acquire(b"a") is not None and cache.acquire(b"b") is not None
    assert not cache.reserve(200) and b"c" in cache  # nothing was evicted in vain
    assert cache.reserve(100) and b"c" not in cache
    cache.give_back(100)
    cache.release(b"a")
    assert cache.reserve(200) and b"a" not in cache and b"b" in cache
    assert cache.used == 300
