"""What a stranger sees: quick help, errors of one line with something to try, a screen that says enough."""

from __future__ import annotations

import json
import os
import re
import resource
import socket
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import psutil
import pytest

from tests.api.server import serving
from tests.waiting import until

OCTAVO = [sys.executable, "-m", "octavo.cli.main"]


def octavo(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*OCTAVO, *arguments], capture_output=True, text=True, check=False, timeout=120,
        stdin=subprocess.DEVNULL, env=os.environ | env,
    )  # fmt: skip


def fails(code: int, *arguments: str) -> str:
    """The error text of a command that must end with `code`: one line, then lines to try."""
    result = octavo(*arguments)
    assert result.returncode == code, result.stderr
    lines = result.stderr.strip().splitlines()
    assert lines[0].startswith("error: ") and all(line.startswith("  try: ") for line in lines[1:])
    return result.stderr


@pytest.mark.parametrize("arguments", [("--help",), ("--version",)])
def test_help_is_quick_and_light(arguments: tuple[str, ...]) -> None:
    code = (
        f"import sys; sys.argv = ['octavo', *{arguments!r}]\n"
        "from octavo.cli.main import main\n"
        "try: main()\n"
        "finally: print('numpy' in sys.modules or 'torch' in sys.modules, file=sys.stderr)"
    )
    spent = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        result = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=False
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert result.stderr.strip() == "False"
    assert min(spent) < 0.15


