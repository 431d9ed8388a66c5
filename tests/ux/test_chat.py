"""`octavo chat` as it is typed at, and as it is piped into."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from gguf import GGMLQuantizationType as Q
from gguf import GGUFValueType

from octavo.cli.chat import chat
from octavo.cli.conversation import Conversation
from octavo.cli.generate import generate
from tests.small_models import Small, save_gguf
from tests.terminal import OCTAVO, Terminal, plain
from tests.ux.test_command_line import fails

GREEDY = ("--temperature", "0", "--max-tokens", "8")
QUESTION = "What is the capital of France?"


def test_a_conversation(smollm2: Path, tmp_path: Path) -> None:
    """Every command, Tab, the keys that stop, and a history that the next run knows."""
    t = Terminal(
        "run", "smollm2", *GREEDY, "--context", "512", cwd=tmp_path, XDG_STATE_HOME=str(tmp_path)
    )
    opening = plain(t.wait_for("\n>>> "))
    bar = opening.split("smollm2: /help")[0].split("Loading")[-1]
    done, total = re.search(r"([\d.]+)/([\d.]+) MB", bar).groups()  # type: ignore[union-attr]
    assert done == total  # the bar is full
    assert max(len(line) for line in re.split(r"[\r\n]", opening)) <= 60
    first = plain(t.tell(QUESTION))
    assert "The capital of France is Paris." in first and "/512 tokens" in first
    assert "The capital of France is Paris." in t.tell("/regen")
    assert "did you mean /system?" in t.tell("/sistem")
    t.type("/sy\t")  # completed, with a space
    assert "conversation starts again (2 messages dropped)" in t.tell("Be brief.")
    assert "system message: Be brief." in t.tell("/system")
    t.tell(QUESTION)
    assert "the system message stays" in t.tell("/clear")
    t.tell(QUESTION)
    assert "saved 3 messages" in t.tell("/save talk.json")
    assert [m["role"] for m in json.loads((tmp_path / "talk.json").read_text())] == [
        "system", "user", "assistant",
    ]  # fmt: skip
    assert "took back" in t.tell("/undo") and "nothing to take back" in t.tell("/undo")
    assert "Ctrl-D leaves" in t.interrupt()
    t.type("\x04")
    assert t.end() == 0

    history = tmp_path / "octavo" / "chat_history"
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    lines = history.read_text().splitlines()
    assert lines[:2] == [QUESTION, "/regen"] and lines[-1] == "/undo"
    history.write_text("".join(f"line {i}\n" for i in range(1500)) + "/system\n")
    t = Terminal("chat", "smollm2", *GREEDY, cwd=tmp_path, XDG_STATE_HOME=str(tmp_path))
    t.wait_for("\n>>> ")
    t.type("\x1b[A")  # the arrow up
    assert "there is no system message" in t.tell("")
    t.type("/exit\n")
    assert t.end() == 0
    lines = history.read_text().splitlines()
    assert len(lines) <= 1002 and "line 400" not in lines and lines[-2:] == ["/system", "/exit"]


def test_history_can_be_off_and_need_not_work(smollm2: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for home, more in ((tmp_path / "off", ("--no-history",)), (tmp_path / "file", ())):
        t = Terminal("chat", *more, *GREEDY, XDG_STATE_HOME=str(home))
        t.wait_for("\n>>> ")
        t.tell("/clear")
        t.type("\x04")
        assert t.end() == 0
    assert os.listdir(tmp_path) == ["file"]


def test_interrupted_answer_and_start(smollm2: Path, tmp_path: Path) -> None:
    """Ctrl-C stops the answer, which stays; during the start it ends the program without a word."""
    t = Terminal("chat", "--no-history", "--max-tokens", "2000", "--system", "Tell long stories.")
    t.wait_for("\n>>> ")
    t.type("Tell me a very long story about a fox.\n")
    t.wait_for("fox.\n")
    t.wait_for(" ")
    t.type("\x03")
    assert "(stopped)" in t.wait_for("\n>>> ")
    assert "took back" in t.tell("/undo") and "nothing to take back" in t.tell("/undo")
    t.type("\x04")
    assert t.end() == 0
    t = Terminal("chat", "--no-history")
    t.wait_for("Loading")
    t.type("\x03")
    assert t.end() == 130 and "Traceback" not in t.seen


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model that chats."""
    file = tmp_path_factory.mktemp("chat") / "small.gguf"
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    metadata = {"tokenizer.chat_template": (template, GGUFValueType.STRING)}
    save_gguf(Small(layers=1), file, Q.F32, metadata)
    return file


