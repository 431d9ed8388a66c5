"""Recipes of one's own: what does not fit together is refused with its line."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from octavo.checkpoint.base import TensorType
from octavo.cli.quantize import _instead
from octavo.cli.screen import size
from octavo.compress import sensitivity
from octavo.compress.conversion import plain_config
from octavo.compress.recipe_file import builtin, read_recipe
from octavo.compress.recipes import check_rules
from octavo.errors import UsageError

ROWS = "weights: {bits: 8, group: 0, symmetric: true}\n"
FLOAT8 = "formats: [compressed-tensors]\nweights: fp8\n"
RULE = "formats: [gptq]\nweights: {bits: 4}\nlayers:\n  - match: '*.k_prj.weight'\n    "


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("formats: [mlx]\nweights: {bits: 4, group: 0}", "line 2: mlx stores no whole rows"),
        ("formats: [awq]\nweights: {bits: 4, group: 0}", "line 2: awq stores no whole rows"),
        (RULE.replace("gptq", "mlx") + "weights: {bits: 4, group: 0}", "line 5: mlx stores no"),
        ("formats: [awq]\nweights: {bits: 8}", "line 2: awq stores 4 bits, not 8"),
        *(
            (
                f"formats: [compressed-tensors]\n{ROWS}method: {method}\nactivations: static",
                f"line 4: activations go with method: rtn or smoothquant, not with {method}",
            )
            for method in ("gptq", "healed", "distilled", "awq")
        ),
        (
            f"formats: [gptq]\n{ROWS}activations: dynamic",
            "line 3: activations are stored as compressed-tensors or safetensors only",
        ),
        (FLOAT8 + "activations: static", "line 3: static steps are found with method: smoothquant"),
        (RULE + "weights: keep\n    where: sensitive", "line 6: where is of GGUF files"),
        (
            RULE.replace("gptq", "gguf").replace("{bits: 4}", "Q4_K\nfile_type: 15")
            + "weights: keep",
            "line 6: 'keep' is of folders",
        ),
    ],
)
def test_what_does_not_fit_together(wrong: str, says: str) -> None:
    with pytest.raises(UsageError) as e:
        read_recipe(wrong, "own.yaml")
    assert str(e.value).startswith(f"own.yaml, {says}")


def test_rules_that_fit_no_layer() -> None:
    layers = {"model.layers.0.k_proj.weight"}
    own = replace(read_recipe(RULE + "weights: keep", "own.yaml"), file="own.yaml")
    with pytest.raises(UsageError, match=r"own\.yaml: no layer fits '\*\.k_prj\.weight'; there is"):
        check_rules(own, layers, ())
    check_rules(own, layers, {"x.k_prj.weight"})  # what is kept may be any tensor
    check_rules(replace(own, file=""), layers)
    copied = replace(builtin()["q4_k_m"], file="own.yaml")
    check_rules(copied, {"output.weight", "blk.0.attn_v.weight"})  # no experts
    with pytest.raises(UsageError, match=r"no layer fits 'blk\.\*\.attn_v\.weight'"):
        check_rules(copied, {"output.weight"})
    for recipe in builtin().values():
        check_rules(recipe, ())


def test_wording() -> None:
    assert (size(400), size(30_000), size(2_500_000)) == ("0.4 kB", "30.0 kB", "2.5 MB")
    own = read_recipe("formats: [gptq]\nweights: {bits: 4, group: 96}", "own.yaml")
    assert _instead(own, 64) == " instead of 96" and _instead(own, 96) == ""
    assert _instead(builtin()["q4_0"], 0) == ""


def test_what_was_measured_is_of_one_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sensitivity, "fingerprint", lambda _: "model")
    keys = [sensitivity.made_of(None)]  # type: ignore[arg-type]
    monkeypatch.setattr(sensitivity, "__version__", "0")
    keys.append(sensitivity.made_of(None))  # type: ignore[arg-type]
    monkeypatch.setattr(sensitivity, "ROUGH", None)
    keys.append(sensitivity.made_of(None))  # type: ignore[arg-type]
    assert len(set(keys)) == 3


def test_a_plain_config_has_one_dtype() -> None:
    stored = SimpleNamespace(tensors={"x": SimpleNamespace(type=TensorType.Q8_0)})
    folder = SimpleNamespace(metadata={"dtype": "float32", "torch_dtype": "float32"})
    config = plain_config(stored, folder, TensorType.BF16)  # type: ignore[arg-type]
    assert config == {"torch_dtype": "bfloat16"}
