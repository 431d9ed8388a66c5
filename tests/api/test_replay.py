"""Engines that die of a request: it ends alone, and the others get what they get without it."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from octavo.client import watch as watch_module
from octavo.client.adapter_table import Adapter
from octavo.client.process import EngineProcessClient
from octavo.client.replay import MAX_AHEAD, Replay, Stream
from octavo.client.spawned import ENGINE, Spawned, spawn
from octavo.engine.constraint import TokenTable
from octavo.engine.events import BeamText, Ended, Token
from octavo.engine.open import open_model
from octavo.engine.plan import make_plan
from octavo.engine.request import BeamSearch, Request, SamplingParams
from octavo.errors import EngineFailed, Overloaded, RequestError
from octavo.generate.output import failure
from tests.api.poisoned_engine import POISON
from tests.small_models import Small, save_hf
from tests.waiting import until

ROOT = Path(__file__).parents[2]
NEIGHBOURS = 8
LENGTH = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_hf(Small(), path)
    return path


@asynccontextmanager
async def client_of(
    folder: Path, module: str = ENGINE, spawned: Spawned | None = None, adapters: int = 0
) -> AsyncGenerator[EngineProcessClient, None]:
    model = open_model(folder, adapters > 0)
    plan = make_plan(model.compiled, name="m", context=512, adapters=adapters)
    client = EngineProcessClient(
        str(folder), plan, 320, files=model.checkpoint.states, module=module, spawned=spawned
    )
    client.use(TokenTable([], [], [2]))
    await client.start()
    try:
        yield client
    finally:
        await client.close()


def request(name: str, prompt: list[int], **params: object) -> Request:
    options = {"max_tokens": LENGTH, "temperature": 1.0, "seed": 7, "ignore_eos": True} | params
    return Request(id=name, prompt=prompt, params=SamplingParams(**options))  # type: ignore[arg-type]


def neighbours() -> list[Request]:
    prompts = [[20 + i] * (5 + 9 * i) for i in range(NEIGHBOURS - 1)]
    plain = [request(f"n{i}", prompt) for i, prompt in enumerate(prompts)]
    search = request("beam", [40] * 20, temperature=0, max_tokens=20, beam=BeamSearch(3, 2), seed=None)  # fmt: skip
    return [*plain, search]


@dataclass
class Answer:
    tokens: list[int]
    error: RequestError | None = None


async def ask(client: EngineProcessClient, asked: Request) -> Answer:
    answer = Answer([])
    try:
        async with aclosing(client.submit(asked)) as events:
            async for event in events:
                if isinstance(event, BeamText):
                    answer.tokens += event.tokens
                elif isinstance(event, Token):
                    answer.tokens.append(event.token)
                elif isinstance(event, Ended):
                    answer.error = failure(event)
    except RequestError as e:
        answer.error = e
    return answer


def test_a_process_that_was_started_before_is_the_first_engine(folder: Path) -> None:
    async def run() -> None:
        spawned = spawn()
        async with client_of(folder, spawned=spawned) as client:
            assert client.pid == spawned.process.pid
            first = await ask(client, request("a", [20] * 5))
            os.kill(client.pid, signal.SIGKILL)
            assert (await ask(client, request("a", [20] * 5))) == first
            assert client.pid != spawned.process.pid
        assert spawned.process.returncode == -signal.SIGKILL

    asyncio.run(run())


def test_an_adapter_is_not_loaded_into_an_engine_that_is_gone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends while the adapter's files are looked at; there is a new one soon."""
    looked = Adapter.at

    async def run() -> None:
        async with client_of(folder) as client:

            def at(path: str) -> Adapter:
                assert client.pid is not None
                os.kill(client.pid, signal.SIGKILL)
                until(lambda: not client.ready)
                return looked(path)

            monkeypatch.setattr(Adapter, "at", at)
            with pytest.raises(Overloaded, match="the engine is starting"):
                await client.load_adapter("a", str(folder))
            assert client.adapters == []
            async with asyncio.timeout(60):
                while not client.ready:
                    await asyncio.sleep(0.01)
            assert len((await ask(client, request("b", [5], max_tokens=3))).tokens) == 3

    asyncio.run(run())


