"""Asking evald for a point and waiting for it, against a ledger in memory."""

from __future__ import annotations

import asyncio
import functools
import json
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from ledger_link import LedgerLink, baseline

from evald.point import Kind, Outcome, PointKey
from evald.trainer.contract import Carrier, NoSpace
from evald.trainer.point_records import Answer, NotMeasured
from evald.trainer.request import Ask, Hand, Requester, hand_in_place, hand_over

STEP = PointKey("r", 7)


@pytest.fixture
def link() -> LedgerLink:
    return LedgerLink()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    root.mkdir()
    return root


def requester(link: LedgerLink, root: Path, **settings: Any) -> Requester:
    hand = functools.partial(hand_in_place, root)
    return Requester(link, hand, **{"dead_after_s": 0.2, "poll_s": 0.01, **settings})


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.005)


async def read(root: Path, name: str) -> dict[str, Any]:
    """Wait for a request, as the daemon would."""
    path = root / f"{name}.request"
    await until(path.exists)
    content: dict[str, Any] = json.loads(path.read_bytes())
    return content


async def measured(
    asker: Requester, ask: Ask, daemon: Coroutine[Any, Any, None], *, timeout_s: float = 10.0
) -> Answer:
    task = asyncio.create_task(daemon)
    try:
        return await asker.measure(ask, timeout_s=timeout_s)
    finally:
        await task


def left(root: Path) -> list[str]:
    return [path.name for path in root.iterdir()]


async def test_hands_the_directory_over_and_returns_the_record(
    link: LedgerLink, root: Path, tmp_path: Path
) -> None:
    link.answer(PointKey("r", 3))

    async def daemon() -> None:
        request = await read(root, "reuse_7")
        assert request == {"run": "r", "kind": "reuse", "step": 7, "path": str(tmp_path / "ckpt")}
        link.accept(STEP)
        (root / "reuse_7.request").unlink()
        link.answer(PointKey("other", 7))  # another run of the same daemon
        link.answer(PointKey("r", 3, 1))  # another step
        link.measure(STEP, "a", n_total=2, score=0.25)
        link.measure(STEP, "void", n_total=2, score=0.0)
        link.end(STEP, metrics={"eval/a": 0.25}, void_sets=[f"{STEP.record_id}/void"])

    answer = await measured(requester(link, root), Ask(7, tmp_path / "ckpt"), daemon())
    assert answer.point["metrics"] == {"eval/a": 0.25}
    assert [one["set"] for one in answer.sets] == ["a"]
    assert not left(root)


async def test_a_skipped_point_is_its_reason(link: LedgerLink, root: Path, tmp_path: Path) -> None:
    async def daemon() -> None:
        await read(root, "reuse_7")
        link.end(STEP, Outcome.SKIPPED, reason="invalid_snapshot", detail="no shard")

    with pytest.raises(NotMeasured, match="no shard") as caught:
        await measured(requester(link, root), Ask(7, tmp_path), daemon())
    assert caught.value.reason == "invalid_snapshot"
    assert not left(root)


async def test_a_repeated_step_waits_for_its_own_revision(
    link: LedgerLink, root: Path, tmp_path: Path
) -> None:
    link.accept(STEP)  # still running, of an earlier life of the trainer

    async def daemon() -> None:
        await read(root, "reuse_7")
        link.measure(STEP, "a", n_total=2, score=0.1)
        link.end(STEP, metrics={"eval/a": 0.1})
        await asyncio.sleep(0.05)
        link.answer(PointKey("r", 7, 1), score=0.9)
        (root / "reuse_7.request").unlink()

    answer = await measured(requester(link, root), Ask(7, tmp_path), daemon())
    assert answer.point["metrics"]["eval/a"] == 0.9


async def test_the_same_bytes_again_are_answered_with_the_record_that_is_there(
    link: LedgerLink, root: Path, tmp_path: Path
) -> None:
    link.answer(STEP, score=0.75)

    async def daemon() -> None:
        await read(root, "reuse_7")
        (root / "reuse_7.request").unlink()  # and no record

    answer = await measured(requester(link, root), Ask(7, tmp_path), daemon())
    assert answer.point["metrics"]["eval/a"] == 0.75


async def test_a_consumed_request_is_not_answered_by_a_ledger_that_lags_behind(
    link: LedgerLink, root: Path, tmp_path: Path
) -> None:
    """On a network file system the request may be seen to go before its record is seen."""
    link.answer(STEP, score=0.75)

    async def daemon() -> None:
        await read(root, "reuse_7")
        link.hidden = 3
        link.answer(PointKey("r", 7, 1), score=0.9)
        (root / "reuse_7.request").unlink()
        beat = link.beat
        await until(lambda: link.beat > beat + 5)
        link.hidden = 0

    answer = await measured(requester(link, root), Ask(7, tmp_path), daemon())
    assert answer.point["metrics"]["eval/a"] == 0.9


