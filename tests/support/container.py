"""Docker's own command line, for tests of the image; the engine may be this host's or another."""

import json
import subprocess
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

CALLER = Path(__file__).parent / "container_caller.py"


def docker(*arguments: str, check: bool = True) -> "subprocess.CompletedProcess[str]":
    """Return one ended `docker` command; its standard error follows its output."""
    return subprocess.run(
        ["docker", *arguments],  # noqa: S607 (whichever comes first on the path)
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        check=check,
    )


class Container:
    """`docker run --detach FLAGS IMAGE COMMAND`; removed when left, whatever its state."""

    def __init__(self, image: str, *flags: str, command: tuple[str, ...] = ()) -> None:
        self.image = image
        self.name = f"headwise-{uuid.uuid4().hex[:12]}"
        self.started = time.monotonic()
        docker("run", "--detach", "--name", self.name, *flags, image, *command)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        docker("rm", "--force", "--volumes", self.name)

    def state(self) -> dict[str, Any]:
        """Return what the engine knows of the process: exit code, health, pid."""
        told: dict[str, Any] = json.loads(
            docker("inspect", "--format", "{{json .State}}", self.name).stdout
        )
        return told

    def logs(self) -> str:
        """Return all that was written so far."""
        return docker("logs", self.name).stdout

    def wait(self, condition: Callable[[], bool], limit_s: float = 120) -> None:
        """Return once `condition()` is true; a container that ends before is an error."""
        until = time.monotonic() + limit_s
        while not condition():
            assert self.state()["Running"], self.logs()
            assert time.monotonic() < until, f"not within {limit_s} s: {self.logs()}"
            time.sleep(0.05)

    def wait_ready(self) -> float:
        """Return once calls are taken: the seconds since `docker run`."""
        # Two records in the log: asking would need a process inside, which slows the start.
        self.wait(lambda: '"message":"ready"' in self.logs())
        return time.monotonic() - self.started

    def inside(self, program: str) -> str:
        """Return what a Python program prints that is run inside, in the server's own limits."""
        return docker("exec", self.name, "python", "-c", program).stdout

    def start_caller(self, *arguments: str) -> "Container":
        """Return a second container that runs the caller in the first one's network."""
        return Container(
            self.image,
            f"--network=container:{self.name}",
            f"--volume={CALLER}:/caller.py:ro",
            "--entrypoint=python",
            command=("/caller.py", *arguments),
        )

    def call(self, *arguments: str) -> dict[str, Any]:
        """Return what the caller prints once it has ended."""
        with self.start_caller(*arguments) as caller:
            return caller.result()

    def result(self) -> dict[str, Any]:
        """Return the JSON line of a caller, once it has ended."""
        docker("wait", self.name)
        answer: dict[str, Any] = json.loads(self.logs())
        return answer
