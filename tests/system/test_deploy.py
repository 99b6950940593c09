"""What an operator applies: rules and dashboard in a real Prometheus, and the compose file."""

import json
import math
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from service.settings import Settings
from tests.support.layers import Layers
from tests.support.prometheus import PROMTOOL, Prometheus, promtool
from tests.support.server import ROOT, Server, until

yaml = pytest.importorskip("yaml")

DEPLOY = ROOT / "deploy"
ARTIFACTS = ROOT / "artifacts"
README = (DEPLOY / "README.md").read_text()

COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]
SCRAPING = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
RULES = {
    rule["alert"]: rule
    for group in yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]
}
RULE_TESTS = yaml.safe_load((DEPLOY / "alerts_test.yml").read_text())["tests"]
PROVISIONING = DEPLOY / "grafana" / "provisioning"
[SOURCE] = yaml.safe_load((PROVISIONING / "datasources" / "prometheus.yaml").read_text())[
    "datasources"
]
[PROVIDER] = yaml.safe_load((PROVISIONING / "dashboards" / "headwise.yaml").read_text())[
    "providers"
]
DASHBOARD = json.loads((DEPLOY / "grafana" / "dashboards" / "headwise.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]

SCRAPE_S = 0.5
WINDOW = "10s"
"""What a rate is over, here: twenty scrapes."""

ANSWER_LIMIT_S = 30

VARIABLES = {"job": "headwise", "instance": ".*", "model": ".*", "__rate_interval": WINDOW}
"""What a reader of the dashboard has chosen."""

NOT_OURS = {"up", "ALERTS"}
"""Metrics that Prometheus makes itself."""

GROUPING = re.compile(r"\b(?:by|without|on|ignoring)\s*\([^)]*\)")
SELECTOR = re.compile(r"\b([a-zA-Z_:][\w:]*)\b(?!\s*\()(\{[^}]*\})?")
WORDS = {"or", "and", "unless", "offset", "bool"}


def query(expression: str) -> str:
    """Return a panel's expression with the dashboard's variables filled in."""
    filled = expression
    for name, value in VARIABLES.items():
        filled = filled.replace(f"${name}", value)
    assert "$" not in filled, f"an unknown variable: {filled}"
    return filled


def selectors(expression: str) -> list[tuple[str, str]]:
    """Return the name and the matchers of every metric that an expression asks for."""
    found = SELECTOR.findall(GROUPING.sub("", expression))
    return [(name, matchers) for name, matchers in found if name not in WORDS]


QUERIES = [
    pytest.param(query(target["expr"]), id=f"{panel['title']} {target['refId']}")
    for panel in PANELS
    for target in panel["targets"]
]

needs_tools = pytest.mark.skipif(
    not PROMTOOL.exists(),
    reason="Prometheus was not fetched: make .venv/prometheus.stamp does it",
)


# --- the rules, as promtool reads them ---


@needs_tools
def test_prometheus_takes_its_configuration_and_finds_the_rules() -> None:
    """What the compose file mounts side by side belongs together."""
    is_good, told = promtool("check", "config", "prometheus.yml", folder=DEPLOY)

    assert is_good, told
    assert f"{len(RULES)} rules found" in told


@needs_tools
def test_every_alert_fires_and_is_silent_as_its_test_says() -> None:
    """The tests that an operator can run too."""
    is_good, told = promtool("test", "rules", "alerts_test.yml", folder=DEPLOY)

    assert is_good, told


@needs_tools
def test_a_broken_rule_is_found(tmp_path: Path) -> None:
    """The check can fail."""
    good = (DEPLOY / "alerts.yml").read_text()
    (tmp_path / "alerts.yml").write_text(good.replace("== 0 or absent(", "== 0 or absnt("))

    is_good, told = promtool("check", "rules", "alerts.yml", folder=tmp_path)

    assert not is_good
    assert 'unknown function with name "absnt"' in told


@pytest.mark.parametrize("name", RULES)
def test_alert_is_seen_firing_and_silent(name: str) -> None:
    """No alert goes without a test of either."""
    cases = [c for test in RULE_TESTS for c in test["alert_rule_test"] if c["alertname"] == name]

    assert any(case["exp_alerts"] for case in cases)
    assert any(not case["exp_alerts"] for case in cases)


@needs_tools
@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"expr": "vector(0) > 1"}, id="never fires"),
        pytest.param({"expr": "vector(1)", "for": "0s"}, id="always fires"),
        pytest.param({"for": "0s"}, id="fires at once"),
        pytest.param({"for": "30d"}, id="fires too late"),
    ],
)
@pytest.mark.parametrize("name", RULES)
def test_alert_that_is_wrong_fails_its_test(
    tmp_path: Path, name: str, change: dict[str, str]
) -> None:
    """Each alert's test sees more than that there is a rule of that name."""
    if set(change) == {"for"} and "for" not in RULES[name]:
        change = {"for": "30d"}  # it is meant to fire at once
    tests = [t for t in RULE_TESTS if t["alert_rule_test"][0]["alertname"] == name]

    def outcome(rule: dict[str, Any]) -> bool:
        rules = {"groups": [{"name": "headwise", "rules": [rule]}]}
        (tmp_path / "alerts.yml").write_text(yaml.safe_dump(rules))
        file = {"rule_files": ["alerts.yml"], "evaluation_interval": "1m", "tests": tests}
        (tmp_path / "alerts_test.yml").write_text(yaml.safe_dump(file))
        return promtool("test", "rules", "alerts_test.yml", folder=tmp_path)[0]

    assert outcome(RULES[name])
    assert not outcome(RULES[name] | change)


