"""What reaches a terminal: nothing that steers it, nothing wider than it, and hints that work."""

from __future__ import annotations

import ast
import http.client
import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Q
from gguf import GGUFValueType

from octavo.backends.cpu.executor import host_isa
from octavo.backends.cpu.packed import packed_file
from octavo.checkpoint import open_checkpoint
from octavo.engine.host import usable_threads
from octavo.errors import CheckpointError, RequestError, printable
from tests.api.server import serving
from tests.small_models import Small, save_gguf, save_hf, write_config
from tests.terminal import OCTAVO, Terminal, plain
from tests.ux.test_command_line import fails, octavo
from tests.waiting import until

CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31mname\r\x00"
SOURCE = Path(__file__).parents[2] / "src" / "octavo"


def run(command: str) -> subprocess.CompletedProcess[str]:
    """A command as it is pasted into a shell."""
    line = (
        shlex.join(OCTAVO) + command.removeprefix("octavo")
        if command.startswith("octavo")
        else command
    )
    line = re.sub(r"^([A-Z_]+=\S+) octavo ", rf"\1 {shlex.join(OCTAVO)} ", line)
    return subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, check=False, timeout=120
    )


def hints(text: str) -> list[str]:
    return re.findall(r"^  try: (.*)$", text, re.MULTILINE)


# -- control characters -----------------------------------------------------------------------


def test_printable() -> None:
    assert printable("a\x1b[31mb\x9bc\x00\x7f\r\n\té\U0001f600") == "a[31mbc\n\té\U0001f600"
    assert printable("\ud83d\ude00 \ud800") == "\U0001f600 \ufffd"
    assert str(CheckpointError(f"{HOSTILE}: damaged")) == printable(HOSTILE) + ": damaged"
    assert str(RequestError("\x1b[2J")) == "[2J"


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose file, name, architecture's fields and template want to steer the terminal."""
    file = tmp_path_factory.mktemp("hostile") / f"evil{chr(27)}[2J.gguf"
    template = "{{ '\x1b[2J' }}{% for m in messages %}{{ m.content }}{% endfor %}"
    save_gguf(
        Small(layers=1), file, Q.Q8_0,
        {
            "general.name": (HOSTILE, GGUFValueType.STRING),
            "tokenizer.chat_template": (template, GGUFValueType.STRING),
        },
    )  # fmt: skip
    return file


def test_nothing_from_a_file_steers_the_terminal(hostile: Path, tmp_path: Path) -> None:
    """Random weights of 320 byte tokens: at temperature 2 the answer is full of control characters."""
    for arguments in (
        ("show", str(hostile)), ("plan", str(hostile)), ("show", str(hostile), "--program"),
        ("chat", str(hostile), "-p", "x", "--temperature", "2", "--seed", "1", "--max-tokens", "200"),
        ("generate", str(hostile), "-p", "x", "--temperature", "2", "--max-tokens", "200"),
        ("show", str(hostile), "--json"), ("show", f"{hostile}.gguf"), ("pull", str(hostile)),
    ):  # fmt: skip
        result = octavo(*arguments)
        assert not CONTROLS.search(result.stdout + result.stderr), arguments
        assert "Traceback" not in result.stderr and len(result.stdout + result.stderr) > 10
    screen = tmp_path / "log"
    with serving(str(hostile), log=screen):
        until(lambda: "evil[2J" in screen.read_text())
    assert not CONTROLS.search(screen.read_text())


def test_an_error_that_quotes_a_file(tmp_path: Path) -> None:
    save_hf(Small(layers=1), tmp_path)
    write_config(tmp_path, model_type=HOSTILE, architectures=[HOSTILE])
    result = octavo("show", str(tmp_path))
    assert result.returncode == 6 and "owned" in result.stderr
    assert not CONTROLS.search(result.stderr)


