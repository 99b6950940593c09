"""The documentation in a real browser: with keys, behind a path prefix, and called from a page."""

import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.loadtest.test_page import CHROMIUM, FLAGS
from tests.support.layers import Layers
from tests.support.server import Server, until
from tests.system.test_proxies import free_port, nginx

KEY = "k" * 40
BROWSER = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Return Debian's Chromium."""
    if CHROMIUM is None:
        pytest.skip("chromium is not installed: apt-get install chromium")
    with sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield running
        running.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """Return an empty page; nothing that it complains of passes unseen."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    made, complaints = context.new_page(), list[str]()
    made.on("pageerror", lambda error: complaints.append(str(error)))
    yield made
    context.close()
    assert complaints == []


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file with one key."""
    file: Path = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(f"someone:{KEY}\n")
    return file


@pytest.fixture(scope="module")
def keyed(layers: Layers, keys: Path) -> Iterator[Server]:
    """Return a server that asks for a key."""
    with Server(layers.repository, api_keys_file=keys) as running:
        yield running


@contextmanager
def behind_a_prefix(server: Server, directory: Path) -> Iterator[str]:
    """Give the address of an nginx that serves all of it below /hw/, which it takes away."""
    if shutil.which("nginx", path="/usr/sbin:/usr/bin") is None:
        pytest.skip("nginx is not installed")
    port = free_port()
    command, configuration = nginx(directory, port, server.url.removeprefix("http://"))
    changes = {
        "location / {": "location /hw/ {",
        "proxy_pass http://headwise;": "proxy_pass http://headwise/;",
    }
    for old, new in changes.items():
        assert old in configuration
        configuration = configuration.replace(old, new)
    (directory / "nginx.conf").write_text(configuration)
    environment = {"PATH": "/usr/sbin:/usr/bin"}
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        url = f"http://127.0.0.1:{port}/hw"
        until(lambda: httpx.get(url + "/v2/health/live").status_code == 200)
        yield url
    finally:
        process.terminate()
        process.wait(30)


def authorize(page: Page, key: str) -> None:
    """Give the page a key, as a person does."""
    page.get_by_role("button", name="Authorize").first.click()
    dialog = page.locator(".modal-ux")
    dialog.get_by_label("auth-bearer-value").fill(key)
    dialog.get_by_role("button", name="Apply credentials").first.click()
    dialog.get_by_role("button", name="Close").last.click()


def execute(page: Page, operation: str) -> str:
    """Open an operation, send its example, and return the status that the page shows."""
    block = page.locator(f"#{operation}")
    block.locator(".opblock-summary-control").click()
    block.get_by_role("button", name="Try it out").click()
    block.get_by_role("button", name="Execute").click()
    shown = block.locator(".live-responses-table .response-col_status")
    shown.last.wait_for()
    return shown.last.inner_text().split()[0]


@pytest.mark.fault("E8")
def test_browser_opens_the_docs_authorizes_and_calls(keyed: Server, page: Page) -> None:
    """Without a key the page is there; its calls are answered 401, and with the key 200."""
    page.goto(keyed.url + "/")
    expect(page).to_have_url(keyed.url + "/docs")

    refused = execute(page, "operations-Inference-attention")
    authorize(page, KEY)
    block = page.locator("#operations-Inference-attention")
    block.get_by_role("button", name="Execute").click()
    expect(block.locator(".live-responses-table .response-col_status").last).to_contain_text("200")

    assert refused == "401"
    headings = page.locator(".opblock-tag").evaluate_all("tags => tags.map(t => t.dataset.tag)")
    assert headings[0] == "Inference"
    assert "default" not in headings


@pytest.mark.fault("E8b")
def test_docs_and_root_work_behind_a_prefix_that_a_proxy_strips(
    keyed: Server, page: Page, tmp_path: Path
) -> None:
    """Every address is relative: page, assets, description, calls, and the way from /."""
    with behind_a_prefix(keyed, tmp_path) as url:
        page.goto(url + "/")
        expect(page).to_have_url(url + "/docs")
        authorize(page, KEY)
        answered = execute(page, "operations-Inference-attention")
        asked = page.locator("#operations-Inference-attention .request-url").inner_text()
        listing = httpx.get(url + "/").json()
        documentation = httpx.get(f"{url}/{listing['documentation']}").status_code

    assert answered == "200"
    assert f"{url}/v1/attention" in asked
    assert documentation == 200


@pytest.mark.fault("E8")
def test_curl_gets_a_list_and_a_browser_the_page(server: Server) -> None:
    """What the 404 promises: / lists the endpoints, and says what each is for."""
    plain = httpx.get(server.url + "/")
    browsing = httpx.get(server.url + "/", headers=BROWSER)
    document = server.get("/openapi.json").json()["paths"]

    assert set(plain.json()["endpoints"]) == {
        f"{method.upper()} {path}" for path, methods in document.items() for method in methods
    }
    assert plain.text.endswith("}\n")
    assert (browsing.status_code, browsing.headers["location"]) == (307, "docs")
    assert plain.headers["vary"] == browsing.headers["vary"] == "Accept"


class _Page(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        content = b"<!doctype html><title>a page</title>"
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (the base class's name)
        """Say nothing."""


_CALL = """async ([url, key]) => {
  const answer = await fetch(url + '/v2/models/tiny/infer', {
    method: 'POST',
    headers: {'Content-Type': 'application/json', 'X-API-Key': key},
    body: JSON.stringify({inputs: [{name: 'embeddings', shape: [1, 1, 8], datatype: 'FP32',
      data: [1, 0, 0, 0, 0, 0, 0, 0]}]}),
  });
  const code = answer.headers.get('X-Error-Code');
  return [answer.status, code, Object.keys(await answer.json()).sort()];
}"""


@pytest.mark.fault("E8")
def test_page_of_a_named_origin_calls_with_a_key_and_reads_errors(
    layers: Layers, keys: Path, page: Page
) -> None:
    """A real browser's preflight, call and answer; without the setting it would read nothing."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Page) as site:
        threading.Thread(target=site.serve_forever, daemon=True).start()
        origin = f"http://localhost:{site.server_address[1]}"
        with Server(layers.repository, api_keys_file=keys, cors_origins=origin) as server:
            page.goto(origin)
            good = page.evaluate(_CALL, [server.url, KEY])
            bad = page.evaluate(_CALL, [server.url, "wrong"])
        site.shutdown()

    assert good == [200, None, ["model_name", "model_version", "outputs"]]
    assert bad == [401, "unauthorized", ["code", "error"]]
