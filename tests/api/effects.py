"""What each field that a request may have does, checked on one reply against another."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from octavo.server.resume import TOKENS, Follower
from tests.api.server import Server
from tests.waiting import until

# A template that shows what it is given.
TEMPLATE = """{% if word is defined %}{{ word }}
{% endif %}{% if tools %}Tools: {{ tools | tojson }}
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% if not loop.last or m.role != "assistant" or add_generation_prompt %}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
ROUTES = {"chat": "/v1/chat/completions", "text": "/v1/completions"}
CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
TOOL = {"type": "function", "function": {"name": "f"}}
END = 2  # <|im_end|> in SmolLM2's vocabulary
Reply = dict[str, Any]


class Asking:
    """Sends requests to one route."""

    def __init__(self, server: Server, route: str) -> None:
        self.server, self.route = server, route

    @property
    def chat(self) -> bool:
        return self.route == "chat"

    def body(self, **fields: Any) -> Reply:
        prompt: Reply = {"prompt": "The best thing about"}
        if self.chat:
            prompt = {"messages": [{"role": "user", "content": "hi"}]}
        return {"model": "smollm2", "max_tokens": 8, "seed": 3, "temperature": 1} | prompt | fields

    def reply(self, **fields: Any) -> Reply:
        status, reply = self.server.post(ROUTES[self.route], self.body(**fields))
        assert status == 200, reply
        return reply  # type: ignore[no-any-return]

    def chunks(self, **fields: Any) -> list[Reply]:
        data = json.dumps(self.body(stream=True, **fields)).encode()
        status, text = self.server.call("POST", ROUTES[self.route], data)
        assert status == 200 and text.endswith("\n\ndata: [DONE]\n\n"), text
        return [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n")[:-2]]

    def text(self, choice: Reply) -> str:
        return str(choice["message"]["content"] if self.chat else choice["text"])

    def texts(self, **fields: Any) -> list[str]:
        return [self.text(c) for c in self.reply(**fields)["choices"]]

    def ids(self, **fields: Any) -> list[list[int]]:
        """Tokens of every choice."""
        reply = self.reply(return_token_ids=True, **fields)
        return [c["token_ids"] for c in reply["choices"]]

    def greedy(self, **fields: Any) -> list[int]:
        (ids,) = self.ids(temperature=0, **fields)
        return ids

    def first(self, **fields: Any) -> list[int]:
        """The first tokens of forty choices."""
        return [ids[0] for ids in self.ids(**{"n": 40, "max_tokens": 1} | fields)]

    def likeliest(self, **fields: Any) -> list[dict[int, float]]:
        """At each token of the only choice, the 20 likeliest ids and their log-probabilities."""
        wanted: Reply = {"logprobs": True, "top_logprobs": 20} if self.chat else {"logprobs": 20}
        reply = self.reply(**wanted, return_tokens_as_token_ids=True, **fields)
        given = reply["choices"][0]["logprobs"]
        if self.chat:
            tops = [{t["token"]: t["logprob"] for t in c["top_logprobs"]} for c in given["content"]]
        else:
            tops = given["top_logprobs"]
        return [{int(k.removeprefix("token_id:")): v for k, v in top.items()} for top in tops]

    def tokens(self, text: str) -> list[int]:
        status, reply = self.server.post("/tokenize", {"prompt": text, "add_special_tokens": False})
        assert status == 200
        return list(reply["tokens"])


Effect = Callable[[Asking], None]
EFFECTS: dict[str, Effect] = {}


def effect(check: Effect) -> Effect:
    EFFECTS[check.__name__.rstrip("_")] = check
    return check


def support(a: Asking, keep: Callable[[list[float]], int]) -> set[int]:
    """The likeliest first tokens, as many as `keep` says of their probabilities."""
    top = a.likeliest(max_tokens=1)[0]
    ranked = sorted(top, key=lambda t: (-top[t], t))
    return set(ranked[: keep([math.exp(top[t]) for t in ranked])])


def only_drawn_from(a: Asking, allowed: set[int], **fields: Any) -> None:
    """Without the fields other tokens are drawn too."""
    assert set(a.first(**fields)) <= allowed
    assert len(set(a.first(**fields))) > 1
    assert not set(a.first()) <= allowed


@effect
def temperature(a: Asking) -> None:
    ids, tops = a.greedy(), a.likeliest(temperature=0)
    assert ids == [max(top, key=lambda t: (top[t], -t)) for top in tops]
    assert set(a.first(temperature=0)) == {ids[0]}
    assert len(set(a.first(temperature=0.3))) < len(set(a.first(temperature=2)))


@effect
def top_k(a: Asking) -> None:
    only_drawn_from(a, support(a, lambda _: 3), top_k=3)
    assert a.ids(top_k=0, n=2) == a.ids(n=2)


@effect
def top_p(a: Asking) -> None:
    def share(probabilities: list[float]) -> int:
        return next(i for i in range(1, 21) if sum(probabilities[:i]) >= 0.25)

    only_drawn_from(a, support(a, share), top_p=0.25)


@effect
def min_p(a: Asking) -> None:
    only_drawn_from(a, support(a, lambda p: sum(x >= 0.25 * p[0] for x in p)), min_p=0.25)


@effect
def typical_p(a: Asking) -> None:
    """The likeliest token tells less than tokens do on average, so it is not among the few."""
    drawn = set(a.first(typical_p=0.05))
    assert 1 < len(drawn) < len(set(a.first())) and a.greedy()[0] not in drawn
    assert a.greedy()[0] in a.first()


@effect
def seed(a: Asking) -> None:
    both = a.ids(seed=7, n=2)
    assert both == [*a.ids(seed=7), *a.ids(seed=8)] and both[0] != both[1]
    assert a.ids(seed=(1 << 62) + 7) != a.ids(seed=7)


def repeated(a: Asking) -> Reply:
    """A prompt that a model goes on repeating."""
    text = "one two one two one two one two"
    return {"messages": [{"role": "user", "content": text}]} if a.chat else {"prompt": text}


def penalized(a: Asking, fields: Reply, penalty: Callable[[int], float]) -> None:
    """Each token is the likeliest after a penalty by how often it was generated."""
    given: Reply = {"max_tokens": 40, "ignore_eos": True} | repeated(a)
    tops = a.likeliest(temperature=0, **fields, **given)
    ids = a.greedy(**fields, **given)
    for i, top in enumerate(tops):
        left = {t: logprob - penalty(ids[:i].count(t)) for t, logprob in top.items()}
        assert left[ids[i]] >= max(left.values()) - 1e-4
    assert ids != a.greedy(**given)


@effect
def presence_penalty(a: Asking) -> None:
    penalized(a, {"presence_penalty": 1.5}, lambda count: 1.5 * (count > 0))


@effect
def frequency_penalty(a: Asking) -> None:
    penalized(a, {"frequency_penalty": 0.5}, lambda count: 0.5 * count)


@effect
def repetition_penalty(a: Asking) -> None:
    given = repeated(a)
    told = set(a.tokens("one two one two"))
    assert set(a.greedy(**given)) & told
    assert not set(a.greedy(**given, repetition_penalty=10)) & told


@effect
def logit_bias(a: Asking) -> None:
    likeliest = a.greedy()[0]
    assert a.greedy(logit_bias={"42": 100}) == [42] * 8
    assert a.greedy(logit_bias={str(likeliest): -100})[0] != likeliest


@effect
def max_tokens(a: Asking) -> None:
    for limit in (1, 3):
        reply = a.reply(max_tokens=limit, ignore_eos=True)
        assert reply["usage"]["completion_tokens"] == limit
        assert reply["choices"][0]["finish_reason"] == "length"
    if not a.chat:
        assert a.reply(max_tokens=0, echo=True, logprobs=0)["usage"]["completion_tokens"] == 0


@effect
def max_completion_tokens(a: Asking) -> None:
    body = a.body(max_completion_tokens=3, ignore_eos=True)
    del body["max_tokens"]
    status, reply = a.server.post(ROUTES[a.route], body)
    assert (status, reply["usage"]["completion_tokens"]) == (200, 3)


@effect
def min_tokens(a: Asking) -> None:
    ends = {"logit_bias": {str(END): 100}, "max_tokens": 8}
    usage = [a.reply(**ends, **more)["usage"] for more in ({}, {"min_tokens": 5})]
    assert [u["completion_tokens"] for u in usage] == [1, 6]  # each with its end


@effect
def stop(a: Asking) -> None:
    (text,) = a.texts(temperature=0)
    reply = a.reply(temperature=0, stop=[text[3:6]])
    assert a.text(reply["choices"][0]) == text[: text.find(text[3:6])]
    assert reply["choices"][0]["finish_reason"] == "stop" and len(text) > 6


@effect
def stop_token_ids(a: Asking) -> None:
    ids = a.greedy()
    (text,) = a.texts(temperature=0, max_tokens=2)
    reply = a.reply(temperature=0, stop_token_ids=[ids[2]])
    assert ids[2] not in ids[:2] and a.text(reply["choices"][0]) == text
    assert reply["choices"][0]["finish_reason"] == "stop"


@effect
def ignore_eos(a: Asking) -> None:
    ends = {"logit_bias": {str(END): 100}}
    assert a.reply(**ends)["choices"][0]["finish_reason"] == "stop"
    goes_on = a.reply(**ends, ignore_eos=True)
    assert goes_on["choices"][0]["finish_reason"] == "length"
    assert goes_on["usage"]["completion_tokens"] == 8


@effect
def bad_words(a: Asking) -> None:
    (text,) = a.texts(temperature=0)
    for word in re.findall(r"[A-Za-z]+", text)[:2]:
        (other,) = a.texts(temperature=0, bad_words=[word])
        assert word not in re.findall(r"[A-Za-z]+", other)


@effect
def allowed_token_ids(a: Asking) -> None:
    allowed = [101, 102, 103]
    assert {t for ids in a.ids(allowed_token_ids=allowed, n=4) for t in ids} == set(allowed)


@effect
def n(a: Asking) -> None:
    choices = a.reply(n=3)["choices"]
    assert [c["index"] for c in choices] == [0, 1, 2]
    assert len({a.text(c) for c in choices}) == 3


@effect
def best_of(a: Asking) -> None:
    def mean(choice: Reply) -> float:
        scores = choice["logprobs"]["token_logprobs"]
        return sum(scores) / len(scores)  # type: ignore[no-any-return]

    every = a.reply(n=6, logprobs=0)["choices"]
    best = max(every, key=mean)
    assert a.texts(n=1, best_of=6) == [best["text"]]
    assert a.texts(n=1) == [every[0]["text"]] != [best["text"]]


@effect
def logprobs(a: Asking) -> None:
    """Temperature and bias change what is drawn, not what is reported."""
    plain = a.likeliest(max_tokens=1)[0]
    other = a.likeliest(max_tokens=1, temperature=0.1, logit_bias={"42": 100})[0]
    both = plain.keys() & other.keys()
    assert len(both) >= 20 and [plain[t] for t in both] == [other[t] for t in both]
    total = sum(math.exp(p) for p in plain.values())
    assert 0.3 < total <= 1 + 1e-6 and len(plain) >= 20
    wanted: Reply = {"logprobs": True} if a.chat else {"logprobs": 0}
    for choice in a.reply(**wanted, n=2, ignore_eos=True)["choices"]:
        given = choice["logprobs"]
        scores = [t["logprob"] for t in given["content"]] if a.chat else given["token_logprobs"]
        assert len(scores) == 8 and max(scores) <= 0
    assert a.reply()["choices"][0]["logprobs"] is None


@effect
def top_logprobs(a: Asking) -> None:
    for count in (0, 2, 20):
        reply = a.reply(logprobs=True, top_logprobs=count)
        for token in reply["choices"][0]["logprobs"]["content"]:
            scores = [t["logprob"] for t in token["top_logprobs"]]
            assert len(scores) == count and scores == sorted(scores, reverse=True)


@effect
def prompt_logprobs(a: Asking) -> None:
    reply = a.reply(prompt_logprobs=1, return_token_ids=True)
    owner = reply if a.chat else reply["choices"][0]
    scores = owner["prompt_logprobs"]
    ids = owner["prompt_token_ids"]
    assert scores[0] is None and len(scores) == len(ids)
    for token, at in zip(ids[1:], scores[1:], strict=True):
        assert at[str(token)]["logprob"] <= 0 and 1 <= len(at) <= 2


@effect
def echo(a: Asking) -> None:
    (text,) = a.texts()
    assert a.texts(echo=True) == ["The best thing about" + text]
    scored = a.reply(echo=True, logprobs=0)["choices"][0]["logprobs"]
    assert "".join(scored["tokens"]) == "The best thing about" + text


@effect
def stream(a: Asking) -> None:
    chunks = [c for c in a.chunks() if c["choices"]]
    pieces = [c["choices"][0] for c in chunks]
    text = "".join(p["delta"].get("content") or "" if a.chat else p["text"] for p in pieces)
    assert [text] == a.texts() and len(chunks) > 4


@effect
def stream_options(a: Asking) -> None:
    told = {"include_usage": True, "continuous_usage_stats": True}
    chunks = a.chunks(stream_options=told)
    counts = [c["usage"]["completion_tokens"] for c in chunks]
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == a.reply()["usage"] | {
        "prompt_tokens_details": chunks[-1]["usage"]["prompt_tokens_details"]
    }
    assert counts == sorted(counts) and len(set(counts)) > 4
    assert not any(c.get("usage") for c in a.chunks())
    at_the_end = a.chunks(stream_options={"include_usage": True})
    assert [bool(c["usage"]) for c in at_the_end] == [False] * (len(at_the_end) - 1) + [True]


@effect
def return_token_ids(a: Asking) -> None:
    reply = a.reply(return_token_ids=True)
    (choice,) = reply["choices"]
    prompt = (reply if a.chat else choice)["prompt_token_ids"]
    assert len(prompt) == reply["usage"]["prompt_tokens"]
    status, said = a.server.post("/detokenize", {"tokens": choice["token_ids"]})
    assert (status, said["prompt"]) == (200, a.text(choice))
    assert "token_ids" not in a.reply()["choices"][0]


@effect
def return_tokens_as_token_ids(a: Asking) -> None:
    wanted: Reply = {"logprobs": True} if a.chat else {"logprobs": 0}
    both = {"return_tokens_as_token_ids": True, "return_token_ids": True}
    (choice,) = a.reply(**wanted, **both)["choices"]
    scored = choice["logprobs"]
    names = [t["token"] for t in scored["content"]] if a.chat else scored["tokens"]
    assert names == [f"token_id:{t}" for t in choice["token_ids"]]


@effect
def cache_salt(a: Asking) -> None:
    text = f"{a.route} salt " * 40
    long: Reply = {"prompt": text}
    if a.chat:
        long = {"messages": [{"role": "user", "content": text}]}
    salts = (None, None, "one", "one", "two")
    usage = [a.reply(**long, cache_salt=salt)["usage"] for salt in salts]
    cached = [u["prompt_tokens_details"]["cached_tokens"] > 50 for u in usage]
    assert cached == [False, True, False, True, False]


@effect
def resume(a: Asking) -> None:
    """What a broken stream had, and the rest, are the whole."""
    state = {"id": "a", "created": 1, "seed": 2}
    asked = {"stream": True, "temperature": 1, "max_tokens": 6}

    def answer(tokens: list[int]) -> bytes:
        body = a.body(resume=state | {"tokens": tokens}, **asked)
        return a.server.call("POST", ROUTES[a.route], json.dumps(body).encode())[1].encode()

    raw = answer([])
    whole, cut, rest = (Follower([]) for _ in range(3))
    had = cut.feed(raw[: raw.index(TOKENS) + 40])
    rest.tokens = list(cut.tokens)
    assert cut.tokens and had + rest.feed(answer(cut.tokens)) == whole.feed(raw)
    assert rest.tokens == whole.tokens


@effect
def speculation(a: Asking) -> None:
    """What it saves is another test's; here, that nothing else changes."""
    asked: Reply = {"max_tokens": 40, "ignore_eos": True, "temperature": 0} | repeated(a)
    before = verified(a)

    def verifies() -> bool:
        assert a.likeliest(**asked, speculation="off") == a.likeliest(**asked, speculation="auto")
        return verified(a) > before

    until(verifies)  # that may look dear while a machine is busy with others, for a while
    between = verified(a)
    a.ids(**asked, speculation="off")
    assert verified(a) == between
    status, reply = a.server.post(ROUTES[a.route], a.body(speculation="on"))
    assert (status, reply["error"]["param"]) == (400, "speculation")


def verified(a: Asking) -> float:
    """Tokens of drafts that the server has verified."""
    status, text = a.server.call("GET", "/metrics", b"")
    assert status == 200
    found = re.findall(r"octavo_verified_draft_tokens_total\{.*\} (\S+)", text)
    assert len(found) == 6
    return sum(map(float, found))


@effect
def prediction(a: Asking) -> None:
    asked: Reply = {"max_tokens": 60, "ignore_eos": True, "temperature": 0}
    asked["messages"] = [{"role": "user", "content": "Tell me of the sea."}]
    reply = a.reply(**asked)
    text = a.text(reply["choices"][0])
    assert "completion_tokens_details" not in reply["usage"]
    for content in (
        text,
        [{"type": "text", "text": text[:90]}, {"type": "text", "text": text[90:]}],
    ):
        predicted = {"type": "content", "content": content}

        def accepts(predicted: Reply = predicted) -> bool:
            told = a.reply(**asked, prediction=predicted)
            assert a.text(told["choices"][0]) == text
            details = told["usage"].get("completion_tokens_details", {})
            return bool(details.get("accepted_prediction_tokens", 0) > 20)

        until(accepts)
    for wrong in (
        {"type": "text", "content": "a"},
        {"type": "content", "content": [{"type": "x", "text": "a"}]},
    ):
        status, failed = a.server.post(ROUTES["chat"], a.body(prediction=wrong))
        assert (status, failed["error"]["param"]) == (400, "prediction")


@effect
def response_format(a: Asking) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["yes", "no"]}}, "required": ["a"]}
    named = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for format in ({"type": "json_object", "schema": schema}, named):
        (text,) = a.texts(response_format=format, max_tokens=30)
        assert json.loads(text)["a"] in ("yes", "no")
    (text,) = a.texts(response_format={"type": "json_object"}, max_tokens=3)
    assert text.startswith("{")
    assert a.texts(response_format={"type": "text"}) == a.texts()