async def test_a_baseline_is_measured_once(link: LedgerLink, root: Path, tmp_path: Path) -> None:
    ask = Ask(-1, tmp_path, Kind.BASELINE)

    async def daemon() -> None:
        request = await read(root, "baseline_-1")
        assert request == {"run": "r", "kind": "baseline", "step": -1, "path": str(tmp_path)}
        link.answer(baseline(), score=0.125)

    asker = requester(link, root)
    first = await measured(asker, ask, daemon())
    again = await asker.measure(ask, timeout_s=10)
    assert first.point == again.point
    assert first.point["metrics"]["eval/a"] == 0.125


async def test_deadline_takes_the_request_back(
    link: LedgerLink, root: Path, tmp_path: Path
) -> None:
    with pytest.raises(NotMeasured, match=r"within 0\.1 s") as caught:
        await requester(link, root).measure(Ask(7, tmp_path), timeout_s=0.1)
    assert caught.value.reason == "deadline"
    assert not left(root)


@pytest.mark.parametrize("sign", ["stands", "silent"])
@pytest.mark.parametrize("when", ["before", "while waiting"])
async def test_a_dead_daemon_is_unhealthy(
    link: LedgerLink, root: Path, tmp_path: Path, sign: str, when: str
) -> None:
    asker = requester(link, root)
    if when == "before":
        link.beat = 1
        setattr(link, sign, True)
    else:
        asyncio.get_running_loop().call_later(0.1, setattr, link, sign, True)
    started = time.monotonic()
    with pytest.raises(NotMeasured, match="no sign of life") as caught:
        await asker.measure(Ask(7, tmp_path), timeout_s=30)
    assert caught.value.reason == "unhealthy"
    assert time.monotonic() - started < 5
    assert not left(root)


async def test_cancelling_takes_the_request_back(
    link: LedgerLink, root: Path, tmp_path: Path
) -> None:
    task = asyncio.create_task(requester(link, root).measure(Ask(7, tmp_path), timeout_s=30))
    await read(root, "reuse_7")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not left(root)


async def test_a_root_that_is_not_there_is_unhealthy(link: LedgerLink, tmp_path: Path) -> None:
    with pytest.raises(NotMeasured, match="cannot hand step 7 to evald") as caught:
        await requester(link, tmp_path / "gone").measure(Ask(7, tmp_path), timeout_s=10)
    assert caught.value.reason == "unhealthy"


async def test_a_ledger_that_began_anew_is_read_from_its_start(
    link: LedgerLink, root: Path, tmp_path: Path
) -> None:
    asker = requester(link, root)
    for score in (0.1, 0.2):

        async def daemon(score: float = score) -> None:
            await read(root, "reuse_7")
            link.answer(STEP, score=score)

        answer = await measured(asker, Ask(7, tmp_path), daemon())
        assert answer.point["metrics"]["eval/a"] == score
        link.lines.clear()


class Carriers:
    """Notes what is carried to another host."""

    def __init__(self, error: Exception | None = None) -> None:
        self.carried: list[tuple[Path, str, str]] = []
        self.error = error
        self.may_go = threading.Event()
        self.may_go.set()

    def __call__(self, root: Path) -> Carrier:
        return _Carrier(self, root)


class _Carrier:
    def __init__(self, carriers: Carriers, root: Path) -> None:
        self._carriers, self._root = carriers, root

    def carry(self, path: Path) -> None:
        self._carriers.may_go.wait(10)
        if self._carriers.error is not None:
            raise self._carriers.error
        content = path.read_text() if path.is_file() else ""
        self._carriers.carried.append((self._root, path.name, content))


def far(carriers: Carriers) -> Hand:
    return functools.partial(hand_over, carriers)


async def test_a_far_host_gets_the_directory_and_for_a_baseline_a_word(
    link: LedgerLink, tmp_path: Path
) -> None:
    carriers = Carriers()
    asker = Requester(link, far(carriers), poll_s=0.01)

    async def daemon(key: PointKey) -> None:
        await until(lambda: carriers.carried)
        link.answer(key)

    directory = tmp_path / "step_7"
    directory.mkdir()
    await measured(asker, Ask(7, directory), daemon(STEP))
    assert carriers.carried == [(tmp_path, "step_7", "")]
    carriers.carried.clear()
    await measured(asker, Ask(-1, directory, Kind.BASELINE), daemon(baseline()))
    ((spool, name, word),) = carriers.carried
    assert (name, json.loads(word)) == (
        "baseline_-1.request",
        {"run": "r", "kind": "baseline", "step": -1},
    )
    assert not spool.exists()


async def test_what_cannot_be_carried_is_skipped_with_its_reason(
    link: LedgerLink, tmp_path: Path
) -> None:
    asker = Requester(link, far(Carriers(NoSpace("the far root is full"))), poll_s=0.01)
    with pytest.raises(NotMeasured, match="the far root is full") as caught:
        await asker.measure(Ask(7, tmp_path), timeout_s=10)
    assert caught.value.reason == "no_space"


async def test_the_deadline_holds_while_a_carrier_is_slow(link: LedgerLink, tmp_path: Path) -> None:
    carriers = Carriers()
    carriers.may_go.clear()
    try:
        with pytest.raises(NotMeasured) as caught:
            await Requester(link, far(carriers)).measure(Ask(7, tmp_path), timeout_s=0.2)
        assert caught.value.reason == "deadline"
    finally:
        carriers.may_go.set()
