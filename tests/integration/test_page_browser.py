"""The status page in a real Chromium, as people use it."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

from browser import Page, connect
from page_stage import BusyStage, fill
from rig import rig, until
from status_stage import TOKEN, Stage, stage
from training_run import find_question, set_record

from evald.testing import write_snapshot
from evald.testing.fake_launcher import write_fake_python

ROW = "document.querySelectorAll('.points tbody tr').length"
#: how many pixels of the first chart have nearly this colour.
PIXELS = """((red, green, blue) => {
  const canvas = document.querySelector(".card canvas");
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  let n = 0;
  for (let at = 0; at < data.length; at += 4) {
    const off = [data[at] - red, data[at + 1] - green, data[at + 2] - blue].map(Math.abs);
    if (data[at + 3] > 200 && Math.max(...off) < 12) n += 1;
  }
  return n;
})"""
POINT = "point/demo%2Fstep%2F800%2Fr0"


@asynccontextmanager
async def watched(
    work: Path, chromium_url: str, *, n_points: int = 40
) -> AsyncIterator[tuple[Stage, Page]]:
    """A daemon in mid-run, and a tab."""
    async with (
        stage(work, kind=BusyStage, find_question=find_question) as s,
        connect(chromium_url) as chrome,
        chrome.page() as page,
    ):
        if n_points:
            await fill(s, "demo", n_points)
        yield s, page


async def opened(s: Stage, page: Page, where: str = "") -> None:
    """Open the page with its token, at a place."""
    await page.open(f"{s.url}/#token={TOKEN}")
    await page.until("window.evald?.ready")
    if where:
        await page.js(f"location.hash = '#/{where}'")


async def test_it_shows_the_run_and_asks_nobody_else(tmp_path: Path, chromium_url: str) -> None:
    async with watched(tmp_path, chromium_url) as (s, page):
        await opened(s, page)
        await page.until(f"{ROW} > 10")
        # a set's chart has the score and its paired change; an aggregate and the points have one
        assert await page.js("document.querySelectorAll('.card').length") == 5
        assert await page.js("document.querySelectorAll('.card canvas').length") == 8
        await page.until_text("step 800: ", ".card .readout")
        text = await page.js("document.body.innerText")
        for shown in (
            "gpqa-diamond",
            "60/200",
            "42 s left",
            "quarantined",
            "4.1 GB free",
            "step 840",
        ):
            assert shown in text
        await page.js("document.querySelector('button.more').click()")
        await page.until(f"{ROW} === 41")
        assert "skipped: busy" in await page.js("document.body.innerText")
        # the token is neither in the URL nor in a request's
        assert TOKEN not in await page.js("location.href")
        assert not [url for url in page.requests if TOKEN in url]
        await page.js(f"location.hash = '#/{POINT}/aime'")
        await page.until_text("We add", ".samples")
        hosts = {urlsplit(url).netloc for url in page.requests if not url.startswith("data:")}
        assert hosts == {s.server.listen}
        assert page.complaints == []


async def test_a_running_point_shows_as_it_goes(tmp_path: Path, chromium_url: str) -> None:
    async with watched(tmp_path, chromium_url, n_points=12) as (s, page):
        assert isinstance(s, BusyStage)
        await opened(s, page)
        await page.until(f"{ROW} > 10")
        await page.js("window.notReloaded = true")
        s.done = 170
        await page.until_text("170/200", ".running", 5)
        await s.ledger.append(set_record("demo", 820, "aime", 0.47))
        await page.until_text("step 820", ".points tbody tr", 5)
        await page.until_text("running", ".points tbody tr")
        await page.until_text("820:6a0a4e6f", ".engines tbody")
        await page.until_text("step 820: 0.470", ".card .readout")
        await s.add_points(7, 7)  # of another run: the shown one stays
        await page.until("document.querySelector('header select')?.value === 'demo'")
        assert await page.js("window.notReloaded")
        assert page.complaints == []


async def test_a_point_was_compared_with_one_that_had_ended(
    tmp_path: Path, chromium_url: str
) -> None:
    async with watched(tmp_path, chromium_url, n_points=0) as (s, page):
        for step in (1, 3, 2, 4):
            await s.add_points(step, step)
        await opened(s, page)
        await page.until(f"{ROW} === 4")
        before = await page.js(
            "(run => run.all().map(one => run.before(one)?.step ?? 0))(window.evald.store.run('a'))"
        )
        assert before == [3, 1, 1, 0]  # of 4, 3, 2, 1


async def test_a_zoom_stays_when_a_record_comes(tmp_path: Path, chromium_url: str) -> None:
    shown = "[...window.evald.view.cards.values()].map(c => c.curve.plot.scales.x)[0]"
    async with watched(tmp_path, chromium_url) as (s, page):
        await opened(s, page)
        await page.until(f"{ROW} > 10")
        whole = await page.until(f"(({{min, max}}) => [min, max])({shown})")
        assert whole == [20 - 0.02 * 780, 800 + 0.02 * 780]
        await page.js("document.querySelector('.u-over').scrollIntoView({block: 'center'})")
        box = await page.js(
            "(({x, y, width, height}) => [x, y + height / 2, width])"
            "(document.querySelector('.u-over').getBoundingClientRect())"
        )
        left, top, width = box
        for kind, at in (
            ("mouseMoved", 0.4),
            ("mousePressed", 0.4),
            ("mouseMoved", 0.5),
            ("mouseMoved", 0.6),
            ("mouseReleased", 0.6),
        ):
            await page.call(
                "Input.dispatchMouseEvent",
                type=kind, x=left + at * width, y=top, button="left", clickCount=1,
            )  # fmt: skip
        await page.until(f"{shown}.max < 600")
        low, high = await page.js(f"(({{min, max}}) => [min, max])({shown})")
        assert 300 < low < 400
        assert 450 < high < 550
        await s.ledger.append(set_record("demo", 820, "aime", 0.47))
        await page.until_text("step 820", ".points tbody tr", 5)
        assert await page.js(f"(({{min, max}}) => [min, max])({shown})") == [low, high]
        await page.js("document.querySelector('.u-over').dispatchEvent(new MouseEvent('dblclick'))")
        await page.until(f"{shown}.max === 820 + 0.02 * 800")
        assert page.complaints == []


async def test_a_whole_daemon_is_watched_through_a_point(tmp_path: Path, chromium_url: str) -> None:
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "token").chmod(0o600)
    python = write_fake_python(tmp_path / "python", delay_s=0.3)
    status = f'listen = "127.0.0.1:0"\ntoken_file = "{tmp_path / "token"}"'
    with rig(tmp_path, python=python, questions=60, status=status) as r:
        r.start()
        url = f"http://{until(lambda: r.status().get('listen'), 'it listens')}"
        async with connect(chromium_url) as chrome, chrome.page() as page:
            await page.open(f"{url}/#token={TOKEN}")
            await page.until("window.evald?.ready")
            write_snapshot(r.root / "step_5", seed=5, answer=7)
            await page.until("document.querySelector('.running .progress')", 40)
            await page.until_text("step 5\t", ".points tbody", 40)
            await page.until_text("ok", ".points tbody .outcome", 40)
            await page.js("document.querySelector('.points tbody a').click()")
            await page.until_text("Measured with")
            await page.js("document.querySelector('main .rows tbody a').click()")
            await page.until_text("boxed{7}", ".samples")
            await page.js("document.querySelector('.samples tbody a').click()")
            await page.until_text("a0?", ".detail-page")  # the prompt, from the daemon's own set
            await page.js("location.hash = '#/engine/engine-0'")
            await page.until_text("serving", "main dl")
            await page.until_text("lines of 0001.log", "main")
            log = await page.js("document.querySelector('.log').textContent")
            key = r.work / "results" / "engines" / "engine-0" / "launch.yaml"
            if key.exists():
                assert not any(word in log for word in key.read_text().split() if len(word) > 40)
            r.stop()
            await page.until_text("not connected", "header")
            assert [one for one in page.complaints if "ERR_CONNECTION" not in one] == []


async def test_samples_are_filtered_and_hostile_text_stays_text(
    tmp_path: Path, chromium_url: str
) -> None:
    async with watched(tmp_path, chromium_url) as (s, page):
        await opened(s, page, f"{POINT}/aime")
        await page.until_text("onerror", ".samples")
        counts = await page.js(
            "Object.fromEntries([...document.querySelectorAll('.filters a')]"
            ".map(a => [a.dataset.key, Number(a.querySelector('small').textContent)]))"
        )
        assert counts["all"] == 60
        assert counts["failed"] == 1
        assert 0 < counts["truncated"] < counts["wrong"] < 60
        assert counts["flipped"] > 0
        for name in ("wrong", "truncated", "failed", "flipped"):
            await page.js(f"document.querySelector('.filters [data-key={name}]').click()")
            await page.until(
                f"document.querySelector('.filters [aria-current]')?.dataset.key === '{name}' &&"
                f" document.querySelectorAll('.samples tbody tr').length === {counts[name]}"
            )
        assert "better" in await page.js("document.querySelector('.samples').innerHTML")
        await page.js(f"location.hash = '#/{POINT}/aime/3/0'")
        await page.until_text("onerror", ".response")
        assert (
            await page.js(
                "document.querySelectorAll('.detail-page img, .detail-page script').length"
            )
            == 0
        )
        assert "owned" not in await page.js("document.title")
        assert page.complaints == []


async def test_everything_can_be_reached_by_keys(tmp_path: Path, chromium_url: str) -> None:
    async with watched(tmp_path, chromium_url) as (s, page):
        await opened(s, page)
        await page.until(f"{ROW} > 10")
        # along a curve, and into a point
        await page.js("document.querySelector('.curve').focus()")
        await page.press("End")
        await page.press("ArrowLeft")
        await page.until_text("step 780: ", ".card .readout.at")
        await page.press("Enter")
        await page.until_text("step 780", "h1")
        await page.press("ArrowLeft")
        await page.until_text("step 760", "h1")
        await page.press("ArrowRight")
        await page.press("ArrowRight")
        await page.until_text("step 800", "h1")
        await page.press("Escape")
        await page.until(f"{ROW} > 10")
        # along the rows, into one, and back to it
        await page.js("document.querySelector('.points tbody a').focus()")
        await page.press("ArrowDown")
        await page.press("ArrowDown")
        await page.press("ArrowUp")
        await page.press("Enter")
        await page.until_text("step 780", "h1")
        await page.press("Escape")
        await page.until("document.activeElement.innerText === 'step 780'")
        # samples: a row, the next one, and back
        await page.js(f"location.hash = '#/{POINT}/aime'")
        await page.until_text("We add", ".samples")
        await page.js("document.querySelector('.samples tbody a').focus()")
        await page.press("Enter")
        await page.until_text("0", ".detail-page h1")
        await page.until_text("after →", ".detail-page")
        await page.press("ArrowRight")
        await page.until("document.querySelector('.detail-page h1')?.innerText.startsWith('1 ')")
        await page.press("Escape")
        await page.until_text("Samples of aime", "h1")
        await page.press("Escape")
        await page.until_text("step 800", "h1")
        # Tab gets out of the header into the content, and shows where it is
        await page.press("Tab")
        assert await page.js("document.activeElement.matches(':focus-visible')")
        assert page.complaints == []


async def test_light_and_dark(tmp_path: Path, chromium_url: str) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    light, dark = "rgb(245, 246, 248)", "rgb(18, 22, 28)"
    async with watched(tmp_path, chromium_url, n_points=10) as (s, page):
        await page.colours("light")
        await opened(s, page)
        await page.until(f"{ground} === '{light}'")
        await page.colours("dark")
        await page.until(f"{ground} === '{dark}'")
        button = "document.querySelector('button.theme')"
        await page.js(f"{button}.click()")
        await page.until(f"{ground} === '{light}' && {button}.innerText === 'light'")
        await opened(s, page)  # it stays
        await page.until(f"{ground} === '{light}'")
        await page.js(f"{button}.click()")
        await page.until(f"{ground} === '{dark}' && {button}.innerText === 'dark'")
        # the charts are drawn again in the colours of the day
        await page.until(f"{PIXELS}(122, 169, 247) > 50 && {PIXELS}(37, 99, 201) === 0")
        await page.js(f"{button}.click(), {button}.click()")
        await page.until(f"{ground} === '{light}'")
        await page.until(f"{PIXELS}(37, 99, 201) > 50 && {PIXELS}(122, 169, 247) === 0")


async def test_a_token_is_asked_for_and_a_wrong_one_refused(
    tmp_path: Path, chromium_url: str
) -> None:
    async with watched(tmp_path, chromium_url, n_points=10) as (s, page):
        await page.open(f"{s.url}/")
        await page.until("document.querySelector('form.token input')")
        assert "has ended yet" not in await page.js("document.body.innerText")
        assert await page.js(ROW) == 0
        await page.type("wrong")
        await page.press("Enter")
        await page.until_text("The token is wrong", "form.token")
        assert await page.js(ROW) == 0
        await page.js("document.querySelector('form.token input').value = ''")
        await page.js("document.querySelector('form.token input').focus()")
        await page.type(TOKEN)
        await page.press("Enter")
        await page.until(f"{ROW} >= 10")
        assert await page.js("document.querySelector('form.token')") is None
        await page.open(f"{s.url}/?again")  # this tab keeps it
        await page.until(f"{ROW} >= 10")


async def test_it_goes_on_after_the_daemon_was_away(tmp_path: Path, chromium_url: str) -> None:
    async with connect(chromium_url) as chrome, chrome.page() as page:
        async with stage(tmp_path, kind=BusyStage) as s:
            await fill(s, "demo", 10)
            await opened(s, page)
            await page.until(f"{ROW} === 11")
            port = int(s.url.rpartition(":")[2])
        await page.until_text("not connected", "header")
        async with stage(tmp_path, kind=BusyStage, port=port) as s:
            await s.ledger.append(set_record("demo", 220, "aime", 0.5))
            await page.until(f"{ROW} === 12")
            await page.until_text("serving", "header")
        for name in ("results.jsonl", "results.lock"):
            (tmp_path / name).unlink()
        async with stage(tmp_path, kind=BusyStage, port=port) as s:  # another ledger
            await fill(s, "demo", 2)
            await page.until(f"{ROW} === 3")


async def test_two_thousand_points_open_at_once(tmp_path: Path, chromium_url: str) -> None:
    async with watched(tmp_path, chromium_url, n_points=2000) as (s, page):
        begun = time.monotonic()
        await opened(s, page)
        await page.until(f"{ROW} > 10")
        took_s = time.monotonic() - begun
        print(f"2,000 points: {took_s:.2f} s")
        await page.until_text("step 40000: ", ".card .readout")
        assert took_s < 6  # (under 2 s on a machine that does nothing else)
        assert page.complaints == []


async def test_a_report_opens_from_a_disk(tmp_path: Path, chromium_url: str) -> None:
    async with stage(tmp_path) as s:
        await fill(s, "demo", 40)
    out = tmp_path / "report.html"
    command = [sys.executable, "-m", "evald", "report", str(tmp_path), "-o", str(out)]
    made = await asyncio.create_subprocess_exec(*command)
    assert await made.wait() == 0
    async with connect(chromium_url) as chrome, chrome.page() as page:
        await page.open(f"file://{out}")
        await page.until(f"{ROW} > 10")
        assert await page.js("document.querySelectorAll('.card canvas').length") == 8
        await page.until_text("made 20", "header")
        await page.js("document.querySelector('.points tbody a').click()")
        await page.until_text("step 800", "h1")
        await page.js("document.querySelector('main .rows tbody a').click()")
        await page.until_text("The first 20 of ", "main")
        await page.until_text("onerror", ".samples")
        await page.js(f"location.hash = '#/{POINT}/aime/3/0'")
        await page.until_text("onerror", ".response")
        await page.press("Escape")
        await page.until_text("Samples of aime", "h1")
        assert await page.js("document.title") == "demo – evald"  # noqa: RUF001 - a dash
        assert {url for url in page.requests if not url.startswith("data:")} == {f"file://{out}"}
        assert page.complaints == []