@pytest.mark.parametrize(
    ("read", "code", "said"), [(True, 1, "error: Broken pipe\n"), (False, 0, "")]
)
def test_only_a_reader_that_leaves_ends_a_command_well(read: bool, code: int, said: str) -> None:
    """Not any other pipe that breaks, such as a connection."""
    script = (
        "import sys, click; sys.argv = ['octavo', 'models']\n"
        "from octavo.cli import main, models\n"
        "models.models = click.Command('models', callback=lambda: (_ for _ in ()).throw(BrokenPipeError(32, 'Broken pipe')))\n"
        "main.main()"
    )
    reader, writer = os.pipe()
    if not read:
        os.close(reader)
    result = subprocess.run(
        [sys.executable, "-c", script],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert (result.returncode, result.stderr) == (code, said)
    for end in (reader, writer) if read else (writer,):
        os.close(end)


def test_every_command_has_help() -> None:
    from octavo.cli.main import COMMANDS

    for name in COMMANDS:
        assert "Usage:" in octavo(name, "--help").stdout


def test_wrong_names() -> None:
    assert 'no model named "smolm2"' in fails(3, "serve", "smolm2", "--port", "0")
    assert "try: octavo serve smollm2" in fails(3, "serve", "smolm2", "--port", "0")
    assert "no file or folder" in fails(3, "show", "missing.gguf")
    assert "no file or folder" in fails(3, "show", "./nowhere/at/all")
    assert "not in the cache" in fails(3, "serve", "nobody/nothing", "--offline", "--port", "0")


def test_a_start_that_fails_leaves_no_process(tmp_path: Path) -> None:
    """The engine's is started first, and named as the model is."""
    name = f"nothing-{os.getpid()}"
    assert "no model named" in fails(3, "serve", name, "--port", "0")
    (tmp_path / name).mkdir()
    assert "no config.json" in fails(3, "serve", str(tmp_path / name), "--port", "0")
    until(
        lambda: all(
            (p.info["cmdline"] or [""])[-1] != name for p in psutil.process_iter(["cmdline"])
        )
    )


def test_an_empty_folder(tmp_path: Path) -> None:
    assert "no config.json" in fails(3, "show", str(tmp_path))


def test_does_not_fit(smollm2: Path) -> None:
    text = fails(4, "plan", "smollm2", "--memory", "100MiB")
    assert re.search(r"does not fit .* 8,192-token context: .* > 100 MiB", text)
    text = fails(4, "plan", "smollm2", "--memory", "300MiB", "--context", "8192")
    smaller = re.search(r"try: octavo plan smollm2 --memory 300MiB --context (\d+)", text)
    assert smaller
    assert (
        octavo("plan", "smollm2", "--memory", "300MiB", "--context", smaller.group(1)).returncode
        == 0
    )
    larger = re.search(r"--memory (\d+MiB)$", text.strip())
    assert larger
    assert (
        octavo("plan", "smollm2", "--memory", larger.group(1), "--context", "8192").returncode == 0
    )


def test_unusable_options(smollm2: Path) -> None:
    assert "not an amount" in fails(2, "plan", "smollm2", "--memory", "lots")
    assert "between 1 and" in fails(2, "plan", "smollm2", "--context", "9000")
    assert "a number from 1 to 256" in fails(2, "plan", "smollm2", "--threads", "-1")
    assert octavo("serve", "--port", "notanumber").returncode == 2
    assert octavo("frobnicate").returncode == 2


def test_names_that_options_give_to_models(smollm2: Path, tmp_path: Path) -> None:
    """--alias and --pin know a model by --name, too, but not by another alias."""
    assert "--alias: 'b'" in fails(2, "serve", "--alias", "b=smollm2", "--alias", "c=b")
    assert "--pin: 'b'" in fails(2, "serve", "--alias", "b=smollm2", "--pin", "b")
    latin = tmp_path / "latin.jinja"
    latin.write_bytes(b'{{ "caf\xe9" }}')
    assert "is not in UTF-8" in fails(2, "serve", "--chat-template", str(latin))
    options = ("--name", "prod", "--alias", "gpt-4o=prod", "--pin", "prod")
    with serving("smollm2", "--offline", *options, log=tmp_path / "log") as server:
        body = {"model": "gpt-4o", "prompt": "a", "max_tokens": 1}
        assert server.post("/v1/completions", body)[0] == 200


def test_port_taken_is_noticed_first() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        text = fails(
            5, "serve", "no-such-model", "--port", str(port)
        )  # before the model is looked at
        assert f"port {port} is in use by" in text and f"pid {os.getpid()}" in text
        assert re.search(r"try: octavo serve no-such-model --port \d+", text)


def test_unknown_instruction_set(smollm2: Path) -> None:
    result = octavo("generate", "smollm2", "-p", "x", OCTAVO_ISA="sse9")
    assert (
        result.returncode == 2
        and "OCTAVO_ISA" in result.stderr
        and "Traceback" not in result.stderr
    )


def test_plan_show_models_doctor(smollm2: Path) -> None:
    assert re.search(r"total +[\d.]+ [GM]iB", octavo("plan", "smollm2").stdout)
    shown = octavo("show", "smollm2").stdout
    assert "llama" in shown and "8,192" in shown and "134.5 M" in shown
    assert "smollm2" in octavo("models").stdout
    assert "kernels" in octavo("doctor").stdout
    assert octavo("pull", "smollm2").stdout.strip() == str(smollm2)


def test_program_listing(smollm2: Path) -> None:
    lines = octavo("show", "smollm2", "--program").stdout.splitlines()
    golden = (Path(__file__).parent / "smollm2_program.txt").read_text().splitlines()
    assert lines[: len(golden)] == golden
    assert len(lines) == 462


def test_generate_chat_and_bench(smollm2: Path, tmp_path: Path) -> None:
    text = octavo(
        "generate", "smollm2", "-p", "The capital of France is", "--max-tokens", "4"
    ).stdout
    assert "Paris" in text
    answer = octavo("chat", "smollm2", "-p", "What is the capital of France?").stdout
    assert "Paris" in answer
    out = tmp_path / "b.json"
    options = (
        "--batch",
        "1,2",
        "--prompt",
        "16",
        "--output",
        "8",
        "--repeats",
        "1",
        "--json",
        str(out),
    )
    assert octavo("bench", "engine", "smollm2", *options).returncode == 0
    result = json.loads(out.read_text())
    assert set(result) == {"machine", "model", "activations", "kv_dtype", "runs"}
    assert result["kv_dtype"] == "bf16"
    numbers = {"batch", "prompt", "output", "prefill_tps", "decode_tps", "ttft_ms", "rss_mb"}
    assert [r["batch"] for r in result["runs"]] == [1, 2]
    for r in result["runs"]:
        assert set(r) == numbers | {"overhead", "expert_mb", "phases"}
        assert min(r[n] for n in numbers) > 0
        assert 99 < sum(r["phases"].values()) < 101


def test_bench_kernels(tmp_path: Path) -> None:
    out, plot = tmp_path / "k.json", tmp_path / "k.svg"
    result = octavo(
        "bench", "kernels", "--formats", "q4_1", "--threads", "1", "--json", str(out),
        "--svg", str(plot),
    )  # fmt: skip
    assert result.returncode == 0 and "GB/s" in result.stdout
    record = json.loads(out.read_text())
    assert {k["kernel"] for k in record["kernels"]} == {
        "Q4_1", "attention bf16", "attention int8", "attention f32",
    }  # fmt: skip
    assert all(k["percent"] > 0 for k in record["kernels"] if k["kernel"] == "Q4_1")
    svg = ElementTree.fromstring(plot.read_text())
    assert len([e for e in svg.iter() if e.tag.endswith("title")]) == 8
    wrong = octavo("bench", "kernels", "--formats", "q9", "--isa", "scalar")
    assert wrong.returncode == 2 and "Q4_1" in wrong.stderr
    wrong = octavo("bench", "kernels", "--isa", "sse9")
    assert wrong.returncode == 2 and "scalar" in wrong.stderr


def test_ready_block_is_last_and_its_curl_works(smollm2: Path, tmp_path: Path) -> None:
    with serving("--offline", log=tmp_path / "log") as s:
        screen = (tmp_path / "log").read_text()
        assert "using the demo: smollm2" in screen
        command = screen[screen.index("  curl ") :]
        assert screen.endswith(command)  # nothing follows the block
        result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
        assert "Paris" in json.loads(result.stdout)["choices"][0]["message"]["content"]
        assert s.get("/health")[0] == 200
    log = (tmp_path / "log").read_text()
    assert re.search(r"chat  37 → \d+ tokens  ttft \d+ ms", log)
    assert re.search(r"served \d+ requests, [\d,]+ tokens, 0 errors; bye$", log.strip())


def test_python_api(smollm2: Path) -> None:
    import octavo

    llm = octavo.LLM("smollm2", offline=True)
    params = octavo.SamplingParams(temperature=0, max_tokens=4)
    first, second = llm.generate(
        ["The capital of France is", "One, two, three,"], params, progress=False
    )
    assert "Paris" in first.text and first.finish_reason == "length" and len(second.tokens) == 4
    question = [{"role": "user", "content": "What is the capital of France?"}]
    (answer,) = llm.chat(
        question, octavo.SamplingParams(temperature=0, stop=["Paris"]), progress=False
    )
    assert answer.text.startswith("The capital of France is") and answer.finish_reason == "stop"
    assert "".join(llm.stream(llm.encode_chat(question), params)) == "The capital of France"
    assert llm.stats().blocks_held == 0
    with pytest.raises(octavo.OctavoError, match="maximum context length"):
        llm.generate(["x"], octavo.SamplingParams(max_tokens=100_000), progress=False)
