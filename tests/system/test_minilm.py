"""
The first real run: all six layers of a trained model, served, against transformers' own numbers.

The weights are those of all-MiniLM-L6-v2, which a package ships.  transformers
runs it on sentences; a served layer is given the same input as the layer in
there, and must find the same output and the same weights of every head.
`pytest --log-cli-level=INFO tests/system/test_minilm.py` shows the differences.
"""

import logging
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from export.publish import publish
from export.sources import from_hf
from export.weights_file import read_spec
from service.contract import WEIGHTS_FILE
from service.inference.artifact import Artifact, read_artifact
from tests.support.calls import (
    Array,
    Case,
    Reply,
    send_json,
    send_oip_binary,
    send_packed,
    send_safetensors,
    send_single,
)
from tests.support.server import ROOT, Server

log = logging.getLogger(__name__)

SENTENCE = "The model didn't work because it was too complex."
SHORTER = "Attention."
LONGER = (
    "Each head attends to its own pattern, and averaging them over the layer"
    " hides what every single one of them does."
)
ALONE = (SENTENCE,)
MIXED = (SHORTER, SENTENCE, LONGER)
LENGTHS = {SHORTER: 4, SENTENCE: 14, LONGER: 25}
"""In tokens, [CLS] and [SEP] included."""

LAYERS = range(6)
HEADS, EMBED_DIM = 12, 384

TOLERANCE = 1e-5
"""Rule 4 of the contract: outputs relative to max(1, max|expected|), weights absolute."""

HEADS_APART = 0.1
"""The nearest two heads of a layer, on the sentence, differ by 0.16 in some weight."""

ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""For exports side by side: numpy's and torch's threads spin while they wait for a core."""

LOUD = 100.0
"""What padding is filled with: ten times what the model's own numbers reach, so a leak shows."""


@dataclass(frozen=True)
class Attended:
    """
    One sequence in one layer, as transformers has it.

    Shapes: S length, E embedding, H heads.
        embeddings  [S, E]     what goes into the layer
        output      [S, E]     of `attention.output.dense`
        weights     [H, S, S]
    """

    embeddings: Array
    output: Array
    weights: Array


ByLayer = tuple[Attended, ...]


@dataclass(frozen=True)
class Truth:
    """What transformers computes: each sentence run alone, and all of `MIXED` in one batch."""

    alone: dict[str, ByLayer]
    padded: tuple[ByLayer, ...]
    attend_mask: Array
    """Of the padded batch, [B, S]."""


@dataclass(frozen=True)
class Form:
    """One way to ask for a layer's answer, and the sentences that share the call."""

    send: Callable[[Server, Case], Reply]
    sentences: tuple[str, ...]


def send_padded(server: Server, case: Case) -> Reply:
    """Send a dense binary batch, padded by the caller and hidden with `attend_mask`."""
    lengths = [len(x) for x in case.embeddings]
    longest = max(lengths)
    padded = Case(
        case.model,
        tuple(
            np.pad(x, ((0, longest - len(x)), (0, 0)), constant_values=LOUD)
            for x in case.embeddings
        ),
        attend_mask=tuple(np.arange(longest) < n for n in lengths),
        weights=case.weights,
    )
    reply = send_oip_binary(server, padded)
    outputs = tuple(x[:n] for x, n in zip(reply.outputs, lengths, strict=True))
    if reply.weights is None:
        return Reply(outputs, None)
    assert all(not w[:, :, n:].any() for w, n in zip(reply.weights, lengths, strict=True))
    return Reply(outputs, tuple(w[:, :n, :n] for w, n in zip(reply.weights, lengths, strict=True)))


FORMS = {
    "json-alone": Form(send_single, ALONE),
    "safetensors-alone": Form(send_safetensors, ALONE),
    "binary-alone": Form(send_oip_binary, ALONE),
    "json-mixed": Form(send_json, MIXED),
    "safetensors-packed": Form(send_packed, MIXED),
    "binary-padded": Form(send_padded, MIXED),
}

each_layer = pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: f"layer-{layer}")
each_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


@pytest.fixture(scope="module")
def truth(checkpoint: Path) -> Truth:
    """Return transformers' own numbers, computed without network."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("HF_HUB_OFFLINE", "1")  # read when transformers is imported
        from transformers import AutoModel, AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(checkpoint, local_files_only=True)
        model = AutoModel.from_pretrained(
            checkpoint,
            local_files_only=True,
            attn_implementation="eager",  # the one that hands out weights
        ).eval()

        def tokenize(sentences: Sequence[str]) -> Any:
            return tokenizer(list(sentences), padding=True, return_tensors="pt")

        together = tokenize(MIXED)
        return Truth(
            alone={sentence: _run(model, tokenize([sentence]))[0] for sentence in MIXED},
            padded=_run(model, together),
            attend_mask=together["attention_mask"].numpy().astype(np.bool_),
        )


@pytest.fixture(scope="module")
def artifacts(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Artifact]:
    """Return the six layers, each published through the gate, in a repository of their own."""
    repository = tmp_path_factory.mktemp("minilm") / "repository"
    offload = min(len(LAYERS), len(os.sched_getaffinity(0)))
    context = multiprocessing.get_context("spawn")
    with pytest.MonkeyPatch.context() as environment:
        for name, value in ONE_THREAD.items():
            environment.setenv(name, value)
        with ProcessPoolExecutor(offload, context) as pool:
            paths = list(pool.map(export_layer, repeat(checkpoint), repeat(repository), LAYERS))
    return [read_artifact(path) for path in paths]


def export_layer(checkpoint: Path, repository: Path, layer: int) -> Path:
    """Publish one layer; return the artifact's directory."""
    return publish(from_hf(checkpoint, layer), repository, name_of(layer)).path