# --- rules and dashboard, in a real Prometheus that scrapes a real server ---


class Load:
    """A little of everything, again and again: good calls of mixed lengths, and refused ones."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *ignored: object) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        bodies: list[tuple[int, Any]] = [
            (200, {"model": "tiny", "embeddings": [[[0.5] * 8] * length, [[0.5] * 8] * 9]})
            for length in (1, 3, 17)
        ]
        bodies += [
            (200, {"model": "mha", "embeddings": [[0.5] * 24] * 5}),
            (400, {"model": "tiny"}),
            (404, {"model": "gone", "embeddings": [[0.5] * 8]}),
        ]
        with ThreadPoolExecutor(len(bodies)) as callers:
            while not self._end.wait(0.05):
                answers = callers.map(
                    lambda body: self._server.post("/v1/attention", json=body).status_code,
                    [body for _, body in bodies],
                )
                assert list(answers) == [status for status, _ in bodies]


@pytest.fixture(scope="module")
def server(layers: Layers) -> Iterator[Server]:
    """Return a server under a little load."""
    with Server(layers.repository) as running, Load(running):
        yield running


@pytest.fixture(scope="module")
def prometheus(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Return a Prometheus that watches that server as the shipped configuration says."""
    folder = tmp_path_factory.mktemp("prometheus")
    shipped = (DEPLOY / "prometheus.yml").read_text()
    changes = {
        "headwise:8000": server.url.removeprefix("http://"),
        "interval: 15s": f"interval: {SCRAPE_S * 1000:.0f}ms",
    }
    for old, new in changes.items():
        assert old in shipped
        shipped = shipped.replace(old, new)
    (folder / "prometheus.yml").write_text(shipped)
    (folder / "alerts.yml").write_text((DEPLOY / "alerts.yml").read_text())
    with Prometheus(folder) as running:
        yield running


@needs_tools
def test_prometheus_scrapes_the_server(prometheus: Prometheus, server: Server) -> None:
    """The one target is up, under the name that alerts and dashboard go by."""
    until(lambda: prometheus.values('up{job="headwise"}') == [1.0], ANSWER_LIMIT_S)

    [target] = prometheus.ask("targets")["activeTargets"]
    assert target["scrapeUrl"] == f"{server.url}/metrics"
    assert target["lastError"] == ""


@needs_tools
@pytest.mark.parametrize("expression", QUERIES)
def test_panel_shows_something(prometheus: Prometheus, expression: str) -> None:
    """No panel of the dashboard stays empty beside a server that has something to do."""
    until(
        lambda: any(not math.isnan(value) for value in prometheus.values(expression)),
        ANSWER_LIMIT_S,
    )


@needs_tools
@pytest.mark.parametrize("name", ["job", "instance", "model"])
def test_what_is_shown_can_be_chosen(
    prometheus: Prometheus, server: Server, layers: Layers, name: str
) -> None:
    """The dashboard's variables offer every job, instance and model."""
    [variable] = [one for one in DASHBOARD["templating"]["list"] if one["name"] == name]
    found = re.fullmatch(r"label_values\((.+), (\w+)\)", query(variable["query"]))
    assert found

    def offered() -> set[str]:
        return set(prometheus.ask(f"label/{found[2]}/values", **{"match[]": found[1]}))

    expected = {
        "job": {"headwise"},
        "instance": {server.url.removeprefix("http://")},
        "model": {path.name for path in layers.repository.iterdir()},
    }
    until(lambda: offered() == expected[name], ANSWER_LIMIT_S)


def test_every_panel_follows_what_was_chosen() -> None:
    """The source, the job and the instance; only Prometheus's own list of alerts has neither."""
    [source] = [one for one in DASHBOARD["templating"]["list"] if one["name"] == "source"]

    assert (source["type"], source["query"]) == ("datasource", SOURCE["type"])
    assert source["current"]["value"] == SOURCE["uid"]
    for panel in PANELS:
        for target in panel["targets"]:
            for metric, matchers in selectors(target["expr"].replace("[$__rate_interval]", "")):
                chosen = matchers.startswith('{job="$job", instance=~"$instance"')
                assert chosen or metric == "ALERTS", target["expr"]