def test_sampling_options(small: Path) -> None:
    """The same names for chat and generate; a seed repeats, a temperature changes, a limit limits."""
    hot = ("--temperature", "2", "--max-tokens", "24")

    def said(command: click.Command, *options: str) -> str:
        result = CliRunner().invoke(command, [str(small), "-p", "a b c", *options])
        assert result.exit_code == 0, result.exception
        return result.stdout

    for command in (chat, generate):
        seven = said(command, *hot, "--seed", "7")
        assert seven == said(command, *hot, "--seed", "7") != said(command, *hot, "--seed", "8")
        greedy = said(command, "--temperature", "0", "--max-tokens", "24")
        assert seven != greedy
        for one in (("--top-k", "1"), ("--top-p", "0.0001"), ("--min-p", "1")):
            assert said(command, *hot, *one) == greedy
        least = ("--temperature", "0", "--repeat-penalty", "10", "--max-tokens", "24")
        assert said(command, *least) != greedy
        assert len(said(command, *hot, "--max-tokens", "2")) < len(seven)


@pytest.mark.parametrize(
    "option",
    [
        ("--temperature", "nan"), ("--temperature", "inf"), ("--temperature", "-1"), ("--top-p", "0"),
        ("--top-p", "1.1"), ("--top-k", "2147483648"), ("--top-k", "-1"), ("--min-p", "1e400"),
        ("--repeat-penalty", "0"), ("--seed", "1" + "0" * 400), ("--max-tokens", "0"),
        ("--max-tokens", "9" * 30), ("--context", "0"), ("--threads", "0"), ("--threads", "1000000000"),
    ],
)  # fmt: skip
def test_values_out_of_range(option: tuple[str, str]) -> None:
    for command in (chat, generate):
        result = CliRunner().invoke(command, ["smollm2", "-p", "x", *option])
        assert result.exit_code == 2 and f"Invalid value for '{option[0]}" in result.output


def test_a_value_out_of_range_is_one_line() -> None:
    text = fails(2, "chat", "--temperature", "nan")
    assert text == (
        "error: Invalid value for '--temperature': nan is not a number from 0 to 2.\n"
        "  try: octavo chat --help\n"
    )


def test_pipes(smollm2: Path) -> None:
    def piped(text: str, *options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*OCTAVO, "chat", "smollm2", *options], input=text, capture_output=True, text=True,
            check=False, timeout=120,
        )  # fmt: skip

    answer = piped(QUESTION + "\n")
    assert answer.returncode == 0 and answer.stdout.strip() == "The capital of France is Paris."
    empty = piped("\n")
    assert empty.returncode == 2 and "the prompt is empty" in empty.stderr
    long = piped("word " * 2000, "--context", "256")
    assert long.returncode == 1 and long.stderr.count("error: ") == 1 and long.stdout == ""
    command = f"{' '.join(OCTAVO)} chat -p 'Tell me a story.' --max-tokens 200 | head -c 5"
    cut = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, check=True, timeout=120
    )
    assert len(cut.stdout) == 5 and "Broken" not in cut.stderr and "Traceback" not in cut.stderr


def test_what_commands_do_to_the_messages(tmp_path: Path) -> None:
    c = Conversation("Be kind.")
    c.ask("one")
    c.answered("two")
    assert c.forget_answer() and not c.forget_answer()
    assert [m["content"] for m in c.messages] == ["Be kind.", "one"]
    assert c.undo() and not c.undo() and c.system == "Be kind."
    c.ask("one")
    assert "1 messages dropped" in c.command("/system", "Be brief.")
    assert c.messages == [{"role": "system", "content": "Be brief."}]
    assert "cannot write" in c.command("/save", str(tmp_path / "no" / "file"))
    assert "name a file" in c.command("/save", "")
    assert "no command /usr/bin" in c.command("/usr/bin", "is a folder")