def test_commands_print_in_one_place() -> None:
    """Only `screen` echoes, so nothing is printed without being cleaned; the version is ours."""
    for path in sorted((SOURCE / "cli").glob("*.py")):
        calls = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)]
        names = [ast.unparse(c.func) for c in calls]
        if path.name != "screen.py":
            assert not {"print", "click.secho", "sys.stdout.write"} & set(names), path
            assert names.count("click.echo") == (path.name == "main.py"), path


# -- width, colours, pipes --------------------------------------------------------------------


def test_sixty_columns(smollm2: Path, tmp_path: Path) -> None:
    """The ready block and the tables fit a narrow terminal; folding loses nothing."""
    t = Terminal("serve", "--port", "0", "--offline", columns=60, cwd=tmp_path)
    t.wait_for("France?")
    block = plain(t.wait_for("}'\n"))
    start = t.seen.index("Octavo ")
    lines = plain(t.seen[start:]).splitlines()
    assert len(lines) > 12 and max(map(len, lines)) <= 60, block
    t.type("\x03")
    assert t.end() == 0
    for command in ("models", "doctor", "show smollm2", "plan smollm2"):
        t = Terminal(*command.split(), columns=60, NO_COLOR="1")
        assert t.end() == 0
        assert max(map(len, t.seen.splitlines())) <= 60 and "\x1b" not in t.seen


def test_pipes_get_whole_lines_without_colours(smollm2: Path) -> None:
    for command in ("models", "doctor", "show smollm2", "plan smollm2", "--help", "serve --help"):
        result = octavo(*command.split(), COLUMNS="20", FORCE_COLOR="")
        assert result.returncode == 0 and "\x1b" not in result.stdout
    assert str(smollm2) in octavo("models").stdout


def test_who_reads_no_longer_makes_no_command_fail(smollm2: Path) -> None:
    process = subprocess.Popen([*OCTAVO, "models"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()
    assert process.communicate()[1] == b"" and process.returncode == 0


def test_a_server_goes_on_where_nobody_reads_its_lines(hostile: Path, tmp_path: Path) -> None:
    command = [*OCTAVO, "serve", str(hostile), "--port", "0"]
    with (tmp_path / "errors").open("w") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
    assert process.stdout is not None
    shown = ""
    while not shown.endswith("}'\n"):  # the end of what it says once it is ready
        assert (line := process.stdout.readline()), shown
        shown += line
    port = int(shown.partition("127.0.0.1:")[2].partition("/")[0])
    process.stdout.close()
    for _ in range(3):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("POST", "/v1/completions", '{"prompt": "a", "max_tokens": 2}')
        assert connection.getresponse().status == 200
        connection.close()
    process.terminate()
    assert process.wait(60) == 0
    assert "Traceback" not in (tmp_path / "errors").read_text()


def test_closed_streams_are_no_fault() -> None:
    for closed in ("<&-", ">&-", "2>&-"):
        command = shlex.join([*OCTAVO, "--version"])
        result = subprocess.run(["sh", "-c", f"{command} {closed}"], capture_output=True, text=True)
        assert result.returncode == 0 and "Traceback" not in result.stderr


def test_a_prompt_that_is_not_unicode(hostile: Path) -> None:
    result = subprocess.run(
        [*OCTAVO, "generate", str(hostile), "--max-tokens", "3"], input=b"caf\xe9",
        capture_output=True, env=os.environ | {"PYTHONIOENCODING": "utf-8:strict"},
    )  # fmt: skip
    assert result.returncode == 0 and b"Traceback" not in result.stderr


def test_streams_that_are_not_unicode(hostile: Path) -> None:
    result = octavo(
        "generate", str(hostile), "-p", "é→", "--max-tokens", "3", PYTHONIOENCODING="ascii"
    )
    assert result.returncode == 0 and "Traceback" not in result.stderr


# -- what is typed wrongly --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        (("serv", "smollm2"), "octavo serve smollm2"),
        (("modles",), "octavo models"),
        (("show", "smolm2"), "octavo show smollm2"),
        (("plan", "smol lm2", "--threads", "1"), "octavo plan smollm2 --threads 1"),
        (("plan", "smollm2", "--memory", "8"), "octavo plan smollm2 --memory 8GiB"),
        (("plan", "smollm2", "--memory=lots"), "octavo plan smollm2 --memory 8GiB"),
        (("plan", "smollm2", "--contex", "5"), "octavo plan --help"),
        (("plan",), "octavo plan --help"),
    ],
)  # fmt: skip
def test_hints_can_be_pasted(typed: tuple[str, ...], hint: str, smollm2: Path) -> None:
    result = octavo(*typed)
    assert result.returncode in (2, 3) and result.stderr.startswith("error: ")
    assert hints(result.stderr)[0] == hint
    if not hint.startswith("octavo serve"):
        assert run(hint).returncode == 0