@pytest.fixture
def poisoned(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("POISON", f"{request.param}:25")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{os.environ.get('PYTHONPATH', '')}")
    return "tests.api.poisoned_engine"


@pytest.mark.parametrize(
    ("poisoned", "deaths"),
    [(int(signal.SIGABRT), {2}), (int(signal.SIGKILL), set(range(4, 12))), ("raise", {0})],
    indirect=["poisoned"],
    ids=["abort", "kill", "raise"],
)
def test_a_poisonous_request_ends_alone(folder: Path, poisoned: str, deaths: set[int]) -> None:
    """Also those that came after it, and while its engine was being replaced."""
    bad = request("bad", [*POISON, 5])

    async def undisturbed() -> tuple[list[Answer], Answer]:
        async with client_of(folder) as client:
            return await asyncio.gather(*(ask(client, r) for r in neighbours())), await ask(
                client, bad
            )

    async def run() -> tuple[list[Answer], Answer, Answer, EngineProcessClient]:
        async with client_of(folder, poisoned) as client:
            first = neighbours()
            tasks = [asyncio.create_task(ask(client, r)) for r in (*first[:4], bad, *first[4:])]
            while not client.restarts:
                await asyncio.sleep(0.05)
                if tasks[4].done():
                    break
            late = asyncio.create_task(ask(client, request("late", [99])))
            answers = await asyncio.gather(*tasks)
            return answers, await late, await ask(client, request("late", [99])), client

    expected, whole = asyncio.run(undisturbed())
    answers, late, later, client = asyncio.run(run())
    culprit = answers.pop(4)
    assert answers == expected and all(a.error is None for a in answers)
    assert [len(a.tokens) for a in answers[:-1]] == [LENGTH] * (NEIGHBOURS - 1)
    assert isinstance(culprit.error, EngineFailed) and culprit.error.code == "engine_error"
    assert len(culprit.tokens) <= 25 and culprit.tokens == whole.tokens[: len(culprit.tokens)]
    assert late == later and len(late.tokens) == LENGTH and late.error is None
    assert client.restarts in deaths


@pytest.mark.parametrize("poisoned", ["hang"], indirect=True)
def test_a_step_that_never_ends(
    folder: Path, poisoned: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its engine lives and says so, but begins no operation any more."""
    monkeypatch.setattr(watch_module, "TICK", 0.2)
    monkeypatch.setattr(watch_module, "STUCK", 20)

    async def run() -> tuple[Answer, Answer, Answer]:
        async with client_of(folder, poisoned) as client:
            expected = await ask(client, request("a", [30]))
            both = (ask(client, request("b", [30])), ask(client, request("bad", [*POISON, 5])))
            return expected, *await asyncio.gather(*both)

    expected, good, bad = asyncio.run(run())
    assert good == expected and len(good.tokens) == LENGTH
    assert bad.error is not None and bad.error.code == "engine_error"
    assert [r.message for r in caplog.records].count("an engine has ended: stuck") == 2


@pytest.mark.parametrize(
    "odd",
    [
        Request(id="a", prompt=[10**400], params=SamplingParams()),
        Request(id="a", prompt=[1], params=SamplingParams(top_k=1 << 31)),
        Request(id="a", prompt=[1], params=SamplingParams(top_k=10**400)),
        Request(id="a", prompt=[1], params=SamplingParams(seed=1 << 63)),
        Request(id="a", prompt=[1], params=SamplingParams(grammar="\ud800")),
        Request(id="a", prompt=[1], params=SamplingParams(temperature=float("nan"))),
        Request(id="a", prompt=[1], params=SamplingParams(), priority=1 << 80),
        Request(id="a", prompt=[1], params=SamplingParams(stop=["x" * (65 << 20)])),
        Request(id="a", prompt=[1], params=SamplingParams(), adapter="nobody"),
    ],
    ids=["id", "top_k", "more top_k", "seed", "surrogate", "nan", "priority", "long", "adapter"],
)  # fmt: skip
def test_what_cannot_be_sent_is_refused(shared: _Shared, odd: Request) -> None:
    answer = shared.run(ask(shared.client, odd))
    assert isinstance(answer.error, RequestError) and answer.error.status == 400
    good = shared.run(ask(shared.client, request("b", [5])))
    assert len(good.tokens) == LENGTH and shared.client.restarts == 0


class _Shared:
    """A client in a loop of its own."""

    def __init__(self, folder: Path) -> None:
        self.loop = asyncio.new_event_loop()
        self._context = client_of(folder)
        self.client = self.loop.run_until_complete(self._context.__aenter__())

    def run(self, work: object) -> Answer:
        return self.loop.run_until_complete(work)  # type: ignore[arg-type]

    def close(self) -> None:
        self.loop.run_until_complete(self._context.__aexit__(None, None, None))
        self.loop.close()


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[_Shared]:
    shared = _Shared(folder)
    yield shared
    shared.close()


# -- which requests run after a death, on engines that only count --------------------------------


def plain(name: str, length: int) -> Stream:
    return Stream(request(name, [1], max_tokens=length), None)


@pytest.mark.parametrize("seed", range(200))
def test_everybody_but_the_poisonous_gets_all(seed: int) -> None:
    """A model of engine and front: any requests, poisonous from some token on, at any times, with
    kills from outside and steps in a row. Each of the others gets its tokens once, in order."""
    rng = random.Random(seed)
    lengths = [rng.randint(1, 40) for _ in range(rng.randint(1, 8))]
    deadly = {i: rng.randrange(n) for i, n in enumerate(lengths) if rng.random() < 0.25}
    doubt = rng.choice([1, 2])
    kills = {rng.randrange(300) for _ in range(rng.randrange(6))}
    replay, engine, got = Replay(), {}, {}
    streams = [plain(str(i), n) for i, n in enumerate(lengths)]
    arriving, ended, deaths = list(streams), set(), 0

    def turn() -> None:
        back, submitted = replay.turn()
        for name in back:
            del engine[name]
        for stream in submitted:
            engine[stream.name] = [stream, len(stream.given)]

    for step in range(3000):
        if arriving and rng.random() < 0.5:
            replay.add(arriving.pop(0))
        turn()
        if not arriving and not replay.streams:
            break
        ahead = rng.randint(1, MAX_AHEAD)
        if step in kills and len(engine) > 1:  # one that is alone could not be told from a fault
            assert replay.died(1) is None
            engine.clear()
            continue
        dying = [
            s for s, n in engine.values() if deadly.get(int(s.request.id), 1 << 30) < n + ahead
        ]
        if dying:
            deaths += 1
            engine.clear()
            if culprit := replay.died(doubt):
                assert culprit in dying
                ended.add(int(culprit.request.id))
            continue
        for name, (stream, n) in list(engine.items()):
            for token in range(n, min(n + ahead, lengths[int(stream.request.id)])):
                found = replay.find(name)
                assert found is stream
                stream.take(Token(name, token))
            engine[name][1] = len(stream.given)
            if len(stream.given) == lengths[int(stream.request.id)]:
                got[int(stream.request.id)] = list(stream.given)
                del engine[name]
                replay.remove(stream)
        replay.stepped()
    assert not replay.streams and not replay.busy
    assert ended == set(deadly)
    assert got == {i: list(range(n)) for i, n in enumerate(lengths) if i not in deadly}
    assert deaths <= (2 if doubt == 2 else 11) * len(deadly)


def test_what_an_engine_still_had_to_say_is_not_heard() -> None:
    """Events of a submission that was taken back, or of an engine that is gone."""
    replay = Replay()
    a, b = plain("a", 5), plain("b", 5)
    replay.add(a)
    replay.add(b)
    first = [s.name for s in replay.turn()[1]]
    assert [replay.find(n) for n in first] == [a, b]
    assert replay.died(2) is None
    assert [replay.find(n) for n in first] == [None, None]
    assert replay.turn() == ([], [a]) and replay.turn() == ([], [])
    for token in range(MAX_AHEAD + 1):
        a.take(Token(a.name, token))
    assert replay.stepped()
    old = a.name
    assert replay.turn() == ([old], [b]) and replay.find(old) is None
    replay.remove(b)
    assert replay.turn() == ([], [a]) and a.name != old
    assert a.resumed(0).resume == list(range(MAX_AHEAD + 1))


def test_texts_of_a_search_that_was_taken_back_are_not_told() -> None:
    """They come in several frames where they are large: the search is done again, as a whole."""
    replay, stream, alone = Replay(), plain("a", 5), plain("b", 5)
    replay.add(stream)
    replay.turn()
    text = BeamText("a", 0, 2, [5], [0.0], [[]], 0.0, "length", last=False)
    last = BeamText("a", 1, 2, [6], [0.0], [[]], -1.0, "length", last=True)
    assert stream.take(text) == []
    alone.doubt = 2
    replay.add(alone)
    assert replay.turn()[1] == [alone]
    replay.remove(alone)
    assert replay.turn()[1] == [stream]
    assert stream.take(text) == [] and stream.take(last) == [text, last]


def test_a_prediction_is_counted_over_all_engines() -> None:
    replay, stream = Replay(), plain("a", 5)
    replay.add(stream)
    replay.turn()
    stream.take(Token("a", 5, predicted=(2, 1)))
    stream.take(Token("a", 6, predicted=(3, 1)))
    assert replay.died(0) is None
    replay.turn()
    told = [stream.take(Token("a", 7, predicted=p)) for p in ((0, 0), (1, 4))]
    assert told == [[Token("a", 7, predicted=(3, 1))], [Token("a", 7, predicted=(4, 5))]]
    assert replay.died(0) is None
    replay.turn()
    assert stream.take(Token("a", 8)) == [Token("a", 8, predicted=(4, 5))]