@needs_tools
def test_prometheus_evaluates_every_alert_and_none_fires(prometheus: Prometheus) -> None:
    """No rule fails on real numbers, and a healthy server rings no bell."""

    def rules() -> list[dict[str, Any]]:
        return [rule for group in prometheus.ask("rules")["groups"] for rule in group["rules"]]

    def is_at_rest(rule: dict[str, Any]) -> bool:
        return (rule["health"] != "unknown", rule["state"]) == (True, "inactive")

    # Before the first scrape there is no answer, and the alert that misses one is about to fire.
    until(lambda: all(map(is_at_rest, rules())), ANSWER_LIMIT_S)

    assert {rule["name"] for rule in rules()} == set(RULES)
    assert {rule["health"] for rule in rules()} == {"ok"}


@needs_tools
@pytest.mark.parametrize("name", RULES)
def test_alert_asks_for_what_is_there(prometheus: Prometheus, server: Server, name: str) -> None:
    """Each metric that an alert names is in /metrics, with the labels that it is picked by."""
    samples = set(re.findall(r"^(\w+)(?:\{| )", server.get("/metrics").text, re.MULTILINE))
    asked = selectors(RULES[name]["expr"])

    assert asked
    assert {metric for metric, _ in asked} <= samples | NOT_OURS
    # Which statuses there are depends on what goes wrong.
    found = [
        metric + re.sub(r',?\s*status[!=~]+"[^"]*"', "", matchers).replace("{,", "{")
        for metric, matchers in asked
    ]
    until(lambda: all(prometheus.values(selector) for selector in found), ANSWER_LIMIT_S)


@pytest.mark.parametrize("expression", QUERIES)
def test_panel_asks_for_metrics_that_exist(server: Server, expression: str) -> None:
    """A fallback such as `or vector(0)` hides no misspelled name."""
    samples = set(re.findall(r"^(\w+)(?:\{| )", server.get("/metrics").text, re.MULTILINE))

    assert {metric for metric, _ in selectors(expression)} <= samples | NOT_OURS


@needs_tools
@pytest.mark.fault("E8c")
def test_first_burst_of_errors_is_an_increase(layers: Layers, tmp_path: Path) -> None:
    """A counter that appeared with its first event would have no increase: here 50 of 50."""
    with Server(layers.repository) as fresh:
        shipped = (DEPLOY / "prometheus.yml").read_text()
        shipped = shipped.replace("headwise:8000", fresh.url.removeprefix("http://"))
        shipped = shipped.replace("interval: 15s", f"interval: {SCRAPE_S * 1000:.0f}ms")
        (tmp_path / "prometheus.yml").write_text(shipped)
        (tmp_path / "alerts.yml").write_text((DEPLOY / "alerts.yml").read_text())
        with Prometheus(tmp_path) as watching:
            queries = (
                'headwise_requests_total{route="/v1/attention", status="400"}',
                'headwise_refusals_total{code="invalid_input", model="tiny"}',
            )
            until(lambda: all(watching.values(one) == [0.0] for one in queries), ANSWER_LIMIT_S)
            for _ in range(50):
                wrong = {"model": "tiny", "embeddings": [[0.5] * 7]}
                assert fresh.post("/v1/attention", json=wrong).status_code == 400
            until(
                lambda: all(
                    watching.values(f"max_over_time({one}[10m]) - min_over_time({one}[10m])")
                    == [50.0]
                    and watching.values(f"increase({one}[10m])") >= [50.0]
                    for one in queries
                ),
                ANSWER_LIMIT_S,
            )


# --- the dashboard ---


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_panel_says_what_it_shows(panel: dict[str, Any]) -> None:
    """A title, a sentence, a unit, and the source of data that is chosen at the top."""
    assert panel["title"]
    assert panel["description"].endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert panel["datasource"] == {"type": SOURCE["type"], "uid": "${source}"}


