"""The image: what is in it, and how it runs when it is locked down, loaded and stopped."""

import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from service import __version__
from tests.support.container import Container, docker
from tests.support.layers import CONFIGS, Layers
from tests.support.server import ROOT

pytestmark = pytest.mark.container

UNLOCKED = ("--cpus=1", "--memory=512m", "--memory-swap=512m", "--network=none")
LOCKED = (
    *UNLOCKED,
    "--pids-limit=128",
    "--read-only",
    "--tmpfs=/tmp:rw,size=64m",
    "--cap-drop=ALL",
    "--security-opt=no-new-privileges",
)
"""All that an operator can take away."""

# Programs for the inside of a container, where a shell may not be.
UNWANTED = """
import importlib.util, pathlib, shutil
print([name for name in ("torch", "onnx", "pip") if importlib.util.find_spec(name)],
      [name for name in ("cc", "gcc", "g++", "ld", "make") if shutil.which(name)],
      [str(p) for p in pathlib.Path("/").glob("**/.cache/pip") if any(p.iterdir())])
"""
PACKAGES = """
import importlib.metadata, json, service
found = importlib.metadata.distributions()
packages = {package.name.lower().replace("_", "-"): package.version for package in found}
print(json.dumps([service.__version__, packages]))
"""
UNCOMPILED = """
import os, sys
import service.__main__, service.probe
cached = {name: getattr(module, "__cached__", None) for name, module in sys.modules.items()}
print([name for name, path in cached.items() if path and not os.path.exists(path)])
"""
PROCESS = """
import re
status = dict(re.findall(r"(\\w+):\\t(.+)", open("/proc/1/status").read()))
print(status["Uid"].split()[0], status["CapEff"], status["NoNewPrivs"], status["Seccomp"])
"""
WRITE = """
import errno
for path in ("/x", "/artifacts/x", "/opt/venv/x", "/tmp/x"):
    try:
        open(path, "w").close()
        print(path, "written")
    except OSError as error:
        print(path, errno.errorcode[error.errno])
"""
CPU = """
from pathlib import Path
paths = map(Path, ("/sys/fs/cgroup/cpu/cpu.stat", "/sys/fs/cgroup/cpu.stat"))
print(next(path for path in paths if path.exists()).read_text())
"""
SENT = """
import json, socket
def unrouted():
    names, values = [line.split() for line in open("/proc/net/snmp") if line.startswith("Ip:")]
    return int(dict(zip(names, values))["OutNoRoutes"])
before = unrouted()
try:
    socket.create_connection(("203.0.113.1", 80), timeout=1)
except OSError:
    pass
print(json.dumps([before, unrouted()]))
"""


@pytest.fixture(scope="module")
def figures(request: pytest.FixtureRequest) -> Iterator[dict[str, str]]:
    """Collect what is measured on the way; printed at the end."""
    measured: dict[str, str] = {}
    yield measured
    capture = request.config.pluginmanager.getplugin("capturemanager")
    assert capture is not None
    with capture.global_and_fixture_disabled():
        sys.stdout.write("\n" + "".join(f"  {n}: {value}\n" for n, value in measured.items()))


@pytest.fixture(scope="module")
def image(figures: dict[str, str]) -> str:
    """Return the image that `make image` builds: with both default layers."""
    started = time.monotonic()
    name = "headwise-test"
    subprocess.run([shutil.which("make") or "make", "image", f"IMAGE={name}"], cwd=ROOT, check=True)
    figures["build"] = f"{time.monotonic() - started:.0f} s, layers and all"
    size = int(docker("image", "inspect", "--format", "{{.Size}}", name).stdout)
    layers = int(docker("image", "inspect", "--format", "{{.Size}}", base_image()).stdout)
    figures["image"] = f"{size / 1e6:.0f} MB, of which the base image {layers / 1e6:.0f} MB"
    return name


@pytest.fixture(scope="module")
def uid() -> int:
    """Return a user that the image does not know."""
    return random.randint(20_000, 60_000)  # noqa: S311 (any user will do)


@pytest.fixture(scope="module")
def locked(image: str, uid: int, figures: dict[str, str]) -> Iterator[Container]:
    """Return a ready server that may do next to nothing."""
    with Container(image, *LOCKED, f"--user={uid}", "--health-interval=2s") as container:
        figures["docker run to ready"] = f"{container.wait_ready():.1f} s"
        yield container


def base_image() -> str:
    """Return the name of the image that ours is made from."""
    found = re.search(r"^ARG PYTHON_IMAGE=(\S+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def test_image_holds_what_serving_needs_and_no_more(image: str) -> None:
    """No torch, no compiler, no package cache, and no pip in the served environment."""
    with Container(image) as container:
        container.wait_ready()
        assert container.inside(UNWANTED).strip() == "[] [] []"


def test_image_lists_its_packages_with_the_pinned_versions(image: str) -> None:
    """What a bill of materials is made from: Headwise's own version, and each package's."""
    pinned = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M))
    labels = json.loads(docker("inspect", "--format", "{{json .Config.Labels}}", image).stdout)

    run = docker("run", "--rm", "--network=none", "--entrypoint=python", image, "-c", PACKAGES)
    version, packages = json.loads(run.stdout)

    assert version == packages.pop("headwise") == __version__
    assert labels["org.opencontainers.image.version"] == __version__
    assert packages["onnxruntime"] == pinned["onnxruntime"]
    assert packages == {name: pinned.get(name, "not pinned") for name in packages}