def test_hints_quote_what_needs_it(tmp_path: Path) -> None:
    """A folder with a blank and two models: every suggestion works when it is pasted."""
    folder = tmp_path / "my models; $HOME"
    folder.mkdir()
    for quant in (Q.Q4_0, Q.Q8_0):
        save_gguf(Small(layers=1), folder / f"m-{quant.name}.gguf", quant)
    result = octavo("show", str(folder), "--json")
    assert result.returncode == 3 and "holds 2 models" in result.stderr
    shown = [json.loads(run(hint).stdout) for hint in hints(result.stderr)]
    assert [s["name"] for s in shown] == ["m-Q4_0", "m-Q8_0"]


def test_keys_are_not_repeated_in_hints() -> None:
    text = fails(2, "serve", "smollm2", "--api-key", "s3cret", "--port", "0", "--memory", "x")
    assert "s3cret" not in text
    assert hints(text)[0] == (
        "octavo serve smollm2 --api-key $OCTAVO_API_KEY --port 0 --memory 8GiB"
    )


def test_names_of_other_programs() -> None:
    for typed, repository in (
        ("llama3.2:1b", "bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M"),
        ("qwen2.5:0.5b", "Qwen/Qwen2.5-0.5B-Instruct-GGUF:Q4_K_M"),
    ):
        assert hints(fails(3, "run", typed, "-p", "x")) == [f"octavo run {repository} -p x"]


# -- numbers ----------------------------------------------------------------------------------


def test_ports_and_other_numbers_have_ranges() -> None:
    for arguments in (
        ("--port", "80000"), ("--port", "-1"), ("--max-queue", "0"), ("--max-queue", "9" * 20),
        ("--drain-timeout", "-1"), ("--drain-timeout", "9" * 20), ("--threads", "0"), ("--context", "-5"),
        ("--lora-memory", "5"), ("--lora-memory", "nan"), ("--lora-memory", "300%"),
    ):  # fmt: skip
        text = fails(2, "serve", "smollm2", "--port", "0", *arguments)
        assert arguments[0] in text.splitlines()[0]
    result = octavo("serve", "smollm2", OCTAVO_PORT="80000")
    assert result.returncode == 2 and "OCTAVO_PORT" in result.stderr
    for command in (
        "engine smollm2 --repeats 0",
        "engine smollm2 --prompt -1",
        "load --threads 999",
    ):
        assert "is not a number from" in fails(2, "bench", *command.split())


def test_memory_that_is_not_there(smollm2: Path) -> None:
    text = fails(4, "serve", "smollm2", "--port", "0", "--memory", "64TiB")
    assert re.match(
        r"error: --memory 64TiB is more than the [\d.]+ GiB that are available, of the [\d.]+ GiB",
        text,
    )
    assert re.search(r"try: octavo serve smollm2 --port 0 --memory \d+MiB\n", text)
    planned = octavo("plan", "smollm2", "--memory", "64TiB")  # for another machine
    assert planned.returncode == 0 and "more than there is" in planned.stdout
    assert "more threads are slower" in octavo("plan", "smollm2", "--threads", "256").stderr