@effect
def structured_outputs(a: Asking) -> None:
    for outputs, pattern in (
        ({"regex": "[0-9]{3}"}, "[0-9]{3}"), ({"choice": ["red", "blue"]}, "red|blue"),
        ({"json": {"const": 5}}, "5"), ({"grammar": 'start: "a" | "b"'}, "a|b"), ({"json_object": True}, r"\{.*"),
    ):  # fmt: skip
        (text,) = a.texts(structured_outputs=outputs)
        assert re.fullmatch(pattern, text, re.DOTALL)


def prompt(a: Asking, **fields: Any) -> str:
    """What the model was given."""
    ids = a.reply(return_token_ids=True, **fields)["prompt_token_ids"]
    return str(a.server.post("/detokenize", {"tokens": ids})[1]["prompt"])


@effect
def tools(a: Asking) -> None:
    assert '"name": "f"' in prompt(a, tools=[TOOL]) and "Tools" not in prompt(a)
    said: Reply = {"structured_outputs": {"choice": [CALL]}, "max_tokens": 40}
    (choice,) = a.reply(tools=[TOOL], **said)["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert [c["function"]["name"] for c in choice["message"]["tool_calls"]] == ["f"]
    assert a.texts(**said) == [CALL]


@effect
def tool_choice(a: Asking) -> None:
    said: Reply = {"tools": [TOOL], "structured_outputs": {"choice": [CALL]}, "max_tokens": 40}
    assert a.texts(tool_choice="none", **said) == [CALL]
    for auto in ({"tool_choice": "auto"}, {}):
        (made,) = a.reply(**auto, **said)["choices"]
        assert made["finish_reason"] == "tool_calls" and made["message"]["content"] is None
    for choice in ("required", {"type": "function", "function": {"name": "f"}}):
        (made,) = a.reply(tools=[TOOL], tool_choice=choice, max_tokens=40)["choices"]
        assert made["finish_reason"] == "tool_calls"


@effect
def parallel_tool_calls(a: Asking) -> None:
    turn = [
        {"role": "user", "content": "f f"},
        {"role": "assistant", "content": f"{CALL}\n{CALL}"},
    ]
    body: Reply = {
        "messages": turn * 3 + turn[:1], "tools": [TOOL], "tool_choice": "required",
        "temperature": 0, "max_tokens": 120,
    }  # fmt: skip
    for parallel, count in ((True, 2), (False, 1), (None, 2)):
        (choice,) = a.reply(**body, parallel_tool_calls=parallel)["choices"]
        assert len(choice["message"]["tool_calls"]) == count


@effect
def chat_template_kwargs(a: Asking) -> None:
    assert prompt(a, chat_template_kwargs={"word": "Zanzibar"}).startswith("Zanzibar\n")
    assert "Zanzibar" not in prompt(a)


@effect
def add_generation_prompt(a: Asking) -> None:
    opened, closed = prompt(a), prompt(a, add_generation_prompt=False)
    assert opened.startswith(closed) and opened.removeprefix(closed).endswith("assistant\n")


@effect
def continue_final_message(a: Asking) -> None:
    messages = [*a.body()["messages"], {"role": "assistant", "content": "It is"}]
    assert prompt(a, messages=messages, continue_final_message=True).endswith("assistant\nIt is")
    assert prompt(a, messages=messages).endswith("assistant\n")


@effect
def use_beam_search(a: Asking) -> None:
    """The best score is better than that of the greedy text."""
    beams: Reply = {"use_beam_search": True, "temperature": None, "beam_width": 4}
    length: Reply = {"max_tokens": 24, "ignore_eos": True}
    if not a.chat:
        length["prompt"] = "In the beginning"
    reply = a.reply(**beams, **length, n=2)
    scores = [c["score"] for c in reply["choices"]]
    assert scores == sorted(scores, reverse=True) and reply["usage"]["beam_width"] == 4
    greedy = [max(top.values()) for top in a.likeliest(temperature=0, **length)]
    assert scores[0] > sum(greedy) / len(greedy)


@effect
def beam_width(a: Asking) -> None:
    for width in (2, 3):
        reply = a.reply(beam_width=width, temperature=None)
        assert reply["usage"]["beam_width"] == width and len(reply["choices"]) == 1
        assert reply["choices"][0]["score"] < 0


@effect
def length_penalty(a: Asking) -> None:
    """A score is a sum of log-probabilities over the length to the power of the penalty."""
    for power in (0.5, 2.0):
        beams: Reply = {"use_beam_search": True, "temperature": None, "beam_width": 2}
        wanted: Reply = {"logprobs": True} if a.chat else {"logprobs": 0}
        (choice,) = a.reply(**beams, **wanted, length_penalty=power, ignore_eos=True)["choices"]
        given = choice["logprobs"]
        scores = [t["logprob"] for t in given["content"]] if a.chat else given["token_logprobs"]
        assert math.isclose(choice["score"], sum(scores) / 8**power, rel_tol=1e-5)


@effect
def early_stopping(a: Asking) -> None:
    """Two short texts are complete long before a likelier one: true ends there."""
    story = "Once upon a time there was a king."
    body: Reply = {
        "structured_outputs": {"choice": ["a", "b", story]}, "use_beam_search": True, "beam_width": 2,
        "n": 2, "max_tokens": 40, "temperature": None,
    }  # fmt: skip
    assert set(a.texts(**body, early_stopping=True)) == {"a", "b"}
    assert story in a.texts(**body, early_stopping="never")


@effect
def timeout(a: Asking) -> None:
    status, reply = a.server.post(ROUTES[a.route], a.body(timeout=0.5, max_tokens=500, n=8))
    assert (status, reply["error"]["code"]) == (408, "deadline_exceeded")


@effect
def priority(a: Asking) -> None:
    """What waits for room in the cache gets it in this order."""

    def known() -> float:
        return sum(a.server.metric(f"octavo_requests_{x}") for x in ("running", "waiting"))

    def wait_for(count: int) -> None:
        while known() < count:
            time.sleep(0.005)

    def ended(priority: int) -> float:
        a.reply(priority=priority)
        return time.monotonic()

    with ThreadPoolExecutor(3) as pool:
        pool.submit(a.reply, n=80, max_tokens=60, ignore_eos=True)
        wait_for(80)
        late = pool.submit(ended, 1)
        wait_for(81)
        early = pool.submit(ended, -1)
        assert early.result() < late.result()