@pytest.mark.fault("E9")
def test_image_has_the_shell_of_its_base_and_compiled_modules(
    image: str,
) -> None:
    """As the README says; what serving and the health check import is not compiled each time."""
    shell = docker(
        "run", "--rm", "--network=none", "--entrypoint=sh", image, "-c", "echo hi; id -u"
    )
    compiled = docker(
        "run", "--rm", "--network=none", "--entrypoint=python", image, "-c", UNCOMPILED
    )

    assert shell.stdout.split() == ["hi", "10001"]
    assert compiled.stdout.strip() == "[]"


@pytest.mark.fault("B8")
@pytest.mark.parametrize(
    ("flags", "command"),
    [
        ((), ("--host=::", "--port", "9000")),
        (("--init",), ("--port=9000",)),
        (("--env=HEADWISE_HOST=::", "--env=HEADWISE_PORT=9000"), ()),
    ],
)
def test_healthcheck_asks_where_the_server_listens(
    image: str, flags: tuple[str, ...], command: tuple[str, ...]
) -> None:
    """By flags or variables, with or without something that starts and reaps the server."""
    with Container(image, "--network=none", *flags, command=command) as container:
        container.wait_ready()
        probed = docker("exec", container.name, "python", "-m", "service.probe", check=False)

    assert (probed.returncode, probed.stdout) == (0, "")


@pytest.mark.fault("E2")
def test_sigterm_ends_a_container_that_is_still_loading(image: str, tmp_path: Path) -> None:
    """The kernel gives a container's first process no default action for it."""
    sign = "import sys, time; print('loading', file=sys.stderr, flush=True); time.sleep(600)"
    (tmp_path / "uvicorn.py").write_text(sign)
    readable(tmp_path)
    mount = (f"--volume={tmp_path}:/slow:ro", "--env=PYTHONPATH=/slow")
    with Container(image, "--network=none", *mount) as container:
        container.wait(lambda: "loading" in container.logs())
        docker("kill", "--signal=TERM", container.name)
        docker("wait", container.name)
        code, said = container.state()["ExitCode"], container.logs()

    assert code == 143
    assert said == "loading\nstopped by SIGTERM\n"


def test_image_needs_no_shell_and_no_root(image: str) -> None:
    """Every command is in exec form, and the user is a number."""
    config = json.loads(docker("inspect", "--format", "{{json .Config}}", image).stdout)

    assert config["Entrypoint"] == ["python", "-m", "service"]
    assert config["Healthcheck"]["Test"] == ["CMD", "python", "-m", "service.probe"]
    assert config["Healthcheck"]["Timeout"] == 10_000_000_000
    assert config["User"] == "10001:10001"
    assert list(config["ExposedPorts"]) == ["8000/tcp"]


def test_any_user_is_served_by_what_may_do_nothing(locked: Container, uid: int) -> None:
    """No capability, no new privilege, a seccomp filter; only /tmp can be written."""
    assert locked.inside(PROCESS).split() == [str(uid), "0000000000000000", "1", "2"]
    assert locked.inside(WRITE).splitlines() == [
        "/x EROFS",
        "/artifacts/x EROFS",
        "/opt/venv/x EROFS",
        "/tmp/x written",  # noqa: S108
    ]


def test_readme_call_is_answered_from_the_image(locked: Container) -> None:
    """The layer that `make image` put in answers as the README shows."""
    answer = locked.call("call", "tiny", "8")

    assert answer["status"] == 200
    assert answer["body"]["model"] == "tiny"
    assert json.dumps(answer["body"]["output"][0][0]) in (ROOT / "README.md").read_text()


def test_cpu_quota_sizes_the_threads(locked: Container) -> None:
    """One core's worth of time means one thread, however many cores the host has."""
    starting = next(line for line in locked.logs().splitlines() if '"starting"' in line)
    budget = json.loads(starting)["threads"]

    assert (budget["threads"], budget["quota"], budget["chosen"]) == (1, 1.0, None)


def test_saturated_server_stays_healthy(locked: Container, figures: dict[str, str]) -> None:
    """The engine's own HEALTHCHECK passes throughout, within the memory limit."""
    before = throttled(locked)
    load = locked.call("load", "16", "20")
    after = throttled(locked)
    health = locked.state()["Health"]

    periods, missed = (after[0] - before[0]), (after[1] - before[1])
    figures["[8, 128] from 16 clients on one core"] = (
        f"{load['calls_per_s']} calls/s, p50 {load['p50_ms']} ms;"
        f" throttled in {missed} of {periods} periods of the quota"
    )
    assert set(load["statuses"]) == {"200"}
    assert load["lost"] == []
    assert health["Status"] == "healthy"
    assert [check["ExitCode"] for check in health["Log"]] == [0] * 5  # the last five are kept
    assert not locked.state()["OOMKilled"]