# -- folders that cannot be used --------------------------------------------------------------


@pytest.mark.parametrize("place", ["/proc/none", "/dev/null", "{tmp}/file"])
def test_a_cache_that_cannot_be_written(place: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder, home = place.format(tmp=tmp_path), str(tmp_path)
    for env in ({"OCTAVO_CACHE": folder},
                {"OCTAVO_CACHE": "", "XDG_CACHE_HOME": folder, "HOME": home},
                {"OCTAVO_CACHE": "", "XDG_CACHE_HOME": "", "HOME": folder}):  # fmt: skip
        result = octavo("pull", "smollm2", **env)
        assert result.returncode == 1, result.stderr
        assert result.stderr.startswith(f"error: cannot write to {folder}")
        assert hints(result.stderr) == ["OCTAVO_CACHE=/tmp/octavo octavo pull smollm2"]
        assert "cannot be written to" in octavo("doctor", **env).stdout
        assert octavo("models", **env, HF_HOME=folder).returncode == 0


def test_files_that_cannot_be_written(smollm2: Path) -> None:
    result = octavo(
        "bench", "kernels", "--formats", "q8_0", "--threads", "1", "--json", "/proc/none/x"
    )
    assert (
        result.returncode == 1
        and result.stderr == "error: /proc/none/x: No such file or directory\n"
    )


# -- commands ---------------------------------------------------------------------------------


def test_json(smollm2: Path, tmp_path: Path) -> None:
    """The keys that docs/cli.md names."""
    (model,) = [m for m in json.loads(octavo("list", "--json").stdout) if m["name"] == "smollm2"]
    assert model == {"name": "smollm2", "bytes": smollm2.stat().st_size, "path": str(smollm2)}
    shown = json.loads(octavo("show", "smollm2", "--json").stdout)
    assert set(shown) == {
        "name", "path", "architecture", "task", "parameters", "bytes", "tensors", "layers", "vocabulary",
        "context", "kv_heads", "head_dim", "kv_bytes_per_token", "chat_template", "sampling", "quality",
        "images", "mmproj",
    }  # fmt: skip
    assert shown["parameters"] == 134_515_008 and shown["task"] == "generate"
    plan = json.loads(octavo("plan", "smollm2", "--context", "512", "--json").stdout)
    parts = ("weights", "buffers", "kv_cache", "process")
    assert sum(plan[p] for p in parts) == plan["total"] and plan["context"] == 512
    assert plan["encoder"] == plan["image_cache"] == 0 and plan["device"] == "cpu"
    assert plan["activations"] == ("int16" if host_isa() == "amx" else "auto")
    assert set(plan) == {
        *parts, "model", "total", "available", "model_context", "context", "capacity", "threads",
        "kv_dtype", "activations", "matrices", "encoder", "image_cache", "draft", "vision_dtype",
        "device",
    }  # fmt: skip
    assert json.loads(octavo("ls", "--architectures", "--json").stdout).count("llama") == 1


def test_a_server_says_where_its_page_is_and_opens_it(smollm2: Path, tmp_path: Path) -> None:
    opened, program = tmp_path / "opened", tmp_path / "xdg-open"
    os.mkfifo(opened)
    program.write_text(f'#!/bin/sh\necho "$1" > "{opened}"\n')
    program.chmod(0o700)
    env = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    log = tmp_path / "log"
    with serving("smollm2", "--offline", "--open", log=log, env=env) as s:
        assert opened.read_text() == f"{s.url}\n"
        assert f"  page      {s.url}/\n" in log.read_text()
    with serving("smollm2", "--offline", "--no-ui", log=log) as s:
        assert "<html" not in s.get("/", {"accept": "text/html"})[1]
        assert "page  " not in log.read_text()


def test_ps(smollm2: Path, tmp_path: Path) -> None:
    """And `octavo top`, and a doctor, who sees that one of these servers was given too many threads."""
    cores = usable_threads()
    many = ("--threads", str(cores + 1))
    with serving("smollm2", "--name", "my model", "--offline", *many, log=tmp_path / "log") as s:
        (found,) = [
            r for r in json.loads(octavo("ps", "--json").stdout) if r["pid"] == s.process.pid
        ]
        assert found["model"] == "my model" and found["state"] == "ready"
        assert found["url"] == s.url and found["bytes"] > smollm2.stat().st_size
        assert re.search(
            rf"{s.process.pid}  my model +my model +{s.url} +ready", octavo("ps").stdout
        )
        live = Terminal("top", "--server", s.url, columns=140)
        shown = live.wait_for("my model") + live.wait_for("my model")  # of two looks
        assert "waiting" in shown and "tok/s" in shown
        live.type("\x03")
        assert live.end() == 130 and live.seen.count("\x1b[?1049l") == 1  # it leaves its own screen
        named = {
            f["name"]: f
            for f in json.loads(octavo("doctor", "--server", s.url, "--json").stdout)["findings"]
        }
        said = named["threads"]["meaning"], named["threads"]["mitigation"]
        assert said == (f"{cores + 1} threads on {cores} processors wait for each other", f"--threads {cores}")  # fmt: skip
    assert all(r["pid"] != s.process.pid for r in json.loads(octavo("ps", "--json").stdout))


def test_rm(smollm2: Path, tmp_path: Path) -> None:
    """Asks, says what and how much, and takes nothing else."""
    file = tmp_path / "models" / "smollm2" / smollm2.name
    file.parent.mkdir(parents=True)
    file.write_bytes(smollm2.read_bytes())
    (tmp_path / "models" / "other").mkdir()
    packed = packed_file(open_checkpoint(file)).name
    (tmp_path / "packed").mkdir()
    (tmp_path / "packed" / packed).write_bytes(bytes(1_600_000))  # of this model
    (tmp_path / "packed" / f"x{packed[1:]}").touch()  # of another
    env = {"OCTAVO_CACHE": str(tmp_path), "HF_HOME": str(tmp_path / "hf")}
    t = Terminal("rm", "smollm2", **env)
    t.wait_for("free 100.0 MB? [y/N]")
    t.type("n\n")
    assert t.end() == 130 and file.exists() and str(file.parent) in t.seen.replace("\n", "")
    assert octavo("rm", "smollm2", **env).returncode == 130 and file.exists()  # nobody to ask
    done = octavo("rm", "smollm2", "--yes", **env)
    assert done.returncode == 0 and "deleted smollm2, 100.0 MB freed" in done.stdout
    assert sorted(p.name for p in (tmp_path / "models").iterdir()) == ["other"]
    assert [p.name for p in (tmp_path / "packed").iterdir()] == [f"x{packed[1:]}"]
    gone = octavo("rm", "smollm2", "-y", **env)
    assert gone.returncode == 3 and "no model 'smollm2' in the caches" in gone.stderr
    assert "rm deletes nothing else" in fails(3, "rm", "-y", str(tmp_path))


def test_completion(smollm2: Path) -> None:
    for shell in ("zsh", "fish"):
        assert "_OCTAVO_COMPLETE" in octavo("completion", shell).stdout
    script = octavo("completion", "bash").stdout
    check = (
        f"octavo() {{ {shlex.join(OCTAVO)} \"$@\"; }}\nexport -f octavo\n{script}\n"
        'for words in "octavo se" "octavo show smol" "octavo serve --write-t" "octavo run --kv-dtype b"; do\n'
        'COMP_WORDS=($words); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); COMPREPLY=()\n'
        '_octavo_completion octavo; echo "${COMPREPLY[@]}"; done'
    )  # fmt: skip
    result = subprocess.run(
        ["bash", "-c", check], capture_output=True, text=True, check=True, timeout=120
    )
    assert result.stdout.splitlines() == ["serve", "smollm2", "--write-timeout", "bf16"], (
        result.stderr
    )
