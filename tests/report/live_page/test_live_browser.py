"""The live page in a real browser: a run, a kill by click, its recovery, played back, several, a phone, the dark."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.log.writer import RunLog
from support.report.browser import Tab, found
from support.report.live_server import TOKEN, served
from support.report.served_runs import folder, run_in
from support.report.trial_folders import comparison_in, swarm_in

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(found() is None, reason="no Chromium or Chrome here"),
]
OPENED = "document.documentElement.dataset.opened"
USABLE = "[role=button], button, select, input"
SEEN = "(e) => e.getBoundingClientRect().width"
NAME = "(e) => e.ariaLabel || e.textContent.trim() || e.closest('label')?.textContent.trim()"
STAGE_2 = ".node[data-node='2']"


@contextmanager
def demo(folder: Path, *flags: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """``planaria train demo --live``, small, and its address."""
    sizes = ["--model.dim", "64", "--model.hidden", "128", "--model.context", "64", "--train.steps", "100000"]
    words = ["train", "demo", "--quiet", "--live", "--out", str(folder), *flags, *sizes]
    process = subprocess.Popen(
        [sys.executable, "-m", "planaria", *words], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    try:
        yield next(line.split()[-1] for line in process.stdout if line.startswith("live page")), process
    finally:
        process.terminate()
        process.communicate(timeout=120)


def test_a_kill_by_click_and_the_recovery_live_then_played_back(tab: Tab, tmp_path: Path) -> None:
    with demo(tmp_path, "--live-chaos") as (url, process):
        tab.open(url)
        tab.until(f'document.querySelector("{STAGE_2}.holds")')
        tab.until("Number(document.querySelector('.count').textContent) > 3")
        assert "token" not in tab.run("location.href")
        assert tab.run("document.querySelector('#link').textContent") == "live"
        # On a busy machine a sign that it is slow may follow the name.
        worker = tab.run(f'document.querySelector("{STAGE_2} .who").textContent').split()[0]
        tab.click(STAGE_2)
        tab.until("!document.querySelector('#selected').hidden")
        assert worker in tab.run("document.querySelector('#selected .title').textContent")
        tab.until("document.querySelector('.faults [data-fault=kill]:enabled')")
        tab.click(".faults [data-fault=kill]")
        tab.until("document.querySelector('#selected .answer').textContent.includes('SIGKILL')")
        tab.until("document.querySelector('#recovery').dataset.open === 'false'")
        assert tab.run("document.querySelectorAll('.phases .done').length") == 5
        assert "stage 2" in tab.run("document.querySelector('#recovery .title').textContent")
        assert "no step was undone" in tab.run("document.querySelector('#recovery .sum').textContent")
        tab.until(f'document.querySelector("{STAGE_2}.holds")')
        assert tab.run(f'document.querySelector("{STAGE_2} .who").textContent').split()[0] != worker
        process.terminate()
        tab.until("document.querySelector('#link').dataset.how === 'over'")
        tab.run("document.querySelector('#recovery .again').click()")
        tab.until(f'document.querySelector("{STAGE_2}.empty, {STAGE_2}.waits")')
    assert not tab.trouble, tab.trouble


def test_playing_back_by_keyboard(tab: Tab, tmp_path: Path) -> None:
    with served([run_in(tmp_path / "run")]) as client:
        tab.open(f"{client.url}#at=3.5")
        tab.until(OPENED)
        tab.until("document.querySelectorAll('.node.holds').length === 3")
        assert tab.run("document.querySelector('.what').textContent") == "computing"
        tab.press("ArrowLeft")
        tab.until("Number(document.querySelector('#position').value) < 3.2")
        tab.press(" ", "Space")
        tab.until("document.querySelector('#play').getAttribute('aria-label') === 'Pause'")
        tab.press("d")
        assert tab.run("document.documentElement.dataset.theme") == "dark"
        tab.press("h")
        assert tab.run("!document.querySelector('#legend').hidden")
        assert "not logged: they are moved along the plan" in tab.run("document.querySelector('.honest').textContent")
        tab.press("Escape")
        names = tab.run(f"[...document.querySelectorAll({USABLE!r})].filter({SEEN}).map({NAME})")
        assert names and all(names), "everything that can be used has a name"
        assert tab.run("[...document.querySelectorAll('.node, .docked')].every(e => e.tabIndex === 0)")
    assert not tab.trouble, tab.trouble


@pytest.mark.parametrize("width", [390, 1280, 2560])
@pytest.mark.parametrize("dark", [False, True])
def test_it_fits_and_follows_the_system(tab: Tab, tmp_path: Path, width: int, dark: bool) -> None:
    with served([run_in(tmp_path / "run")]) as client:
        tab.open(f"{client.url}#at=3.5", width=width, dark=dark, still=True)
        tab.until(OPENED)
        tab.until("document.querySelectorAll('.node').length === 3")
        assert tab.run("document.documentElement.scrollWidth <= innerWidth")
        red, green, blue = json.loads(
            tab.run(
                "getComputedStyle(document.body).backgroundColor.replace('rgb', '').replace('(', '[').replace(')', ']')"
            )
        )
        assert (red + green + blue < 200) == dark
        assert tab.run("document.querySelectorAll('.dot').length") <= 2, "nothing moves but the legend's examples"
    assert not tab.trouble, tab.trouble


def test_two_runs_side_by_side(tab: Tab, tmp_path: Path) -> None:
    with served([run_in(tmp_path / "first"), run_in(tmp_path / "second")]) as client:
        tab.open(f"{client.url}#at=3.5")
        tab.until(OPENED)
        tab.until("document.querySelectorAll('.run').length === 2 && document.querySelectorAll('.node').length === 6")
        assert tab.run("[...document.querySelectorAll('figcaption')].map(e => e.textContent)") == ["first", "second"]
        tab.click("#runs button:nth-child(2)")
        tab.until("document.querySelector('.run.shown figcaption').textContent === 'second'")
    assert not tab.trouble, tab.trouble


def excluded_in(path: Path) -> Path:
    """Two replicas of two stages. One worker of replica 0 is slow; those of replica 1 are excluded at 3, one later."""
    log = RunLog(folder(path))
    about = {"replicas": 2, "nodes_by_replica": [[0, 1], [2, 3]], "routes": [[0, 1, 0]], "samples_per_step": 4}
    log.event(50.0, e.RunStarted(name="run", seed=1, stages=1, steps=9, first_step=0, wall_time=0.0, **about))
    for number in range(4):
        log.decision(50.1, d.Spawn(worker=f"w{number}", incarnation=1))
        log.event(51.0, e.WorkerJoined(worker=f"w{number}", incarnation=1, pid=4000 + number))
    for replica in range(2):
        members = [
            d.Member(node=2 * replica + s, stage=s, worker=f"w{2 * replica + s}", source=d.Fresh()) for s in (0, 1)
        ]
        form = d.Form(replica=replica, generation=1, step=0, outcome="started", members=members, links=[])
        log.decision(52.0, form)
        for m in members:
            log.event(52.2, e.Linked(worker=m.worker, node=m.node, stage=m.stage, generation=1, link_s=0.1))
    slow = d.SlowPartFound(
        replica=0, step=1, fault="slow data", nodes=[0], workers=["w0"], seconds=0.5, initial_s=0.1, peer_median_s=0.0
    )
    log.decision(52.5, slow)
    # The fault of the second loss is older than the first loss: the recovery began with it.
    log.event(52.8, e.FaultInjected(worker="w3", node=3, signal="SIGKILL", step=1, moment=""))
    log.decision(53.0, d.ExcludeMember(member=1, workers=["w2"], strikes=2, reason="what replica 1 says was of no use"))
    for worker, t in (("w2", 53.1), ("w3", 53.2)):
        log.event(t, e.WorkerLost(worker=worker, incarnation=1, cause="exit", detail=""))
    log.decision(55.0, d.Disband(replica=1, workers=[], reason="no worker is left"))
    log.event(60.0, e.Trouble(detail="the end"))
    log.close()
    return path


@pytest.mark.parametrize("dark", [False, True])
def test_slow_workers_are_marked_and_excluded_ones_are_not_dead(tab: Tab, tmp_path: Path, dark: bool) -> None:
    with served([excluded_in(tmp_path / "run")]) as client:
        tab.open(f"{client.url}#at=3.15", dark=dark, still=True)
        tab.until(OPENED)
        tab.until("document.querySelector('#verdicts .action').textContent === 'Nothing is done about it.'")
        ends = "getComputedStyle(document.querySelector('.node.slow.ends .seg')).stroke"
        orange = "getComputedStyle(document.querySelector('#verdicts li')).borderLeftColor"
        assert tab.run(ends) == tab.run(orange), "the same colour, at the ends too"
        tab.until("document.querySelector('#recovery .sum').textContent === 'Replica 1 stands still.'")
        assert "excluded" in tab.run("document.querySelector('.docked.dead .what').textContent")
        tab.open(f"{client.url}#at=9", dark=dark, still=True)
        tab.until("document.querySelector('#recovery .sum').textContent.startsWith('No worker takes over')")
        assert tab.run("document.querySelector('#recovery .title').textContent").startswith("Recovery 1: stages 0, 1")
        assert tab.run("document.querySelectorAll('.phases .now').length") == 0
        rows = tab.run("[...document.querySelectorAll('#workers tbody tr')].map(r => r.children[1].textContent)")
        assert rows == ["slow", "working", "excluded", "dead (exit)"]
    assert not tab.trouble, tab.trouble


@pytest.mark.parametrize("width", [390, 2560])
def test_a_comparison_and_a_swarm_side_by_side(tab: Tab, tmp_path: Path, width: int) -> None:
    with served([comparison_in(tmp_path / "mine-compare"), swarm_in(tmp_path / "swarm")]) as client:
        tab.open(f"{client.url}#at=1000", width=width, dark=True)
        tab.until(OPENED)
        tab.until("document.querySelectorAll('.grid tbody tr').length === 5")
        rows = tab.run("[...document.querySelectorAll('.grid')].map(g => g.tBodies[0].rows[1].textContent)")
        assert rows[0].startswith("echo1✓ done40 of 40") and "× 1.50" in rows[0]
        assert rows[1].startswith("bert (attacks: text)✓ finished3")
        assert tab.run("document.documentElement.scrollWidth <= innerWidth")
        tab.until("!document.querySelector('#workers').closest('section').getBoundingClientRect().width")
        tab.click("#runs button:nth-child(2)")
        tab.until("document.querySelector('[data-curve]').textContent.startsWith('Reward by round')")
        assert tab.run("document.querySelector('.scroll.wide').tabIndex") == 0, (
            "a table that is too wide scrolls by keyboard"
        )
    assert not tab.trouble, tab.trouble


def test_requests_without_the_token_are_refused(tab: Tab, tmp_path: Path) -> None:
    with served([run_in(tmp_path / "run")]) as client:
        tab.do("Network.clearBrowserCookies")
        tab.open(client.url.replace(TOKEN, "wrong"))
        tab.until("document.body.textContent.includes('no token')")
        tab.trouble.clear()  # a 403 is one to the browser