def throttled(container: Container) -> tuple[int, int]:
    """Return the quota's periods so far, and in how many of them it ran out."""
    told = dict(line.split() for line in container.inside(CPU).splitlines() if line)
    return int(told["nr_periods"]), int(told["nr_throttled"])


def test_service_calls_nobody(locked: Container) -> None:
    """
    Nothing was sent to an address outside, in a network where each attempt is counted.

    The counter is shown to count: the test's own attempt raises it.
    """
    before, after = json.loads(locked.inside(SENT))

    assert before == 0
    assert after > before


def test_nothing_is_written_outside_tmp(image: str) -> None:
    """Not even where it could be: the container's own layer stays as it was."""
    with Container(image, *UNLOCKED) as container:
        container.wait_ready()
        assert container.call("call", "tiny", "8")["status"] == 200
        changes = docker("diff", container.name).stdout.split("\n")

    assert [change for change in changes if change and not change.endswith(" /tmp")] == []


def test_sigterm_during_calls_loses_none(image: str, figures: dict[str, str]) -> None:
    """`docker stop` under load: every call that was sent is answered, and the exit code is 0."""
    with Container(image, *LOCKED) as container:
        container.wait_ready()
        with container.start_caller("load", "16", "60") as caller:
            container.wait(lambda: container.logs().count('"status":200') > 16)
            started = time.monotonic()
            docker("stop", "--time=40", container.name)
            figures["docker stop under load"] = f"{time.monotonic() - started:.1f} s"
            load = caller.result()
        state, log = container.state(), container.logs()

    assert load["lost"] == []
    assert set(load["statuses"]) <= {"200", "503"}
    assert load["statuses"]["200"] > 16
    assert (state["ExitCode"], state["OOMKilled"]) == (0, False)
    assert '"every_call_answered":true' in log


def test_mounted_repository_is_served_read_only(image: str, layers: Layers) -> None:
    """Layers of one's own, in place of those in the image."""
    readable(layers.repository)
    with Container(image, *LOCKED, f"--volume={layers.repository}:/artifacts:ro") as container:
        container.wait_ready()
        answer = container.call("call", "mha", str(CONFIGS["mha"].embed_dim))

    assert answer["status"] == 200


@pytest.mark.parametrize("server_runs", [True, False])
def test_healthcheck_notices_a_server_that_is_gone(image: str, server_runs: bool) -> None:
    """The probe tells life from death, within its time limit and in one line."""
    probe = ("python", "-m", "service.probe")
    with Container(image, "--network=none") as container:
        container.wait_ready()
        environment = [] if server_runs else ["--env=HEADWISE_PORT=8001"]
        probed = docker("exec", *environment, container.name, *probe, check=False)

    assert probed.returncode == (0 if server_runs else 1)
    assert probed.stdout == ("" if server_runs else "not alive: 0.0.0.0:8001: Connection refused\n")


def test_tampered_artifact_ends_the_start(image: str, layers: Layers, tmp_path: Path) -> None:
    """Exit code 2 and one clear line."""
    repository = shutil.copytree(layers.repository, tmp_path / "repository")
    with (repository / "tiny" / "1" / "layer.weights").open("r+b") as weights:
        weights.write(b"\x00\x01\x02\x03")
    readable(repository)

    assert refusal(image, f"--volume={repository}:/artifacts:ro") == (
        "error: /artifacts/tiny/1/layer.weights: its SHA-256 is not the one in manifest.json"
    )


def test_start_without_artifacts_says_how_to_get_some(image: str, tmp_path: Path) -> None:
    """A newcomer's first mistake is answered with the next step."""
    readable(tmp_path)
    told = refusal(image, f"--volume={tmp_path}:/artifacts:ro")

    assert told.startswith("error: /artifacts: no artifact in it; publish one: python -m export")
    assert 'docker run -v "$PWD/artifacts:/artifacts:ro"' in told


def test_cuda_that_is_not_there_ends_the_start(image: str) -> None:
    """The image for CPU says what CUDA needs."""
    told = refusal(image, "--env=HEADWISE_PROVIDER=cuda")

    assert told.startswith("error: provider: asked for cuda, but this onnxruntime")


def test_clone_without_layers_builds(tmp_path: Path) -> None:
    """`docker build .` needs nothing that only a run would make."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],  # noqa: S607
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    for name in filter(lambda name: (ROOT / name).is_file(), listed.stdout.split("\0")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)

    flags = os.environ.get("DOCKER_BUILD_FLAGS", "").split()
    docker("build", *flags, "--tag=headwise-test-bare", str(tmp_path))

    assert "no artifact in it" in refusal("headwise-test-bare")


def readable(directory: Path) -> None:
    """Open a directory to the container's user, who is not the one that made it."""
    for path in [directory, *directory.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)


def refusal(image: str, *flags: str) -> str:
    """Return the one line of a start that ends with 2; log records are passed over."""
    with Container(image, *LOCKED, *flags) as container:
        docker("wait", container.name)
        assert container.state()["ExitCode"] == 2, container.logs()
        [line] = [line for line in container.logs().splitlines() if not line.startswith("{")]
        return line
