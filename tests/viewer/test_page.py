"""The page in a real browser: what a person sees and does. Makes the screenshots of the docs.

`RUNS=FOLDER SCREENSHOTS=docs/images pytest -m nightly tests/viewer/test_page.py` writes them anew,
of the real runs `grpo_tiny` and `ppo_tiny` in FOLDER.
"""

import contextlib
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
import urllib.request

import made_runs
import pytest
import runs
from playwright.sync_api import expect, sync_playwright

import jaxrl_llm

NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), "")


@contextlib.contextmanager
def served(*folders):
    """Serves runs as a user does; yields address and process."""
    program = "from jaxrl_llm.commands import command_line; command_line.run('view')"
    command = [sys.executable, "-c", program, *map(str, folders), "--port=0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().split()[0], process
    finally:
        process.terminate()
        process.wait(20)


@pytest.fixture(scope="module")
def browser():
    if not BROWSER:
        pytest.skip("no chromium on this machine")
    with sync_playwright() as playwright:
        options = {"executable_path": BROWSER, "args": ["--no-sandbox"]}
        with contextlib.closing(playwright.chromium.launch(**options)) as found:
            yield found


@pytest.fixture
def page(browser):
    """A page that fails the test for an error in the console or a request to elsewhere."""
    found = browser.new_page(viewport={"width": 1280, "height": 900})
    faults = []
    found.on("console", lambda said: faults.append(said.text) if said.type == "error" else None)
    found.on("pageerror", lambda error: faults.append(str(error)))
    found.on("request", lambda request: faults.extend(elsewhere(request.url)))
    yield found
    found.close()
    assert not faults


def elsewhere(url):
    return [] if re.match(r"http://127\.0\.0\.1:|data:", url) else [url]


def used_s(of):
    """Returns the CPU seconds that a process and all processes below it have used."""
    fields = {}
    for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            pid, _, rest = path.read_text().partition(" ")
            fields[int(pid)] = rest.rpartition(")")[2].split()
    below = {of}
    while more := {pid for pid, found in fields.items() if int(found[1]) in below} - below:
        below |= more
    ticks = sum(int(fields[pid][11]) + int(fields[pid][12]) for pid in below if pid in fields)
    return ticks / os.sysconf("SC_CLK_TCK")


@pytest.mark.slow
def test_page_shows_curves_alerts_memory_and_samples(page, tmp_path):
    folders = [
        made_runs.make(tmp_path / name, 120, 9, dumps=[60, 120], seed=i)
        for i, name in enumerate(("grpo", "grpo_low_kl"))
    ]
    with served(*folders) as (address, _):
        page.goto(address)
        charts = page.locator("figure")
        page.wait_for_selector("figure polyline")
        reward = page.locator("figure[data-metric='critic/score/mean']")
        assert reward.locator("polyline").count() == 2  # a line for each run
        kl = page.locator("figure[data-metric='actor/ppo_kl'] polyline")
        assert kl.count() == 4  # a number that is not finite breaks the line
        assert "alert kl in 2 steps, from 30 to 31" in page.locator("#alerts").inner_text()
        memory = page.locator("#memory").inner_text()
        assert "planned peak of a device\t2\t2" in memory and "1.8" in memory
        reward.locator("svg").hover()
        assert re.search(r"step \d+: grpo 0\.\d+, grpo_low_kl 0\.", reward.inner_text())

        page.locator(".run input").first.uncheck()
        expect(reward.locator("polyline")).to_have_count(1)
        page.fill("#metrics", "timing_s")
        expect(charts).to_have_count(1)
        assert charts.get_attribute("data-metric") == "timing_s/step"

        # Live: a step that is written now is seen without a reload.
        with (folders[1] / "metrics.jsonl").open("a") as file:
            file.write('{"step": 121, "data": {"timing_s/step": 50.0}}\n')
        expect(page.locator("#runs")).to_contain_text("step 121")

        page.click("button[data-tab=samples]")
        page.wait_for_selector("#list li")
        rows = page.locator("#list li")
        assert rows.count() == 9 and page.input_value("[name=step]") == "120"
        assert "<b>0</b>" in rows.first.inner_text()  # text, not markup
        page.fill("[name=text]", "add the digits")
        expect(rows).to_have_count(3)
        page.fill("[name=text]", "")
        page.select_option("[name=order]", "score")
        expect(rows.first).to_contain_text("score 0")
        rows.first.click()
        page.wait_for_selector(".tokens span")
        page.select_option("#meaning", "advantage")
        spans = page.locator(".tokens span")
        red = "rgba(214, 69, 65, 0.75)"
        assert spans.first.evaluate("s => s.style.background") == red
        assert spans.nth(1).get_attribute("class") == "masked"
        assert "advantage -1" in spans.first.get_attribute("title")

        page.select_option("[name=order]", "")
        expect(rows.first).to_contain_text("score 1")
        rows.nth(1).click()
        page.wait_for_selector(".turn")
        assert "calculator" in page.locator("#sample").inner_text()
        page.select_option("#meaning", "log-prob difference")
        page.click("#before")
        expect(page.locator("[name=step]")).to_have_value("60")


@pytest.mark.nightly
def test_a_real_run_is_shown(page, tmp_path):
    """Two runs of seconds, or those that the pictures of the docs are of."""
    place = pathlib.Path(os.environ.get("RUNS", tmp_path))
    pictures = pathlib.Path(os.environ.get("SCREENSHOTS", tmp_path))
    folders = [place / name for name in ("grpo_tiny", "ppo_tiny")]
    for folder in folders if place == tmp_path else ():
        config = runs.values(folder.name)
        config.update_from_flattened_dict({**runs.TINY, "metrics.rollout_tokens": True})
        jaxrl_llm.train(config, folder)
    with served(*folders) as (address, _):
        page.goto(address)
        page.wait_for_selector("figure polyline", state="attached")  # it may be flat
        score = page.locator("figure[data-metric='critic/score/mean']")
        assert score.locator("polyline").count() == 2
        assert "planned peak" in page.locator("#memory").inner_text()
        page.screenshot(path=pictures / "viewer_curves.png")
        page.click("button[data-tab=samples]")
        page.fill("[name=step]", "1")
        page.select_option("[name=order]", "score")
        expect(page.locator("#list li").first).to_contain_text("step 1 score 0")
        page.locator("#list li").first.click()
        page.wait_for_selector(".tokens span")
        page.select_option("#meaning", "advantage")
        assert page.locator(".tokens span").count() > 2
        page.screenshot(path=pictures / "viewer_samples.png")


@pytest.mark.slow
def test_a_large_run_opens_at_once_in_little_memory(browser, tmp_path):
    """10,000 steps of 80 metrics, 100,000 samples: times are printed, the memory is checked."""
    more = {f"more/{i}": 0.123456789 * i for i in range(67)}
    folder = made_runs.make(tmp_path / "large", 10_000, 1_000, range(100, 10_001, 100), more=more)
    begin, before_s = time.perf_counter(), used_s(os.getpid())
    with served(folder) as (address, process):
        served_s = time.perf_counter() - begin
        page = browser.new_page()
        page.goto(address)
        page.wait_for_selector("figure polyline")
        curves_s = time.perf_counter() - begin
        page.click("button[data-tab=samples]")
        page.wait_for_selector("#list li")
        samples_s = time.perf_counter() - begin
        cpu_s, of_server_s = used_s(os.getpid()) - before_s, used_s(process.pid)
        page.fill("[name=step]", "")
        page.fill("[name=text]", "<b>999</b>")  # in every dump, on its last line
        expect(page.locator("#count")).to_contain_text("samples so far", timeout=60_000)
        searched_s = time.perf_counter() - begin
        status = pathlib.Path(f"/proc/{process.pid}/status").read_text()
        peak_mib = int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) / 1024
        said = urllib.request.urlopen(f"{address}/api/runs").read()
        assert b'"last_step":10000' in said
        page.close()
    print(
        f"ready after {served_s:.1f} s, curves {curves_s:.1f} s, samples {samples_s:.1f} s,"
        f" search {searched_s:.1f} s; {peak_mib:.0f} MiB; CPU until samples {cpu_s:.1f} s of server"
        f" and browser, {of_server_s:.1f} s of the server"
    )
    assert peak_mib < 500
