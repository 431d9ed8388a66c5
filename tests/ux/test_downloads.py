"""Models of the hub, fetched by the command from a hub on the loopback that fails in every way."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Q

from tests.fake_hub import COMMIT, FakeHub
from tests.small_models import Small, hf_model, save_gguf
from tests.ux.test_command_line import OCTAVO
from tests.waiting import until

SHARDED, QUANTS = "org/sharded", "org/quants-GGUF"
MMPROJ = "mmproj-small-Q8_0.gguf"


@pytest.fixture(scope="module")
def repos(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder of several shards with side files, and one of two quantizations and a projector."""
    root = tmp_path_factory.mktemp("repos")
    sharded = root / "sharded"
    hf_model(Small(layers=1)).save_pretrained(sharded, max_shard_size="100KB")
    (sharded / "tokenizer.json").write_text("{}")
    (sharded / "chat_template.jinja").write_text("{{ messages }}")
    (sharded / "README.md").write_text("not wanted")
    (sharded / "original").mkdir()
    (sharded / "original" / "consolidated.safetensors").write_bytes(b"not wanted either")
    quants = root / "quants"
    quants.mkdir()
    for name, quant in (("BF16", Q.BF16), ("F16", Q.F16), ("Q8_0", Q.Q8_0)):
        save_gguf(Small(layers=1), quants / f"small-{name}.gguf", quant)
    (quants / MMPROJ).write_bytes(b"a projector")
    return {SHARDED: sharded, QUANTS: quants}


@pytest.fixture
def hub(repos: dict[str, Path]) -> Iterator[FakeHub]:
    with FakeHub(repos) as server:
        yield server


def environment(hub: FakeHub | None, home: Path) -> dict[str, str]:
    own = {
        "HF_HOME": str(home / "hf"),
        "OCTAVO_CACHE": str(home / "octavo"),
        "HF_HUB_DISABLE_XET": "1",
    }
    online = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": hub.url} if hub else {"HF_HUB_OFFLINE": "1"}
    return os.environ | own | online


def octavo(hub: FakeHub | None, home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*OCTAVO, *arguments], env=environment(hub, home), capture_output=True, text=True,
        check=False, stdin=subprocess.DEVNULL, timeout=120,
    )  # fmt: skip