def test_panels_do_not_overlap() -> None:
    """Each panel has a place and a number of its own, on a grid of 24 columns."""
    panels = DASHBOARD["panels"]

    cells = [
        {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        for place in (panel["gridPos"] for panel in panels)
    ]

    assert len({panel["id"] for panel in panels}) == len(panels)
    assert all(x < 24 for taken in cells for x, _ in taken)
    assert not any(one & other for one, other in combinations(cells, 2))


# --- how the parts are put together ---


def mounts(service: str) -> dict[str, tuple[str, str]]:
    """Return what a service mounts where, and how: path inside -> source, mode."""
    parts = [volume.split(":") for volume in SERVICES[service]["volumes"]]
    return {inside: (source, (*mode, "rw")[0]) for source, inside, *mode in parts}


@pytest.mark.parametrize("service", SERVICES)
def test_mounts_are_there_and_read_only(service: str) -> None:
    """Docker would make an empty folder of a file that is missing."""
    for source, mode in mounts(service).values():
        if source in COMPOSE["volumes"]:
            continue
        path = (DEPLOY / source).resolve()
        assert path.exists() or path == ARTIFACTS  # which `make run` makes
        assert mode == "ro"


@pytest.mark.parametrize("service", SERVICES)
def test_service_is_confined(service: str) -> None:
    """Nothing runs as root, writes beside its volumes, or is reachable from elsewhere."""
    told = SERVICES[service]

    assert told["read_only"]
    assert told["cap_drop"] == ["ALL"]
    assert told["security_opt"] == ["no-new-privileges:true"]
    assert int(told["user"].split(":")[0]) > 0
    assert {"cpus", "mem_limit", "tmpfs"} <= told.keys()
    assert all(port.startswith("127.0.0.1:") for port in told["ports"])
    assert "build" in told or re.fullmatch(r"[\w/]+:v?\d+\.\d+\.\d+", told["image"])


def test_settings_in_the_compose_file_are_real_and_fit() -> None:
    """The server starts with them, and may end as slowly as they say."""
    headwise = SERVICES["headwise"]

    settings = Settings.load([], headwise["environment"])

    assert (
        float(headwise["stop_grace_period"].removesuffix("s")) > settings.grace_s + settings.drain_s
    )
    assert f"USER {headwise['user']}" in (ROOT / "Dockerfile").read_text()
    assert str(settings.port) == headwise["ports"][0].split(":")[-1]


def test_nobody_can_log_in_to_grafana_and_everybody_only_looks() -> None:
    """No password is shipped, and none is asked for."""
    environment = SERVICES["grafana"]["environment"]

    assert environment["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"
    assert environment["GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"] == "true"
    assert environment["GF_AUTH_BASIC_ENABLED"] == "false"
    assert not [name for name in environment if "PASSWORD" in name]


def test_prometheus_and_grafana_find_what_they_ask() -> None:
    """Addresses are names of services, and paths lie in what is mounted."""
    [job] = SCRAPING["scrape_configs"]
    grafana = SERVICES["grafana"]
    home = Path(grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    provided = PROVIDER["options"]["path"]

    assert job["job_name"] == "headwise"
    assert job["static_configs"] == [{"targets": ["headwise:8000"]}]
    assert SOURCE["url"] == f"http://prometheus:{SERVICES['prometheus']['ports'][0].split(':')[-1]}"
    assert SOURCE["jsonData"]["timeInterval"] == SCRAPING["global"]["scrape_interval"]
    assert (DEPLOY / mounts("grafana")[provided][0] / home.name).exists()
    assert str(home.parent) == provided
    assert "/etc/grafana/provisioning" in mounts("grafana")
    for file in ("prometheus.yml", *SCRAPING["rule_files"]):
        assert mounts("prometheus")[f"/etc/prometheus/{file}"] == (f"./{file}", "ro")


def test_queue_alert_is_at_four_fifths_of_the_default_limits() -> None:
    """No metric tells the limits, so the rule has them in numbers; the compose file keeps them."""
    settings = Settings.load([], SERVICES["headwise"]["environment"])
    bounds = re.findall(r"> (\d+)", RULES["HeadwiseQueueFilling"]["expr"])

    assert [int(bound) for bound in bounds] == [
        int(0.8 * settings.max_queue_calls),
        int(0.8 * settings.max_queue_tokens),
    ]


# --- what is written about it ---


@pytest.mark.parametrize(
    "file",
    [file for file in sorted(DEPLOY.rglob("*")) if file.is_file()],
    ids=lambda file: file.name,
)
def test_every_setting_that_is_named_exists(file: Path) -> None:
    """A renamed setting is renamed here too."""
    named = set(re.findall(r"HEADWISE_[A-Z][A-Z_]*", file.read_text()))

    assert named <= {Settings.variable(name) for name in Settings.model_fields}


def test_readme_says_of_every_alert_what_to_do() -> None:
    """One row an alert, in the order of the rules, and no other."""
    rows = re.findall(r"^\| `(Headwise\w+)` \| (\w+) \| (.+) \| (.+) \|$", README, re.MULTILINE)

    assert [(name, severity) for name, severity, _, _ in rows] == [
        (name, rule["labels"]["severity"]) for name, rule in RULES.items()
    ]


def test_readme_names_every_port() -> None:
    """An operator knows what is opened, and where."""
    for service in SERVICES.values():
        for port in service["ports"]:
            assert f"http://{port.rpartition(':')[0]}" in README
