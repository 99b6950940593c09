"""docs/exporting.md is true: its script exports the layers of other families as they compute."""

import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from export.__main__ import main
from export.families.registry import MODULES
from export.grid import GRID
from export.sources import from_torch
from service.inference.artifact import read_artifact
from tests.support.server import ROOT
from tests.system.test_readme import blocks

PAGE = (ROOT / "docs" / "exporting.md").read_text()
OTHER = PAGE.split("\n## Other families\n")[1].split("\n## ")[0]
[SCRIPT] = blocks("python", OTHER)

SIZES = {
    **{"num_attention_heads": 2, "hidden_size": 8, "intermediate_size": 16},
    **{"num_hidden_layers": 2, "vocab_size": 20},
}
CONVOLUTIONS = {
    **{"conv_dim": (8, 8), "conv_kernel": (3, 3), "conv_stride": (2, 2)},
    **{"num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4},
    "num_conv_pos_embedding_groups": 2,
}

TOKENS = {"input_ids": torch.tensor([[3, 4, 5, 6, 7]])}

FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "ERNIE": ("Ernie", SIZES, TOKENS),
    "DINOv2": (
        "Dinov2",
        SIZES | {"image_size": 8, "patch_size": 4},
        {"pixel_values": torch.linspace(-1, 1, 2 * 3 * 8 * 8).view(2, 3, 8, 8)},
    ),
    "FlauBERT": ("Flaubert", {"emb_dim": 8, "n_heads": 2, "n_layers": 2, "vocab_size": 20}, TOKENS),
    "HuBERT": (
        "Hubert",
        SIZES | CONVOLUTIONS,
        {"input_values": torch.linspace(-1, 1, 40)[None]},
    ),
    "OPT": (
        "OPT",
        SIZES | {"ffn_dim": 16, "word_embed_proj_dim": 8, "max_position_embeddings": 16},
        TOKENS,
    ),
}
"""One of each row of the page's table: its classes in transformers, a size, and an input."""


def modules() -> dict[str, str]:
    """Return what the page says of each row of its table: the families, and the module's name."""
    section = PAGE.split("| family | module |\n")[1].split("\n\n")[0]
    return dict(re.findall(r"^\| (.+?) \| `(.+?)` \|$", section, re.MULTILINE))


CASES = [
    (family, row, name)
    for row, name in modules().items()
    for family in FAMILIES
    if family in re.split(r"[ ,:]+", row)
]


def test_every_row_of_the_page_is_tried() -> None:
    """The table has no row that nobody tried."""
    assert {row for _, row, _ in CASES} == modules().keys()
    assert {family for family, _, _ in CASES} == FAMILIES.keys()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return an empty current directory, as it is for commands that run in this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on a busy machine they wait for each other
    yield tmp_path
    torch.set_num_threads(threads)
    sys.modules.pop("mylayer", None)


def run_page(*headings: str) -> None:
    """Save the scripts of these sections under their names, then run their commands in order."""
    for heading in headings:
        section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
        files = re.findall(r"this as `(\w+\.py)`", section)
        for file, script in zip(files, blocks("python", section), strict=True):
            Path(file).write_text(script)
        commands = re.findall(r"^\$ python (.*)$", "\n".join(blocks("console", section)), re.M)
        assert commands
        for command in commands:
            match command.split():
                case ["-m", "export", *argv]:
                    assert main(argv) == 0
                case [file, *argv]:
                    run_script(file, *argv)


def run_script(file: str, *argv: str) -> None:
    """Run a script of the page in this process: to load transformers takes far longer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [file, *argv])
        runpy.run_path(file, run_name="__main__")


@pytest.mark.fault("E10")
@pytest.mark.parametrize(("family", "row", "name"), CASES, ids=" ".join)
def test_script_of_the_page_saves_what_the_family_computes(
    family: str, row: str, name: str, folder: Path
) -> None:
    """What the exporter reads from its file answers as the attention inside transformers."""
    import transformers

    start, options, inputs = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{start}Config")(**options, attn_implementation="eager")
    model = getattr(transformers, f"{start}Model")(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained("MODEL_DIR")
    Path("attention_of.py").write_text(SCRIPT)

    run_script("attention_of.py", "MODEL_DIR", name, "layer.safetensors")

    source = from_torch(folder / "layer.safetensors", 2, causal="--causal" in row)
    given, answered = _inside(model, name, inputs)
    with torch.no_grad():
        output = source.layer(given, causal=source.config.causal).output
    assert given.shape[1] > 2
    torch.testing.assert_close(output, answered, atol=1e-5, rtol=1e-5)


def _inside(model: Any, name: str, inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what went into an attention of a model, and what left its output projection."""
    given: list[torch.Tensor] = []
    answered: list[torch.Tensor] = []
    parts = dict(model.get_submodule(name).named_modules())
    out = next(
        parts[part] for part in ("out_proj", "o_proj", "out_lin", "output.dense") if part in parts
    )

    def before(module: Any, args: Any, kwargs: Any) -> None:
        given.append(args[0] if args else kwargs["hidden_states"])

    hooks = [
        parts[""].register_forward_pre_hook(before, with_kwargs=True),
        out.register_forward_hook(lambda module, args, output: answered.append(output)),
    ]
    with torch.no_grad():
        model(**inputs)
    for hook in hooks:
        hook.remove()
    return given[0], answered[0]


def test_commands_of_the_page_publish_the_layer(folder: Path) -> None:
    """They run in their order, on a folder that transformers wrote."""
    import transformers

    transformers.ErnieModel(transformers.ErnieConfig(**SIZES)).save_pretrained("MODEL_DIR")

    run_page("Other families")

    assert (folder / "artifacts" / "ernie-1" / "1" / "manifest.json").exists()


def test_module_of_ones_own_is_published_and_meets_its_own_answers(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The page's module, with its key head for four query heads and its capped logits."""
    run_page("A module of your own", "Answers of your own")

    out = capsys.readouterr().out
    layer = read_artifact(folder / "artifacts" / "own" / "1").manifest.layer
    assert (layer.num_kv_heads, layer.softcap) == (1, 5.0)
    rows = read_artifact(folder / "artifacts" / "checked" / "1").manifest.parity
    assert {"module", "check calls.safetensors"} <= {row.reference for row in rows}
    assert "verified artifacts/checked/1" in out
    assert "assumed" not in out


def test_positions_of_the_page_tell_the_cat_from_the_mouse(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without them both sentences give the cat the same output, as the page says."""
    run_page("Positions")

    bare, placed = re.findall(r"^\w+ differs by (\S+)$", capsys.readouterr().out, re.MULTILINE)
    assert float(bare) == 0
    assert float(placed) > 0.01


def test_page_says_what_the_code_has() -> None:
    """The families of this page are not read, and the lengths that are tried are as it says."""
    import transformers

    kinds = {
        getattr(transformers, f"{start}Config").model_type for start, _, _ in FAMILIES.values()
    }
    assert not kinds & MODULES.keys()
    assert max(length for length, _, _ in GRID) == 512
