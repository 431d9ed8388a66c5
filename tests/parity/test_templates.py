"""Chat templates of published models: the same text as transformers, and the same ids."""

from __future__ import annotations

import ast
import difflib
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from octavo.checkpoint import Checkpoint, open_checkpoint
from octavo.checkpoint.hub import cache_folder
from octavo.engine.canonical import Canonical
from octavo.errors import RequestError
from octavo.text import Tokenizer, load_tokenizer
from octavo.text.chat import ChatTemplate, template_source
from octavo.text.messages import read_messages, read_tools
from tests.conftest import download, npm_tokenizer

MODELS = ["smollm2", "qwen3", "llama3", "llama3_1", "gemma3", "deepseek_v3"]
# Of other families, from a package that has them as strings; their control tokens are just text here.
COLLECTED = [
    "mistral", "llama", "zephyr", "gemma", "phi3", "phi4", "qwen25", "gptoss", "qwen3_instruct", "qwen3_thinking", "yi_chat",
]  # fmt: skip
Message = dict[str, Any]

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "What it is like outside, \"now\" & <here>",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string"}, "units": {"type": "string", "enum": ["C", "°F"]}},
            "required": ["place"],
        },
    },
}  # fmt: skip
SEARCH = {
    "type": "function",
    "function": {"name": "search", "description": "", "parameters": {"type": "object", "properties": {}}},
}  # fmt: skip


def user(text: Any) -> Message:
    return {"role": "user", "content": text}


def system(text: str) -> Message:
    return {"role": "system", "content": text}


def says(text: str | None, *calls: Message) -> Message:
    return {"role": "assistant", "content": text} | ({"tool_calls": list(calls)} if calls else {})


def call(name: str, **arguments: Any) -> Message:
    function = {"name": name, "arguments": arguments}
    return {"id": "call00001", "type": "function", "function": function}


def result(text: str) -> Message:
    return {"role": "tool", "name": "get_weather", "tool_call_id": "call00001", "content": text}


TEXTS = [
    "hi",
    "",
    " ",
    "  two\n\nlines \n",
    "naïve – ☃ 漢字 👩‍🚀",
    "<b>&amp;\"'\\",
    "{{ x }}{% y %}",
    "a" * 500,
]
ASKED = [user("Paris?"), says(None, call("get_weather", place="Paris", units="C"))]
ANSWERED = [*ASKED, result('{"t": 12.5}')]
CONVERSATIONS: list[tuple[list[Message], list[Message] | None]] = [
    *[([user(t)], None) for t in TEXTS],
    *[([system(t), user("hi")], None) for t in TEXTS[:5]],
    ([user("a"), says("b"), user("c")], None),
    ([system("s"), user("a"), says("b"), user("c"), says("d"), user("e")], None),
    ([user("a"), says(""), user("")], None),
    ([user("a"), says("<think>\nwhy\n</think>\n\nb"), user("c")], None),
    ([user("a"), says("<think>\n\n</think>\n\nb"), user("c"), says("</think> d"), user("e")], None),
    ([system("s")], None),
    ([user("a"), user("b")], None),
    ([says("first"), user("b")], None),
    ([user("a"), says("b")], None),
    ([user("a")], [WEATHER]),
    ([system("s"), user("a")], [WEATHER, SEARCH]),
    (ANSWERED, [WEATHER]),
    ([*ANSWERED, says("12.5 °C"), user("and Rome?")], [WEATHER]),
    ([system("s"), *ANSWERED, says("12.5"), user("x")], [WEATHER, SEARCH]),
    ([user("a"), says("wait", call("search", q="é\n", n=[1, {"b": None}]))], [SEARCH]),
    (ANSWERED, None),
    ([*ASKED, result("")], [WEATHER]),
]  # fmt: skip
assert len(CONVERSATIONS) >= 30


def _tokenizer(model: str) -> Tokenizer:
    folder = npm_tokenizer(model)
    return load_tokenizer(
        Checkpoint(folder, "hf", {}, {}, {p.name: p for p in folder.glob("*.json")})
    )


