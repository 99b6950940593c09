"""What an unmodified client asks beside inference: metadata, statistics, loading, settings."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from tests.service.api.test_oip_routes import LEVELS, TRACE
from tests.support.layers import CONFIGS, Layers
from tests.support.server import Server


@pytest.fixture
def client(layers: Layers, tmp_path: Path) -> Iterator[triton.InferenceServerClient]:
    """Return the client of a server of its own, which lets it load, unload and set the log."""
    repository = Path(shutil.copytree(layers.repository, tmp_path / "repository"))
    with (
        Server(repository, model_control=True) as server,
        triton.InferenceServerClient(server.url.removeprefix("http://")) as made,
    ):
        yield made


def test_client_reads_what_is_served(client: triton.InferenceServerClient) -> None:
    """Every question that the client can ask about a server and its models."""
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("tiny")
    assert client.is_model_ready("tiny-weights", "1")
    assert not client.is_model_ready("none")
    assert not client.is_model_ready("tiny", "2")
    assert "statistics" in client.get_server_metadata()["extensions"]
    assert client.get_model_metadata("cross")["inputs"][1]["name"] == "memory"
    assert client.get_model_config("tiny-weights", "1")["output"][1]["dims"] == [2, -1, -1]
    names = [one["name"] for one in client.get_model_repository_index()]
    assert names == [name for plain in sorted(CONFIGS) for name in (plain, f"{plain}-weights")]
    with pytest.raises(InferenceServerException, match="expected one of cross, mha, tiny"):
        client.get_model_metadata("none")


def test_client_statistics_are_those_of_its_own_calls(
    client: triton.InferenceServerClient,
) -> None:
    """As the client infers, so the server counts."""
    tensor = triton.InferInput("embeddings", [3, 2, 8], "FP32")
    tensor.set_data_from_numpy(np.full((3, 2, 8), 0.5, np.float32))
    for _ in range(2):
        client.infer("tiny-weights", [tensor])
    with pytest.raises(InferenceServerException):
        client.infer("tiny-weights", [triton.InferInput("nothing", [1], "FP32")])

    [one] = client.get_inference_statistics("tiny-weights")["model_stats"]
    everything = client.get_inference_statistics()["model_stats"]

    assert (one["inference_count"], one["execution_count"]) == (6, 2)
    assert one["inference_stats"]["success"]["count"] == 2
    assert one["inference_stats"]["fail"]["count"] == 1
    assert [other for other in everything if other["inference_count"]] == [one]


def test_client_loads_and_unloads(client: triton.InferenceServerClient) -> None:
    """With what the client sends along by itself."""
    client.unload_model("tiny")
    gone = client.is_model_ready("tiny")
    client.load_model("tiny")
    back = client.is_model_ready("tiny")

    assert (gone, back) == (False, True)
    with pytest.raises(InferenceServerException, match="'config' is not offered"):
        client.load_model("tiny", config="{}")
    with pytest.raises(InferenceServerException, match="expected one of cross, mha, tiny"):
        client.unload_model("none")


def test_client_settings(client: triton.InferenceServerClient) -> None:
    """Logging and traces, as the client writes and reads them."""
    assert client.get_log_settings() == LEVELS["info"]
    assert client.update_log_settings({"log_info": False}) == LEVELS["warning"]
    assert client.update_log_settings({"log_verbose_level": 1}) == LEVELS["debug"]
    assert client.get_trace_settings() == client.get_trace_settings("tiny") == TRACE
    assert client.update_trace_settings(settings={"trace_level": ["OFF"]}) == TRACE
    with pytest.raises(InferenceServerException, match="traces go by OpenTelemetry"):
        client.update_trace_settings("tiny", {"trace_level": ["TIMESTAMPS"]})


def test_client_cuda_memory(client: triton.InferenceServerClient) -> None:
    """Nothing is registered, and unregistering is no mistake."""
    client.unregister_cuda_shared_memory()
    client.unregister_cuda_shared_memory("r")

    assert client.get_cuda_shared_memory_status() == []
    with pytest.raises(InferenceServerException, match="not offered"):
        client.register_cuda_shared_memory("r", b"AAAA", 0, 1)
