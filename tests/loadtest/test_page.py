"""The load tester's pages in a real browser: Debian's Chromium, light and dark, wide and narrow."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from loadtest.report.comparing import compare
from loadtest.report.comparison_page import comparison_page
from loadtest.report.page import page
from loadtest.report.raw_files import read
from tests.support.load_raws import point, queueing, raw, shapes, sweep

CHROMIUM = shutil.which("chromium")
FLAGS = [
    "--no-sandbox",  # CI is root
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-sync",
    "--no-first-run",
]

WIDTHS = (390, 768, 1280)
SCHEMES = ("light", "dark")

CONTRAST = 4.5
"""WCAG 2.2 AA, for text of any size."""

LONG = "lognormal:3:0.8"

CONTENTS = {
    "rates": raw(
        sweep(50, 100, 200, 300, 400, 480, 600),
        capacity={"rate": 431.0, "slo": "p99<20ms", "broken_at": 447.0},
    ),
    "mixed": raw(
        [
            *sweep(100, 200, 400),
            *sweep(100, 200, 400, format="shared-memory", weights="heads:0,3", service_ms=4.0),
            *shapes((1, 2, 4, 8, 16), (1, 8, 32, 64, 128, 256)),
            point(queueing(300, 5), rate=None, clients=8),
            point(queueing(50, 5), rate=50.0, length=LONG, mask="padding", lost=9),
        ],
        interrupted=True,
        server={
            "url": f"http://{'a-very-long-name.' * 12}test:8000",
            "name": "a" * 120,
            "version": "0.1.0",
            "model": "b" * 90,
            "details": {"key" * 30: "value" * 60},
        },
    ),
    "nothing": raw([point(queueing(1, 0.1)[:0], rate=rate, lost=9) for rate in (5.0, 10.0)]),
}
PAGES = (*CONTENTS, "comparison")

_LAYOUT = """() => {
  const seen = el => el.getClientRects().length > 0;
  const out = [];
  const near = 0.75, of = svg => svg.getAttribute('aria-labelledby');
  for (const svg of document.querySelectorAll('svg')) {
    if (!seen(svg)) continue;
    const frame = svg.getBoundingClientRect();
    const texts = [...svg.querySelectorAll('text')].map(t => [t, t.getBoundingClientRect()]);
    for (const [t, box] of texts) {
      if (box.left < frame.left - near || box.right > frame.right + near
          || box.top < frame.top - near || box.bottom > frame.bottom + near)
        out.push(`${of(svg)}: "${t.textContent}" leaves its drawing`);
    }
    for (let i = 0; i < texts.length; i++) for (let j = i + 1; j < texts.length; j++) {
      const [a, A] = texts[i], [b, B] = texts[j];
      // Boxes are as high as a line; letters are not.
      const across = Math.min(A.right, B.right) - Math.max(A.left, B.left);
      const down = Math.min(A.bottom, B.bottom) - Math.max(A.top, B.top);
      if (across > 1 && down > 3)
        out.push(`${of(svg)}: "${a.textContent}" on "${b.textContent}"`);
    }
  }
  const cells = 'p, li, dt, dd, td, th, h1, h2, h3, figcaption, pre, summary, a, caption';
  for (const el of document.querySelectorAll(cells)) {
    if (!seen(el) || el.closest('svg')) continue;
    const scroller = el.closest('.scroll');
    const range = document.createRange(); range.selectNodeContents(el);
    const text = range.getBoundingClientRect(), box = el.getBoundingClientRect();
    if (text.right > box.right + 1 || text.left < box.left - 1)
      out.push(`<${el.tagName}> "${el.textContent.slice(0, 40)}" is wider than its box`);
    if (!scroller && text.right > document.documentElement.clientWidth + 1)
      out.push(`<${el.tagName}> "${el.textContent.slice(0, 40)}" leaves the page`);
  }
  return out;
}"""
"""What is written beyond its frame, or over something else that is written."""

_CONTRAST = """least => {
  const rgb = s => (s.match(/[\\d.]+/g) || []).map(Number);
  const light = c => { const [r, g, b] = c.slice(0, 3).map(v => { v /= 255;
    return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const ratio = (a, b) => { const [x, y] = [light(a), light(b)].sort((p, q) => q - p);
    return (x + 0.05) / (y + 0.05); };
  const ground = el => { for (; el; el = el.parentElement) {
    const c = rgb(getComputedStyle(el).backgroundColor);
    if (c.length === 3 || c[3] > 0) return c; } return [255, 255, 255]; };
  const behind = el => {
    const box = el.getBoundingClientRect();
    const x = box.left + box.width / 2, y = box.top + box.height / 2;
    const shapes = [...el.ownerSVGElement.querySelectorAll('rect')].filter(r => {
      const b = r.getBoundingClientRect();
      return b.left <= x && x <= b.right && b.top <= y && y <= b.bottom; });
    const last = shapes[shapes.length - 1];
    return last ? rgb(getComputedStyle(last).fill) : ground(el.ownerSVGElement);
  };
  const out = []; let looked = 0;
  for (const el of document.querySelectorAll('body *')) {
    const own = [...el.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
    if (!own || !el.getClientRects().length) continue;
    if (['title', 'desc'].includes(el.tagName)) continue;
    const drawn = el instanceof SVGElement, style = getComputedStyle(el);
    const found = ratio(rgb(drawn ? style.fill : style.color), drawn ? behind(el) : ground(el));
    looked += 1;
    if (found < least) out.push(`"${el.textContent.slice(0, 30)}" ${found.toFixed(2)}`);
  }
  return [looked, out];
}"""
"""How many texts there are, and which are too faint against what lies behind them."""

_CHARTS = """() => [...document.querySelectorAll('figure[id]')].map(figure => {
  const shown = [...figure.querySelectorAll('svg')].filter(s => s.getClientRects().length);
  const boxes = shown.map(s => s.getBoundingClientRect());
  return {id: figure.id, shown: shown.length, width: boxes[0]?.width, height: boxes[0]?.height,
    scale: boxes[0] ? boxes[0].width / shown[0].viewBox.baseVal.width : 0,
    marks: shown[0]?.querySelectorAll('path, rect, circle').length};
})"""


@dataclass(frozen=True)
class Opened:
    """A page as a reader sees it, and what it did to become so."""

    view: Page
    complaints: list[str]
    requests: list[str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return where the pages lie, as files that somebody was sent."""
    made = tmp_path_factory.mktemp("pages")
    for name, content in CONTENTS.items():
        (made / f"{name}.html").write_text(page(read(content)), encoding="utf-8")
    slower = raw(sweep(100, 200, 300, 600, service_ms=2.6), generator={"null_calls_per_s": 5e3})
    comparison = compare(read(CONTENTS["rates"]), read(slower))
    (made / "comparison.html").write_text(comparison_page(comparison), encoding="utf-8")
    return made


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
def opened(browser: Browser, folder: Path, request: pytest.FixtureRequest) -> Iterator[Opened]:
    """Return a page in one width and scheme."""
    name, width, scheme = request.param
    context = browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme=scheme, reduced_motion="reduce"
    )
    view = context.new_page()
    found = Opened(view, [], [])
    view.on("console", lambda message: found.complaints.append(message.text))
    view.on("pageerror", lambda error: found.complaints.append(str(error)))
    view.on("request", lambda made: found.requests.append(made.url))
    view.goto((folder / f"{name}.html").as_uri())
    yield found
    context.close()


def opening(
    *names: str, widths: tuple[int, ...] = WIDTHS, schemes: tuple[str, ...] = ("light",)
) -> pytest.MarkDecorator:
    """Return the parameters for those pages in those widths and schemes."""
    cases = [(n, w, s) for n in names for w in widths for s in schemes]
    return pytest.mark.parametrize(
        "opened", cases, indirect=True, ids=[f"{n}-{w}-{s}" for n, w, s in cases]
    )


@opening(*PAGES, widths=(1280,), schemes=SCHEMES)
def test_page_loads_nothing_and_complains_of_nothing(opened: Opened) -> None:
    """One file is all there is; its own policy forbids the rest."""
    outside = [url for url in opened.requests if not url.startswith(("file://", "data:"))]

    assert opened.complaints == []
    assert outside == []
    assert len([url for url in opened.requests if url.startswith("file://")]) == 1


@opening(*PAGES)
def test_every_chart_is_shown_once_at_a_size_that_can_be_read(opened: Opened) -> None:
    """In the drawing for that width, hardly larger or smaller than it was drawn."""
    charts = opened.view.evaluate(_CHARTS)

    assert charts
    for chart in charts:
        assert chart["shown"] == 1, chart
        assert chart["width"] > 300, chart
        assert chart["height"] > 80, chart
        assert chart["marks"] > 0, chart
        assert 0.9 < chart["scale"] < 1.2, chart


@opening("rates", widths=(1280,))
def test_page_of_rates_has_all_its_charts(opened: Opened) -> None:
    """Latency, percentiles, throughput and stages; the objective and the saturation in them."""
    view = opened.view

    assert [chart["id"] for chart in view.evaluate(_CHARTS)] == [
        f"curve-0-{name}"
        for name in (
            *("latency", "percentiles", "throughput", "stages"),
            *("latency-over-time", "rate-over-time"),
        )
    ]
    latency = view.locator("#curve-0-latency .wide svg")
    assert latency.get_by_text("p99 < 20 ms", exact=True).is_visible()
    assert latency.get_by_text("saturated", exact=True).is_visible()
    for name in ("p50", "p90", "p99", "max"):
        assert latency.get_by_text(name, exact=True).is_visible()


@opening("mixed", widths=(1280, 390))
def test_cells_of_the_map_are_coloured_and_printed(opened: Opened) -> None:
    """Batch by length, slower cells darker."""
    cells = opened.view.locator("table.heat td")

    assert cells.count() == 30
    assert all(text.strip() for text in cells.all_inner_texts())
    colours = cells.evaluate_all("found => found.map(el => getComputedStyle(el).backgroundColor)")
    assert len(set(colours)) > 3


@opening(*PAGES)
def test_page_is_never_wider_than_its_window(opened: Opened) -> None:
    """Wide tables scroll by themselves."""
    root = "document.documentElement"

    assert opened.view.evaluate(f"{root}.scrollWidth <= {root}.clientWidth")


@pytest.mark.fault("F9")
@opening("rates", "nothing", widths=(1280,))
def test_tables_fit_a_page_of_usual_width(opened: Opened) -> None:
    """No column is cut off at the right."""
    boxes = "[...document.querySelectorAll('.scroll')].map(e => [e.scrollWidth, e.clientWidth])"

    found = opened.view.evaluate(boxes)

    assert found
    assert all(content <= box for content, box in found), found


@opening(*PAGES)
def test_nothing_is_written_over_or_beyond_anything(opened: Opened) -> None:
    """Every text stays in its drawing or box, and off every other."""
    assert opened.view.evaluate(_LAYOUT) == []


@opening(*PAGES, widths=(1280,), schemes=SCHEMES)
def test_every_text_can_be_read_against_its_ground(opened: Opened) -> None:
    """4.5 to 1 at least, in bars and maps, too."""
    looked, faint = opened.view.evaluate(_CONTRAST, CONTRAST)

    assert looked > 50
    assert faint == []


@opening("rates", "comparison", widths=(1280,), schemes=SCHEMES)
def test_scheme_is_the_readers(opened: Opened) -> None:
    """Dark ground where dark is wanted."""
    scheme = opened.view.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
    ground = opened.view.evaluate("getComputedStyle(document.body).backgroundColor")

    assert ground == ("rgb(18, 22, 27)" if scheme else "rgb(255, 255, 255)")


@opening("mixed", widths=(390,))
def test_keyboard_reaches_every_link_and_scrolls_every_wide_table(opened: Opened) -> None:
    """Tab goes from one to the next, each with a mark; arrows scroll."""
    view = opened.view
    wanted = view.locator("a, [tabindex='0']").count()
    reached = set()
    for _ in range(wanted):
        view.keyboard.press("Tab")
        focused = view.evaluate(
            "() => { const el = document.activeElement;"
            " return [[...document.querySelectorAll('*')].indexOf(el), el.tagName,"
            " getComputedStyle(el).outlineStyle] }"
        )
        assert focused[1] in ("A", "DIV")
        assert focused[2] == "solid"
        reached.add(focused[0])

    assert len(reached) == wanted
    table = view.locator(".scroll").last
    wide = view.locator(".scroll:has(table.figures)").first
    wide.focus()
    view.keyboard.press("ArrowRight")
    view.wait_for_function("el => el.scrollLeft > 0", arg=wide.element_handle(), timeout=10_000)
    assert table.get_attribute("aria-label")


@opening("rates", "comparison", widths=(1280,), schemes=("dark",))
def test_paper_is_light_and_holds_everything(opened: Opened) -> None:
    """Printed from a dark window: light ground, no text beyond the sheet."""
    view = opened.view
    view.set_viewport_size({"width": 720, "height": 1000})  # about A4 between its margins
    view.emulate_media(media="print")

    assert view.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    root = "document.documentElement"
    assert view.evaluate(f"{root}.scrollWidth <= {root}.clientWidth")
    assert view.pdf(format="A4").startswith(b"%PDF")


def test_page_is_whole_without_javascript(browser: Browser, folder: Path) -> None:
    """Drawings, figures and links are there from the start."""
    context = browser.new_context(java_script_enabled=False)
    view = context.new_page()
    view.goto((folder / "rates.html").as_uri())

    assert view.locator("svg >> visible=true").count() == 6
    assert view.locator("#figures + .scroll tbody tr").count() == 7
    context.close()