@pytest.fixture(scope="module")
def served(artifacts: list[Artifact]) -> Iterator[Server]:
    """Return one server of all six layers."""
    repository = artifacts[0].path.parent.parent
    with Server(repository) as running:
        yield running


def name_of(layer: int) -> str:
    """Return the name under which a layer is published."""
    return f"minilm-{layer}"


def ask(server: Server, form: Form, layer: int, truth: Truth, *, weights: bool) -> Reply:
    """Return a served layer's answer to what that layer is given inside transformers."""
    embeddings = tuple(truth.alone[s][layer].embeddings for s in form.sentences)
    return form.send(server, Case(name_of(layer), embeddings, weights=weights))


def output_error(found: Sequence[Array], expected: Sequence[Array]) -> float:
    """Return the largest max|found - expected| / max(1, max|expected|) of all sequences."""
    errors = []
    for have, want in zip(found, expected, strict=True):
        assert have.shape == want.shape
        exact = want.astype(np.float64)
        errors.append(np.abs(have - exact).max() / max(1.0, np.abs(exact).max()))
    return float(np.max(errors))


def weights_error(found: Sequence[Array], expected: Sequence[Array]) -> float:
    """Return the largest |found - expected| of all sequences and heads."""
    errors = []
    for have, want in zip(found, expected, strict=True):
        assert have.shape == want.shape
        errors.append(np.abs(have - want.astype(np.float64)).max())
    return float(np.max(errors))


def _run(model: Any, tokens: Any) -> tuple[ByLayer, ...]:
    """Run transformers' model; return what every layer had, by sequence."""
    outputs: list[torch.Tensor] = []
    hooks = [
        # Before the dropout, the residual and the LayerNorm that follow.
        layer.attention.output.dense.register_forward_hook(
            lambda _module, _inputs, output: outputs.append(output)
        )
        for layer in model.encoder.layer
    ]
    with torch.no_grad():
        seen = model(**tokens, output_attentions=True, output_hidden_states=True)
    for hook in hooks:
        hook.remove()
    layers = list(zip(seen.hidden_states[:-1], outputs, seen.attentions, strict=True))
    assert len(layers) == len(LAYERS)
    return tuple(
        tuple(Attended(*(tensor[row].numpy() for tensor in layer)) for layer in layers)
        for row in range(len(tokens["input_ids"]))
    )


def test_sentences_differ_in_length(truth: Truth) -> None:
    """The mixed batch really mixes: its lengths are those of the model's own tokenizer."""
    shapes = {s: truth.alone[s][0].embeddings.shape for s in MIXED}

    assert shapes == {s: (length, EMBED_DIM) for s, length in LENGTHS.items()}
    assert truth.attend_mask.sum(axis=1).tolist() == [LENGTHS[s] for s in MIXED]


@each_form
@each_layer
def test_served_layer_equals_transformers(
    layer: int, form: Form, served: Server, truth: Truth
) -> None:
    """Rule 4: outputs and every head's weights are the trained layer's, in every wire format."""
    wanted = [truth.alone[s][layer] for s in form.sentences]

    reply = ask(served, form, layer, truth, weights=True)

    assert reply.weights is not None
    by_output = output_error(reply.outputs, [w.output for w in wanted])
    by_weights = weights_error(reply.weights, [w.weights for w in wanted])
    log.info("output %.2e, weights %.2e", by_output, by_weights)
    assert by_output <= TOLERANCE
    assert by_weights <= TOLERANCE


@each_form
@each_layer
def test_output_is_the_same_without_weights(
    layer: int, form: Form, served: Server, truth: Truth
) -> None:
    """Rule 2: whether weights are asked for changes nothing but whether they come."""
    wanted = [truth.alone[s][layer].output for s in form.sentences]
    with_weights = ask(served, form, layer, truth, weights=True)

    reply = ask(served, form, layer, truth, weights=False)

    assert reply.weights is None
    by_output = output_error(reply.outputs, wanted)
    log.info("output %.2e", by_output)
    assert by_output <= TOLERANCE
    assert output_error(reply.outputs, with_weights.outputs) <= TOLERANCE


