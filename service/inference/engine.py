"""
Run an artifact: the one file that knows onnxruntime.

A caller gives embeddings and, if wanted, masks; the engine folds the masks into
the graph's own full mask, picks the graph's cheaper path when there is nothing
to fold, and translates what the runtime raises.

Axes: B batch, S query length, T key length (= S for self-attention),
E embed_dim, M memory width, H heads.
"""

import contextlib
import io
import os
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, Literal, Protocol

# Before the import: the runtime decides on its telemetry when it is loaded.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import numpy as np
import numpy.typing as npt
import onnxruntime

from service.contract import (
    EMBEDDINGS,
    HEAD_MASK,
    LAYER_METADATA,
    MEMORY,
    OUTPUT,
    PAIR_MASK,
    PLAIN,
    POSITIONS,
    VALUE_MEMORY,
    WEIGHTS_FILE,
    GraphTensor,
    graph_inputs,
    graph_outputs,
)
from service.errors import (
    ArtifactUnreadable,
    InferenceFailed,
    ProviderUnavailable,
    ThreadsUnavailable,
)
from service.inference.artifact import Graph
from service.inference.calls import Bools, Floats, Inputs, Outputs
from service.inference.cuda import check_cuda
from service.inference.nonfinite import spoilt
from service.layer_config import LayerConfig
from service.threads import ADVICE

Provider = Literal["cpu", "cuda"]

RUNTIME_VERSION: Final[str] = onnxruntime.__version__

_PROVIDER_NAMES: Final = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
_DTYPES: Final[dict[str, Literal["float32", "bool", "int64"]]] = {
    "tensor(float)": "float32",
    "tensor(bool)": "bool",
    "tensor(int64)": "int64",
}
_SPIN_US: Final = 500
"""
How long the threads of a run alone look out for the next one before they sleep: waking them
takes a fifth of [1, 8] (bench/NOTES.md, "Concurrent runs").
"""

_NO_PAIR_MASK: Final = np.ones((1, 1, 1, 1), np.bool_)
_TRUE: Final = np.array(True)
_FALSE: Final = np.array(False)


@lru_cache
def _all_heads(shape: tuple[int, int]) -> Floats:
    """Return a head mask [B, H] that hides nothing."""
    return np.ones(shape, np.float32)


class Stop:
    """Ends a run from another thread, between two of its operators."""

    def __init__(self) -> None:
        self.options = onnxruntime.RunOptions()

    def set(self) -> None:
        """End the run that this was given to, or the next one."""
        self.options.terminate = True


class Engine(Protocol):
    """What runs a layer, from any thread."""

    layer: LayerConfig
    provider: Provider
    concurrent_runs: int
    """How many runs are best in progress at once when one batch does not hold all that waits."""

    def run(
        self, inputs: Inputs, *, weights: bool, stop: Stop | None = None, concurrent: bool = False
    ) -> Outputs:
        """
        Attend over one batch; `concurrent` = other runs are in progress at the same time.

        Raises:
            InferenceFailed: the runtime refused the batch or was stopped; cause attached.
        """
        ...


