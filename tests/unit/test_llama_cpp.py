"""llama.cpp's routes: prompts as its clients write them, gaps, and what replies hold."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo.checkpoint import open_checkpoint
from octavo.text import Tokenizer, load_tokenizer
from tests.unit.dialects import filling, scripted, speaking
from tests.unit.fake_models import Listener, ScriptedClient

HI = [{"role": "user", "content": "hi"}]
SAYS = "Once upon\na time"


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Tokenizer:
    return load_tokenizer(open_checkpoint(smollm2))


@pytest.fixture(scope="module")
def server(tokenizer: Tokenizer) -> Iterator[Listener]:
    models = scripted(filling(tokenizer), "ann", SAYS), scripted(tokenizer, "bob", SAYS, context=64)
    with speaking(*models) as one:
        yield one


def prompts(server: Listener, path: str, body: dict[str, Any], model: str = "ann") -> list[Any]:
    """The prompts that an engine gets of a body."""
    client = server.models.entry(model).client
    assert isinstance(client, ScriptedClient)
    client.requests.clear()
    status, reply = server.json(path, body | {"model": model})
    assert status == 200, reply
    return [request.prompt for request in client.requests]


def frames(text: str) -> list[Any]:
    return [json.loads(part.removeprefix("data: ")) for part in text.split("\n\n")[:-1]]


def test_a_whole_reply_and_a_stream_hold_the_same(server: Listener, tokenizer: Tokenizer) -> None:
    body = {
        "model": "ann", "prompt": "hi", "n_predict": 9, "n_probs": 1, "return_tokens": True, "temperature": 0.25,
        "top_k": 3, "seed": 5,
    }  # fmt: skip
    _, whole = server.json("/completion", body)
    *parts, last = frames(server.ask("/completion", body | {"stream": True})[1])
    ids = tokenizer.encode(SAYS, add_bos=False)
    assert whole["content"] == "".join(p["content"] for p in parts) == SAYS
    assert whole["tokens"] == [t for p in parts for t in p["tokens"]] == ids
    scored = whole["completion_probabilities"]
    assert scored == [e for p in parts for e in p["completion_probabilities"]]
    assert [(e["id"], e["logprob"]) for e in scored] == [(token, -0.5) for token in ids]
    assert b"".join(bytes(e["bytes"]) for e in scored).decode() == SAYS
    assert [p["stop"] for p in parts] == [False] * len(parts) and len(parts) > 1
    varies = {"timings", "content", "tokens", "completion_probabilities"}
    assert whole.keys() == last.keys()
    assert {k: whole[k] for k in whole.keys() - varies} == {
        k: last[k] for k in last.keys() - varies
    }
    assert (last["content"], last["tokens"], last["stop"], last["index"]) == ("", [], True, 0)
    told = {k: whole[k] for k in ("model", "prompt", "has_new_line", "stop_type", "stopping_word")}
    assert told == {
        "model": "ann", "prompt": "hi", "has_new_line": True, "stop_type": "eos", "stopping_word": "",
    }  # fmt: skip
    assert (whole["tokens_predicted"], whole["tokens_evaluated"]) == (len(ids), 1)
    assert whole["timings"]["predicted_n"] == len(ids) and whole["timings"]["prompt_n"] == 1
    used = whole["generation_settings"]
    asked = {"n_predict": 9, "n_probs": 1, "temperature": 0.25, "top_k": 3, "seed": 5}
    assert {name: used[name] for name in asked} == asked


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"stop": ["upon"]}, ("Once ", "word", "upon")), ({"stop": ["zz"]}, (SAYS, "eos", "")),
    ],
    ids=["word", "none"],
)  # fmt: skip
def test_how_a_reply_ended(server: Listener, body: Any, expected: tuple[str, str, str]) -> None:
    _, made = server.json("/completion", {"model": "ann", "prompt": "hi", **body})
    assert (made["content"], made["stop_type"], made["stopping_word"]) == expected


def test_the_limit_is_told(server: Listener) -> None:
    client = server.models.entry("bob").client
    assert isinstance(client, ScriptedClient)
    ended, client.ended = client.ended, None  # its last token then ends with "length"
    _, made = server.json("/completion", {"model": "bob", "prompt": "hi"})
    client.ended = ended
    assert made["stop_type"] == "limit"


def test_several_prompts_have_a_result_each(server: Listener) -> None:
    body = {
        "model": "ann",
        "prompt": ["a", [11, "b"]],
        "n_cmpl": 2,
        "response_fields": ["index", "prompt"],
    }
    _, made = server.json("/completion", body)
    assert [one["index"] for one in made] == [0, 1, 2, 3]
    assert [one["prompt"] for one in made][:2] == ["a", "a"]
    _, made = server.json("/completion", {"model": "ann", "prompt": ["a"]})
    assert len(made) == 1
    parts = frames(server.ask("/completion", body | {"stream": True})[1])
    assert sorted(p["index"] for p in parts if p.keys() == {"index", "prompt"}) == [0, 1, 2, 3]


def test_fields_of_a_reply_can_be_chosen(server: Listener) -> None:
    wanted = ["content", "generation_settings/n_predict", "no/such", "nothing"]
    body = {"model": "ann", "prompt": "hi", "n_predict": 7, "response_fields": wanted}
    assert server.json("/completion", body)[1] == {"content": SAYS, "n_predict": 7}


def test_prompts_mix_texts_ids_and_control_tokens(server: Listener, tokenizer: Tokenizer) -> None:
    mark, plain = tokenizer.vocabulary["<|im_end|>"], tokenizer.encode("a b", add_bos=False)
    assert prompts(server, "/completion", {"prompt": "a b<|im_end|>"}) == [[*plain, mark]]
    assert prompts(server, "/completion", {"prompt": [5, "a b", 7]}) == [[5, *plain, 7]]
    assert prompts(server, "/completion", {"prompt": [5, 7]}) == [[5, 7]]
    assert prompts(server, "/completion", {"prompt": [[5], "a b"]}) == [[5], plain]
    (said,) = prompts(server, "/v1/completions", {"prompt": "a b<|im_end|>"})
    assert mark not in said


@pytest.mark.parametrize("continued", [False, True])
def test_a_written_template_is_the_chats_prompt(server: Listener, continued: bool) -> None:
    """What `/apply-template` writes has the ids that the chat has."""
    said = [{"role": "system", "content": "Be brief."}, *HI]
    said += [{"role": "assistant", "content": "I am"}] * continued
    more = {"continue_final_message": continued}
    _, made = server.json("/apply-template", {"model": "ann", "messages": said} | more)
    chat = prompts(server, "/v1/chat/completions", {"messages": said} | more)
    assert prompts(server, "/completion", {"prompt": made["prompt"]}) == chat
    assert made["prompt"].startswith("<|im_start|>system\nBe brief.")


def test_a_gap_is_the_same_in_every_api(server: Listener, tokenizer: Tokenizer) -> None:
    known = filling(tokenizer).vocabulary
    before, after, middle = (known[f"<fim_{name}>"] for name in ("prefix", "suffix", "middle"))
    plain = {text: tokenizer.encode(text, add_bos=False) for text in ("def f(x", "): pass")}
    expected = [[before, *plain["def f(x"], after, *plain["): pass"], middle]]
    given = {"input_prefix": "def f(", "prompt": "x", "input_suffix": "): pass"}
    assert prompts(server, "/infill", given) == expected
    given = {"prompt": "def f(x", "suffix": "): pass"}
    assert prompts(server, "/v1/completions", given) == expected
    assert prompts(server, "/api/generate", given | {"stream": False}) == expected
    client = server.models.entry("ann").client
    assert isinstance(client, ScriptedClient)
    assert known["<fim_pad>"] in client.requests[0].params.stop_token_ids


def test_other_files_come_before_the_gap(server: Listener, tokenizer: Tokenizer) -> None:
    known = filling(tokenizer).vocabulary
    files = [{"filename": "a.py", "text": "x = 1"}]
    given = {"input_prefix": "a", "input_suffix": "b", "input_extra": files}
    (made,) = prompts(server, "/infill", given)

    def plain(text: str) -> list[int]:
        return tokenizer.encode(text, add_bos=False)

    assert made == [
        known["<repo_name>"], *plain("repository\n"), known["<file_sep>"], *plain("a.py\n"), *plain("x = 1"),
        known["<file_sep>"], *plain("file\n"), known["<fim_prefix>"], *plain("a"), known["<fim_suffix>"],
        *plain("b"), known["<fim_middle>"],
    ]  # fmt: skip


def test_models_without_the_tokens_refuse_gaps_by_name(server: Listener) -> None:
    for path, body, field in (
        ("/infill", {"input_prefix": "a", "input_suffix": "b"}, "input_suffix"),
        ("/v1/completions", {"prompt": "a", "suffix": "b"}, "suffix"),
        ("/api/generate", {"prompt": "a", "suffix": "b", "stream": False}, "suffix"),
    ):
        status, reply = server.json(path, body | {"model": "bob"})
        error = reply["error"]
        message = error if isinstance(error, str) else error["message"]
        assert status == 400
        assert message == f"{field}: bob has no tokens for filling in the middle"
    shown = {
        name: server.json("/api/show", {"model": name})[1]["capabilities"]
        for name in ("ann", "bob")
    }
    assert "insert" in shown["ann"] and "insert" not in shown["bob"]


def test_errors_are_llama_cpps(server: Listener) -> None:
    status, reply = server.json("/completion", {"model": "bob", "prompt": "a b c d " * 40})
    error = reply["error"]
    assert (status, error["code"], error["type"]) == (400, 400, "exceed_context_size_error")
    assert error["n_ctx"] == 64 and error["n_prompt_tokens"] > 64
    status, reply = server.json("/completion", {"model": "nobody", "prompt": "a"})
    assert (status, reply["error"]["code"], reply["error"]["type"]) == (404, 404, "not_found_error")
    status, reply = server.json("/completion", {"model": "ann", "prompt": "a", "n_cmpl": 0})
    assert (status, reply["error"]["type"]) == (400, "invalid_request_error")
    for wrong in ({"prompt": []}, {"prompt": [1, [2]]}, {"logit_bias": [[1, True]]}, {"grammar": "x", "json_schema": {}}):  # fmt: skip
        assert server.json("/completion", {"model": "ann", "prompt": "a"} | wrong)[0] == 400
    assert server.json("/props", {})[1]["error"]["message"].startswith("properties are set when")


def test_what_clients_ask_about(server: Listener) -> None:
    _, props = server.json("/props?model=bob")
    assert props["default_generation_settings"]["n_ctx"] == 64
    assert (props["total_slots"], props["model_alias"], props["eos_token"]) == (
        64,
        "bob",
        "<|im_end|>",
    )
    assert "<|im_start|>" in props["chat_template"] and props["modalities"] == {
        "vision": False,
        "audio": False,
    }
    client = server.models.entry("bob").client
    assert isinstance(client, ScriptedClient)
    client.stats["running"] = 2
    _, slots = server.json("/slots?model=bob")
    client.stats["running"] = 0
    assert [one["is_processing"] for one in slots] == [True] * 2 + [False] * 62
    assert server.json("/props")[0] == 400 and server.json("/slots?model=nobody")[0] == 404


def test_texts_become_tokens_in_both_ways(server: Listener, tokenizer: Tokenizer) -> None:
    mark, text = tokenizer.vocabulary["<|im_end|>"], "é🙂<|im_end|>"
    asked = {"model": "ann", "content": "<|im_end|>"}
    _, parsed = server.json("/tokenize", asked | {"parse_special": True})
    _, plain = server.json("/tokenize", asked)
    assert parsed["tokens"] == [mark] and mark not in plain["tokens"] and plain["count"] > 1
    asked = {"content": text, "parse_special": True, "with_pieces": True}
    _, made = server.json("/tokenize", asked | {"model": "ann"})
    ids, pieces = zip(*((p["id"], p["piece"]) for p in made["tokens"]), strict=True)
    assert ids[-1] == mark and {type(piece) for piece in pieces} == {str, list}
    raw = (bytes(p) if isinstance(p, list) else p.encode() for p in pieces)
    assert b"".join(raw).decode() == text
    _, said = server.json("/detokenize", {"model": "ann", "tokens": ids[:-1]})
    assert said["content"] == "é🙂"