@each_layer
def test_padding_means_what_it_means_to_transformers(
    layer: int, served: Server, truth: Truth
) -> None:
    """`attend_mask` is transformers' padding mask: even the padded positions answer alike."""
    wanted = [by_layer[layer] for by_layer in truth.padded]
    embeddings, mask = tuple(w.embeddings for w in wanted), tuple(truth.attend_mask)

    reply = send_oip_binary(
        served, Case(name_of(layer), embeddings, attend_mask=mask, weights=True)
    )

    assert reply.weights is not None
    by_output = output_error(reply.outputs, [w.output for w in wanted])
    by_weights = weights_error(reply.weights, [w.weights for w in wanted])
    log.info("output %.2e, weights %.2e", by_output, by_weights)
    assert by_output <= TOLERANCE
    assert by_weights <= TOLERANCE


@each_layer
def test_weights_are_per_head_in_the_layers_order(layer: int, served: Server, truth: Truth) -> None:
    """Rule 3: twelve different patterns come back in the layer's order, not their mean."""
    wanted = truth.alone[SENTENCE][layer].weights

    reply = ask(served, FORMS["json-alone"], layer, truth, weights=True)

    assert reply.weights is not None
    [found] = reply.weights
    assert found.shape == (HEADS, LENGTHS[SENTENCE], LENGTHS[SENTENCE])
    apart = np.abs(found[:, None] - wanted[None]).max(axis=(2, 3))  # [H, H]
    assert apart.argmin(axis=1).tolist() == list(range(HEADS))
    assert apart[~np.eye(HEADS, dtype=np.bool_)].min() > HEADS_APART
    assert weights_error([found.mean(axis=0)], [wanted.mean(axis=0)]) <= TOLERANCE


@each_form
@each_layer
def test_weights_rows_sum_to_one(layer: int, form: Form, served: Server, truth: Truth) -> None:
    """Rule 3: each head spreads all of its attention over the tokens, whoever shares the call."""
    reply = ask(served, form, layer, truth, weights=True)

    assert reply.weights is not None
    sums = [w.sum(axis=-1, dtype=np.float64) for w in reply.weights]
    assert [s.shape for s in sums] == [(HEADS, LENGTHS[s]) for s in form.sentences]
    assert weights_error(sums, [np.ones_like(s) for s in sums]) <= TOLERANCE


@each_layer
def test_model_page_names_checkpoint_layer_and_parity(layer: int, served: Server) -> None:
    """A caller can see where the weights came from, and what the gate measured."""
    page = served.get(f"/v1/models/{name_of(layer)}").json()

    assert page["source"] == {
        "kind": "hf",
        "checkpoint": "nreimers/MiniLM-L6-H384-uncased",
        "family": "bert",
        "layer": layer,
    }
    assert (page["layer"]["embed_dim"], page["layer"]["num_heads"]) == (EMBED_DIM, HEADS)
    assert {row["reference"] for row in page["parity"]} == {"formula", "layer", "torch", "alone"}
    for name in ("output_error", "weights_error"):
        worst = max(row[name] for row in page["parity"])
        log.info("%s of the gate: %.2e", name, worst)
        assert worst == page[f"worst_{name}"]
        assert worst <= TOLERANCE


@each_layer
def test_artifact_holds_the_checkpoints_numbers(
    layer: int, checkpoint: Path, artifacts: list[Artifact]
) -> None:
    """Nothing is rounded on the way from the checkpoint into the published graph."""
    tensors = load_file(checkpoint / "model.safetensors")
    part = f"encoder.layer.{layer}.attention"
    names = [f"{part}.self.{name}" for name in ("query", "key", "value")]
    artifact = artifacts[layer]

    found = read_spec(artifact.graph, artifact.manifest.layer).tensors

    for kind in ("weight", "bias"):
        for name in names:
            wanted = tensors[f"{name}.{kind}"]
            ours = found[f"{name.rsplit('.', 1)[1]}.{kind}"]
            np.testing.assert_array_equal(ours.numpy(), wanted)
        wanted = tensors[f"{part}.output.dense.{kind}"]
        np.testing.assert_array_equal(found[f"output.{kind}"].numpy(), wanted)


def test_export_command_publishes_the_same_weights(
    checkpoint: Path, artifacts: list[Artifact], tmp_path: Path
) -> None:
    """`python -m export --from-hf DIR --layer N` is what the tests above serve."""
    what = ["--name", "minilm-3", "--from-hf", str(checkpoint), "--layer", "3"]

    done = subprocess.run(
        [sys.executable, "-m", "export", *what, "--repository", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, **ONE_THREAD},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    made, wanted = read_artifact(tmp_path / "minilm-3" / "1").manifest, artifacts[3].manifest
    assert f"published {tmp_path / 'minilm-3' / '1'}" in done.stdout
    assert made.files[WEIGHTS_FILE] == wanted.files[WEIGHTS_FILE]
    assert (made.layer, made.source) == (wanted.layer, wanted.source)
