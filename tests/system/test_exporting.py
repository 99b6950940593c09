"""docs/exporting.md is true: its script exports the layers of other families as they compute."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from export.families import READ
from export.gate import GRID
from export.sources import Attention, from_torch
from tests.support.server import ROOT
from tests.system.test_readme import blocks, run_python

PAGE = (ROOT / "docs" / "exporting.md").read_text()
[SCRIPT] = blocks("python", PAGE)

SIZES = {"num_attention_heads": 2, "hidden_size": 8, "intermediate_size": 16}
IMAGE = {"image_size": 8, "patch_size": 4, "num_hidden_layers": 2}
SPEECH = {
    **{"d_model": 8, "encoder_attention_heads": 2, "decoder_attention_heads": 2},
    **{"encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16},
    **{"vocab_size": 20, "pad_token_id": 1, "bos_token_id": 1, "eos_token_id": 1},
    **{"decoder_start_token_id": 1},
}

FAMILIES: dict[str, tuple[str, dict[str, Any], Callable[[], dict[str, Any]]]] = {
    "DistilBERT": (
        "DistilBert",
        {"dim": 8, "n_heads": 2, "n_layers": 2, "hidden_dim": 16, "vocab_size": 20},
        lambda: {"input_ids": torch.tensor([[1, 2, 3, 4, 5]])},
    ),
    "ViT": ("ViT", SIZES | IMAGE, lambda: {"pixel_values": torch.randn(2, 3, 8, 8)}),
    "ALBERT": (
        "Albert",
        SIZES | {"embedding_size": 8, "vocab_size": 20, "num_hidden_layers": 1},
        lambda: {"input_ids": torch.tensor([[1, 2, 3, 4, 5]])},
    ),
    "GPT-2": (
        "GPT2",
        {"n_embd": 8, "n_head": 2, "n_layer": 2, "vocab_size": 20}
        | {"bos_token_id": 1, "eos_token_id": 1},
        lambda: {"input_ids": torch.tensor([[1, 2, 3, 4, 5]])},
    ),
    "BART": ("Bart", SPEECH, lambda: {"input_ids": torch.tensor([[1, 2, 3, 4, 1]])}),
    "Whisper": (
        "Whisper",
        SPEECH | {"num_mel_bins": 4, "max_source_positions": 6},
        lambda: {
            "input_features": torch.randn(1, 4, 12),
            "decoder_input_ids": torch.tensor([[1, 2, 3]]),
        },
    ),
}


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


def test_every_family_of_the_page_is_tried() -> None:
    """The table has no row that nobody tried, but CLIP's, whose layers are those of BART."""
    assert {row for _, row, _ in CASES} == {row for row in modules() if row != "CLIP"}
    assert {family for family, _, _ in CASES} == FAMILIES.keys()


@pytest.mark.fault("E10")
@pytest.mark.parametrize(("family", "row", "name"), CASES, ids=" ".join)
def test_script_of_the_page_saves_what_the_family_computes(
    family: str, row: str, name: str, tmp_path: Path
) -> None:
    """What the exporter reads from its file answers as the attention inside transformers."""
    import transformers

    start, options, inputs = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{start}Config")(**options, attn_implementation="eager")
    model = getattr(transformers, f"{start}Model")(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(tmp_path / "MODEL_DIR")

    run_python("-c", SCRIPT, "MODEL_DIR", name, "layer.safetensors", folder=tmp_path)

    is_cross = "--attention cross" in row
    attention: Attention = "cross" if is_cross else "self"
    source = from_torch(tmp_path / "layer.safetensors", 2, attention=attention)
    given, answered = _inside(model, name, inputs())
    with torch.no_grad():
        output, _ = source.layer(
            given[0], given[1] if is_cross else None, causal="causal" in row and not is_cross
        )
    assert given[0].shape[1] > 2
    torch.testing.assert_close(output, answered, atol=1e-5, rtol=1e-5)


def _inside(
    model: Any, name: str, inputs: dict[str, Any]
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return what went into an attention of a model, and what left its output projection."""
    given: list[torch.Tensor] = []
    answered: list[torch.Tensor] = []
    attention = model.get_submodule(name)
    parts = ("out_proj", "o_proj", "out_lin", "dense", "c_proj")
    out = next(getattr(attention, part) for part in parts if hasattr(attention, part))

    def before(module: Any, args: Any, kwargs: Any) -> None:
        named = [kwargs.get(key) for key in ("hidden_states", "key_value_states")]
        given[:] = [value for value in (*args[:1], *named) if value is not None]

    hooks = [
        attention.register_forward_pre_hook(before, with_kwargs=True),
        out.register_forward_hook(lambda module, args, output: answered.append(output)),
    ]
    with torch.no_grad():
        model(**inputs)
    for hook in hooks:
        hook.remove()
    return given, answered[-1]


def test_commands_of_the_page_publish_the_layer(tmp_path: Path) -> None:
    """They run in their order, on a folder that transformers wrote."""
    import transformers

    _, options, _ = FAMILIES["DistilBERT"]
    config = transformers.DistilBertConfig(**options)
    transformers.DistilBertModel(config).save_pretrained(tmp_path / "MODEL_DIR")
    (tmp_path / "attention_of.py").write_text(SCRIPT)
    [block] = blocks("console", PAGE)
    script = "\n".join(re.findall(r"^\$ (.*)$", block, re.MULTILINE))

    ended = subprocess.run(
        ["bash", "-euc", script],  # noqa: S607
        cwd=tmp_path,
        env={
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "HF_HUB_OFFLINE": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )

    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "artifacts" / "distilbert-1" / "1" / "manifest.json").exists()


def test_page_says_what_the_code_has() -> None:
    """The families that are read, and the lengths that are tried."""
    read = {"bert": "BERT", "camembert": "CamemBERT", "electra": "ELECTRA", "roberta": "RoBERTa"}
    assert {"xlm-roberta", *read} == set(READ)
    assert all(name in PAGE for name in read.values())
    assert max(length for length, _, _ in GRID) == 512