class OnnxEngine:
    """
    An artifact's graph in two onnxruntime sessions: one for a run alone, one for runs at once.

    The sessions hold copies of the graph's weights: no file is opened, and `graph` is of no
    further use to them.

    A run alone has all `threads`.  Up to `concurrent_runs` at once share them: they
    need not wait for each other's slowest part, and so more is done in all
    (bench/NOTES.md, "Concurrent runs").

    Raises:
        ProviderUnavailable: `provider` was asked for and is not what would run.
        ThreadsUnavailable: the system starts no more threads.
        ArtifactUnreadable: the runtime cannot read the graph, it names a file other than
            `WEIGHTS_FILE`, its signature is not the one that the contract gives for `layer`, or it
            says that it is of another layer.
    """

    def __init__(
        self,
        graph: Graph,
        layer: LayerConfig,
        *,
        provider: Provider = "cpu",
        threads: int = 1,
        concurrent_runs: int = 1,
    ) -> None:
        self.layer = layer
        self.provider = provider
        self.concurrent_runs = concurrent_runs
        self._session = _open_session(graph, provider, threads, spin_us=_SPIN_US)
        self._concurrent_session = self._session
        if concurrent_runs > 1:
            share = max(1, threads // concurrent_runs)
            self._concurrent_session = _open_session(graph, provider, share, spin_us=0)
        self._names = [tensor.name for tensor in graph_outputs(layer)]
        check_signature(self.inputs(), graph_inputs(layer), f"{graph.path}: input")
        check_signature(self.outputs(), graph_outputs(layer), f"{graph.path}: output")
        described = self._session.get_modelmeta().custom_metadata_map.get(LAYER_METADATA)
        check_layer(described, layer, str(graph.path))

    def inputs(self) -> tuple[GraphTensor, ...]:
        """List what the graph really takes."""
        return _signature(self._session.get_inputs())

    def outputs(self) -> tuple[GraphTensor, ...]:
        """List what the graph really gives."""
        return _signature(self._session.get_outputs())

    def run(
        self, inputs: Inputs, *, weights: bool, stop: Stop | None = None, concurrent: bool = False
    ) -> Outputs:
        """See `Engine.run`."""
        session = self._concurrent_session if concurrent else self._session
        names = self._names if weights else [OUTPUT]
        found = None
        try:
            plain = not weights and self._is_plain(inputs)
            mask = None if plain else full_mask(inputs, self.layer.window)
            if mask is not None or weights:  # else every query attends to every key
                found = spoilt(inputs, mask, extra_keys=bool(self.layer.extra_keys))
            feed = self._feed(found.inputs if found else inputs, mask, plain=plain)
            results = session.run(names, feed, stop and stop.options)
        except Exception as error:
            # The runtime's exception classes share no base of their own.
            raise InferenceFailed("the runtime refused a batch") from error
        outputs = Outputs(*results) if weights else Outputs(results[0], None)
        return outputs if found is None else found.mark(outputs)

    def _is_plain(self, inputs: Inputs) -> bool:
        """Say whether the graph's path without masks answers this: the layer's default call."""
        layer, length = self.layer, inputs.embeddings.shape[1]
        return (
            inputs.attend_mask is None
            and inputs.pair_mask is None
            and inputs.head_mask is None
            and inputs.causal == layer.causal
            and (layer.window is None or length <= layer.window)
            # A key that is not finite would spoil the queries that it is hidden from.
            and not (layer.causal and not np.isfinite(inputs.embeddings).all())
        )

    def _feed(
        self, inputs: Inputs, mask: Bools | None, *, plain: bool
    ) -> dict[str, npt.NDArray[Any]]:
        rows, length = inputs.embeddings.shape[:2]
        if mask is None:
            mask = _NO_PAIR_MASK if plain else np.ones((1, 1, length, inputs.key_length), np.bool_)
        heads = (rows, self.layer.num_heads)
        feed: dict[str, npt.NDArray[Any]] = {
            EMBEDDINGS: inputs.embeddings,
            PAIR_MASK: mask,
            HEAD_MASK: _all_heads(heads)
            if inputs.head_mask is None
            else np.array(np.broadcast_to(inputs.head_mask, heads)),
            PLAIN: _TRUE if plain else _FALSE,
        }
        if inputs.memory is not None:
            feed[MEMORY] = inputs.memory
        if inputs.value_memory is not None:
            feed[VALUE_MEMORY] = inputs.value_memory
        if self.layer.takes_positions:
            positions = inputs.positions
            feed[POSITIONS] = np.arange(length)[None] if positions is None else positions
        return feed


def full_mask(inputs: Inputs, window: int | None = None) -> Bools | None:
    """
    Return the intersection of all masks as [B or 1, H or 1, S, T]; None = nothing is hidden.

    `causal` keeps t <= s counted from the upper left, `window` keeps |s - t| < window, for S = T.
    """
    mask = inputs.pair_mask
    length, keys = inputs.embeddings.shape[1], inputs.key_length
    if inputs.causal or (window is not None and length > window):
        near = np.tri(length, keys, 0 if inputs.causal else length, dtype=np.bool_)
        if window is not None and length > window:
            distances = np.arange(keys) - np.arange(length)[:, None]
            near &= np.abs(distances) < window
        mask = near[None, None] if mask is None else mask & near
    if inputs.attend_mask is not None:
        attended = inputs.attend_mask[:, None, None, :]
        if mask is None:
            # The runtime does not broadcast a mask over queries, so S is spelt out.
            rows = len(inputs.embeddings)
            mask = np.array(np.broadcast_to(attended, (rows, 1, length, keys)))
        else:
            mask = mask & attended
    return mask


def check_signature(
    found: tuple[GraphTensor, ...], expected: tuple[GraphTensor, ...], where: str
) -> None:
    """
    Return when names, dtypes and fixed axes agree; names first, then axes.

    Raises:
        ArtifactUnreadable: the first thing that does not.
    """
    found_names, expected_names = [t.name for t in found], [t.name for t in expected]
    if found_names != expected_names:
        raise ArtifactUnreadable(f"{where} names: expected {expected_names}, found {found_names}")
    for have, want in zip(found, expected, strict=True):
        if have.dtype != want.dtype:
            raise ArtifactUnreadable(
                f"{where} {want.name}: expected {want.dtype}, found {have.dtype}"
            )
        fixed = [axis if isinstance(axis, int) else "*" for axis in have.axes]
        wanted = [axis if isinstance(axis, int) else "*" for axis in want.axes]
        if fixed != wanted:
            raise ArtifactUnreadable(
                f"{where} {want.name} axes: expected {list(want.axes)}, found {list(have.axes)}"
            )


def check_layer(described: str | None, layer: LayerConfig, where: str) -> None:
    """
    Return when a graph that describes itself so (see `LAYER_METADATA`) computes that layer.

    Raises:
        ArtifactUnreadable: it computes another one.
    """
    if described is None and layer.is_of_format_1:
        return
    if described != layer.to_json():
        found = described or "nothing, as graphs of format 1, which compute the formula alone"
        raise ArtifactUnreadable(
            f"{where}: the graph is of another layer than the manifest: expected {layer.to_json()},"
            f" found {found[:1000]}"
        )


def _signature(nodes: list[Any]) -> tuple[GraphTensor, ...]:
    return tuple(
        GraphTensor(node.name, _DTYPES.get(node.type, node.type), tuple(node.shape))
        for node in nodes
    )


def _open_session(graph: Graph, provider: Provider, threads: int, *, spin_us: int) -> Any:
    name = _PROVIDER_NAMES[provider]
    if name not in onnxruntime.get_available_providers():
        raise ProviderUnavailable(
            f"provider: asked for {provider}, but this onnxruntime {onnxruntime.__version__}"
            f" offers {', '.join(onnxruntime.get_available_providers())};"
            " cuda needs the package onnxruntime-gpu (extra serve-cuda)"
        )
    if provider == "cuda":
        # Its packages lie where the system's loader does not look.  What it cannot find it
        # prints; the check says it better.
        with contextlib.redirect_stdout(io.StringIO()):
            onnxruntime.preload_dlls()
        check_cuda(Path(onnxruntime.__file__).parent / "capi")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    # The arena keeps the most that any shape ever took; service/host/malloc.py gives it back.
    options.enable_cpu_mem_arena = False
    # Spinning threads starve the event loop and each other.
    options.add_session_config_entry("session.intra_op.allow_spinning", "1" if spin_us else "0")
    options.add_session_config_entry("session.intra_op.spin_duration_us", str(spin_us))
    # The runtime copies what it needs while the session is made, and keeps no reference.
    options.add_external_initializers_from_files_in_memory(
        [WEIGHTS_FILE], [graph.weights], [len(graph.weights)]
    )
    # What else a graph may name, in a branch or a constant, would be looked for in the working
    # directory: there is no file below this one.
    options.add_session_config_entry(
        "session.model_external_initializers_file_folder_path", os.devnull
    )
    cuda_options = {"use_tf32": "0"}  # TF32 cannot keep the FP32 parity promise
    try:
        session = onnxruntime.InferenceSession(
            graph.model,
            options,
            providers=[(name, cuda_options if provider == "cuda" else {})],
            # There is nothing to fall back to from the CPU but a second try.
            enable_fallback=int(provider == "cuda"),
        )
    except Exception as error:
        if "pthread_create" in str(error):
            raise ThreadsUnavailable(
                f"threads: the runtime cannot start its own; {ADVICE}"
            ) from error
        reason = str(error).splitlines()[0]
        raise ArtifactUnreadable(f"{graph.path}: the runtime cannot read it: {reason}") from error
    in_use = session.get_providers()
    if in_use[0] != name:
        # Asked for what it cannot have, the runtime only warns and uses the CPU.
        raise ProviderUnavailable(
            f"provider: asked for {provider}, but the runtime would use {in_use[0]}"
        )
    return session