def interrupt(hub: FakeHub, home: Path, name: str, file: str) -> None:
    """Kills `octavo pull` when half of `file` has come."""
    hub.stalled.add(file)
    hub.half_sent.clear()
    process = subprocess.Popen(
        [*OCTAVO, "pull", name], env=environment(hub, home), stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert hub.half_sent.wait(60)
    snapshot = home / "hf/hub" / f"models--{name.replace('/', '--')}" / "snapshots" / COMMIT
    others = {f.name for f in hub.repos[name].iterdir() if f.is_file()} - {file, "README.md"}
    until(lambda: {f.name for f in snapshot.glob("*")} == others)  # which come beside it
    process.send_signal(signal.SIGKILL)
    process.wait()
    hub.stalled.clear()


def test_only_what_the_model_needs_is_fetched_and_then_never_asked_for(
    hub: FakeHub, repos: dict[str, Path], tmp_path: Path
) -> None:
    first = octavo(hub, tmp_path, "pull", SHARDED)
    assert first.returncode == 0, first.stderr
    folder = Path(first.stdout.strip())
    assert folder.name == COMMIT and not (folder / "README.md").exists()
    assert not (folder / "original").exists() and (folder / "chat_template.jinja").exists()
    assert len(list(folder.glob("*.safetensors"))) > 1
    asked = hub.asked
    assert octavo(hub, tmp_path, "show", SHARDED).returncode == 0
    assert (
        octavo(None, tmp_path, "show", f"https://huggingface.co/{SHARDED}/tree/main").returncode
        == 0
    )
    assert hub.asked == asked


def test_a_quantization_is_fetched_with_its_encoder_alone(hub: FakeHub, tmp_path: Path) -> None:
    """F16 is not BF16, and a projector is no model."""
    for selection in ("Q8_0", "F16", "q8_0"):
        result = octavo(hub, tmp_path, "pull", f"hf.co/{QUANTS}:{selection}")
        assert Path(result.stdout.strip()).name == f"small-{selection.upper()}.gguf", result.stderr
        assert Path(result.stdout.strip()).with_name(MMPROJ).exists()
    assert hub.sent == {"small-Q8_0.gguf": 1, "small-F16.gguf": 1, MMPROJ: 1}
    asked = hub.asked
    address = f"https://huggingface.co/{QUANTS}/blob/main/small-F16.gguf"
    result = octavo(hub, tmp_path, "show", address)
    assert result.returncode == 0, result.stderr
    assert hub.asked == asked
    missing = octavo(hub, tmp_path, "pull", f"{QUANTS}:Q2_K")
    assert (
        missing.returncode == 3
        and "it has small-BF16.gguf, small-F16.gguf" in missing.stderr.replace(f"{MMPROJ}, ", "")
    )


def test_an_interrupted_shard_is_fetched_at_the_next_start(hub: FakeHub, tmp_path: Path) -> None:
    shard = "model-00002-of-00003.safetensors"
    assert (hub.repos[SHARDED] / shard).exists()
    interrupt(hub, tmp_path, SHARDED, shard)
    offline = octavo(None, tmp_path, "show", SHARDED)
    assert offline.returncode == 3
    assert f"is here in part, 1 file missing ({shard})" in offline.stderr
    assert f"try: octavo pull {SHARDED}" in offline.stderr
    before = dict(hub.sent)
    result = octavo(hub, tmp_path, "show", SHARDED)
    assert result.returncode == 0, result.stderr
    assert {f: n for f, n in hub.sent.items() if n != before.get(f)} == {shard: 1}


@pytest.mark.parametrize("leftover", [True, False])
def test_an_interrupted_side_file_is_fetched_at_the_next_start(
    leftover: bool, hub: FakeHub, tmp_path: Path
) -> None:
    """All weights are here, only the template is not: the model would run, and talk nonsense."""
    interrupt(hub, tmp_path, SHARDED, "chat_template.jinja")
    for file in (tmp_path / "hf").rglob("*.incomplete"):
        if not leftover:  # as where the client had the time to tidy up
            file.unlink()
    assert octavo(None, tmp_path, "show", SHARDED).returncode == 0  # what is here can be used
    result = octavo(hub, tmp_path, "pull", SHARDED)
    assert (Path(result.stdout.strip()) / "chat_template.jinja").exists()
    asked = hub.asked
    assert leftover == any(
        (tmp_path / "hf").rglob("*.incomplete")
    )  # the killed process's, and nobody's now
    assert octavo(hub, tmp_path, "show", SHARDED).returncode == 0
    assert hub.asked == asked


def test_an_interrupted_encoder_is_fetched_at_the_next_start(hub: FakeHub, tmp_path: Path) -> None:
    """The model is here and would run, without images."""
    hub.stalled.add(MMPROJ)
    name = f"{QUANTS}:Q8_0"
    process = subprocess.Popen([*OCTAVO, "pull", name], env=environment(hub, tmp_path))
    model = tmp_path / "hf/hub/models--org--quants-GGUF/snapshots" / COMMIT / "small-Q8_0.gguf"
    assert hub.half_sent.wait(60)
    until(model.exists)
    process.kill()
    process.wait()
    hub.stalled.clear()
    assert model.exists() and not model.with_name(MMPROJ).exists()
    assert octavo(None, tmp_path, "show", name).returncode == 0  # what is here can be used
    assert octavo(hub, tmp_path, "show", name).returncode == 0
    assert model.with_name(MMPROJ).exists()


def test_a_connection_that_breaks(hub: FakeHub, tmp_path: Path) -> None:
    shard = "model-00001-of-00003.safetensors"
    hub.broken.add(shard)
    result = octavo(hub, tmp_path, "pull", SHARDED)
    assert result.returncode == 3, result.stderr
    assert re.match(
        rf"error: {SHARDED} is here in part, 1 file missing \({shard}\), and the rest cannot be fetched",
        result.stderr,
    )
    hub.broken.clear()
    assert octavo(hub, tmp_path, "pull", SHARDED).returncode == 0


def test_no_network(tmp_path: Path) -> None:
    """One line, soon; a model that is here is used whatever the network does."""
    dead = FakeHub({})
    dead.server_close()
    began = time.monotonic()
    result = octavo(dead, tmp_path, "serve", "org/none", "--port", "0")
    assert result.returncode == 3 and time.monotonic() - began < 10
    lines = result.stderr.splitlines()
    assert lines[0].startswith("error: cannot fetch org/none from the model hub (")
    assert lines[1:] == ["  try: octavo models"]


def test_names_that_the_hub_does_not_have(hub: FakeHub, tmp_path: Path) -> None:
    result = octavo(hub, tmp_path, "pull", "org/none")
    assert result.returncode == 3 and "the model hub has no org/none" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_full_disk_is_noticed_before(
    hub: FakeHub, tmp_path: Path, repos: dict[str, Path]
) -> None:
    """A file of 2^50 bytes, which takes no room in the repository, fits nowhere."""
    big = repos[QUANTS] / "small-Q6_K.gguf"
    with big.open("wb") as out:
        os.truncate(out.fileno(), 1 << 43)
    try:
        result = octavo(hub, tmp_path, "pull", f"{QUANTS}:{big.name}")
    finally:
        big.unlink()
    assert result.returncode == 1
    assert "needs 8,796,093 MB" in result.stderr and "MB are free" in result.stderr
    assert f"try: HF_HOME=/tmp/octavo octavo pull {QUANTS}:{big.name}" in result.stderr
