"""Fixtures that several test files share, and what no test may inherit."""

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.layers import Layers
from tests.server import Server

HAS_TORCH = find_spec("torch") is not None

# Without torch only the serving side can be tested.
collect_ignore_glob = [] if HAS_TORCH else ["test_export_*.py", "test_minilm.py"]


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the developer's own settings out of every test."""
    for key in list(os.environ):
        if key.startswith("HEADWISE_"):
            monkeypatch.delenv(key)


@pytest.fixture(scope="session")
def layers(tmp_path_factory: pytest.TempPathFactory) -> Layers:
    """Return the published test layers."""
    if published := os.environ.get("HEADWISE_TEST_LAYERS"):
        return Layers(Path(published))
    made = Layers(tmp_path_factory.mktemp("layers"))
    made.publish()
    return made


@pytest.fixture(scope="session")
def server(layers: Layers) -> Iterator[Server]:
    """Return a server of all test layers that no test may stop or starve."""
    with Server(layers.repository) as running:
        yield running