def _load(model: str, request: pytest.FixtureRequest) -> tuple[ChatTemplate, Any]:
    from transformers import AutoTokenizer

    if model == "smollm2":
        path: Path = request.getfixturevalue("smollm2")
        checkpoint = open_checkpoint(path)
        oracle = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    else:
        folder = npm_tokenizer(model)
        files = {p.name: p for p in folder.glob("*.json")}
        checkpoint = Checkpoint(folder, "hf", {}, {}, files)
        oracle = AutoTokenizer.from_pretrained(folder)
    source = template_source(checkpoint) or ""  # Llama 2's carries none
    oracle.chat_template = source
    return ChatTemplate(source, load_tokenizer(checkpoint)), oracle


@pytest.fixture(scope="session")
def collected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """String constants named NAME_template in the package's module, which is not run."""
    target = cache_folder() / "tokenizers" / "chat_templates.py"
    if not target.exists():
        scratch = tmp_path_factory.mktemp("templates")
        download(scratch, "unsloth==2026.10.9")
        (wheel,) = scratch.glob("*.whl")
        target.parent.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(wheel) as archive:
            target.write_bytes(archive.read("unsloth/chat_templates.py"))
    found = {}
    for node in ast.parse(target.read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            name = ast.unparse(node.targets[0])
            if name.endswith("_template") and isinstance(node.value.value, str):
                found[name.removesuffix("_template")] = node.value.value
    return found


@pytest.mark.parametrize("model", [*MODELS, *COLLECTED])
def test_equal_to_transformers(model: str, request: pytest.FixtureRequest) -> None:
    """What transformers renders we render; what its template refuses ours refuses."""
    if model in COLLECTED:
        _, oracle = _load("llama2", request)
        oracle.chat_template = request.getfixturevalue("collected")[model]
        ours = ChatTemplate(oracle.chat_template, _tokenizer("llama2"))
    else:
        ours, oracle = _load(model, request)
    rendered = 0
    for messages, tools in CONVERSATIONS:
        try:
            expected = oracle.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=True
            )
        except Exception:  # whatever the template runs into
            with pytest.raises(RequestError):
                ours.render(read_messages(messages), read_tools(tools or []))
            continue
        rendered += 1
        assert ours.render(read_messages(messages), read_tools(tools or [])) == expected
    print(f"{model}: {rendered} of {len(CONVERSATIONS)} rendered, the rest refused by both")
    assert rendered >= 15


@pytest.mark.parametrize("model", [m for m in MODELS if m != "smollm2"])
def test_same_ids(model: str, request: pytest.FixtureRequest) -> None:
    """Where no message spells a control token, the ids are transformers' too."""
    ours, oracle = _load(model, request)
    for text in TEXTS:
        messages = [user(text), says("b"), user("c")]
        ids = oracle.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert ours.encode(read_messages(messages)) == ids


@pytest.mark.parametrize(("model", "share"), [("qwen3", 1), ("gemma3", 0.98), ("llama3", 0.98)])
def test_forced_texts_are_the_tokenizers(model: str, share: float) -> None:
    """As the ranks alone write it; Llama 3 also groups digits by three, Gemma keeps runs of spaces."""
    tokenizer = _tokenizer(model)
    canonical = Canonical(tokenizer.grammar_bytes(), sorted(tokenizer.special.control))
    names = [
        "full_name",
        "quantity",
        "main_ingredient",
        "setup",
        "punchline",
        "ticketPrice",
        "Straße",
    ]
    texts = [
        json.dumps({n: "Alice O'Neil", "page_count": 47 + i, "ok": [True, None, 2.5]})
        for i, n in enumerate(names)
    ]
    same = total = 0
    for text in (*texts, *(t for t in TEXTS if 0 < len(t) < 64)):
        expected = tokenizer.encode("\n" + text, add_bos=False)[1:]
        made = canonical.continuation(b"\n", text.encode())
        assert b"".join(tokenizer.bytes[t] for t in made) == text.encode()
        blocks = difflib.SequenceMatcher(a=expected, b=made, autojunk=False).get_matching_blocks()
        same, total = same + sum(b.size for b in blocks), total + len(expected)
    assert same >= share * total
