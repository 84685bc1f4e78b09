"""A reload: what is taken over, what needs a restart, and what changes nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from evald import reload as reload_module
from evald.config import Config
from evald.config_load import load_config
from evald.errors import EvaldError
from evald.evals.ready_sets import ready_sets
from evald.evals.sets import LoadedSet
from evald.point import Kind, Outcome
from evald.prompt_check import Job
from evald.reload import Reload, differences
from evald.results.index import PointIndex
from evald.results.modes import Modes
from evald.results.records import PointRecord

_CONFIG = """
run = "r"
[staging]
root = "root"
[results]
dir = "results"
[fleet]
model = "model"
device = "cpu"
"""


class Node:
    """A config file, and what a daemon would have made of it."""

    def __init__(self, work: Path) -> None:
        self.work = work
        self.path = work / "node.toml"
        self.used: list[tuple[Config, list[LoadedSet]]] = []
        self.announced = 0
        self.index = PointIndex()
        self.rows("a", ["1", "2"])
        self.write(self.set("a"))
        config = load_config(self.path, environ={})
        sets, problems = ready_sets(
            config.eval, environ={}, data_dir=work / "data", keep_data=True, modes=Modes()
        )
        assert not problems
        self.reload = Reload(
            config,
            sets,
            read=lambda: load_config(self.path, environ={}),
            use=self.use,
            announced=self.announce,
            index=self.index,
            environ={},
            context_len=None,
        )

    async def use(self, config: Config, sets: list[LoadedSet]) -> None:
        self.used.append((config, sets))

    @contextlib.contextmanager
    def announce(self) -> Iterator[None]:
        self.announced += 1
        yield

    def rows(self, name: str, labels: list[str]) -> None:
        lines = [json.dumps({"prompt": f"{i}?", "label": x}) for i, x in enumerate(labels)]
        (self.work / f"{name}.jsonl").write_text("\n".join(lines))

    def set(self, name: str, more: str = "") -> str:
        return f'[[eval]]\nname = "{name}"\npath = "{name}.jsonl"\n{more}\n'

    def write(self, sets: str, config: str = _CONFIG) -> None:
        self.path.write_text(config + sets)

    @property
    def names(self) -> list[str]:
        return [one.name for one in self.used[-1][1]]


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    async def no_prompts(job: Job) -> list[str]:
        assert job.sets
        return []

    monkeypatch.setattr(reload_module, "check_prompts_apart", no_prompts)
    return Node(tmp_path)


async def test_the_same_again_changes_nothing(node: Node) -> None:
    assert await node.reload() == "nothing has changed"
    assert (node.used, node.announced) == ([], 1)


async def test_sets_come_go_and_change(node: Node) -> None:
    node.rows("b", ["1"])
    node.write(node.set("a", "temperature = 0.5") + node.set("b"))
    said = await node.reload()
    assert said == "changed: eval set 'b' is new, eval set 'a' has other settings"
    assert node.names == ["a", "b"]
    assert node.used[-1][0].eval[0].temperature == 0.5
    node.write(node.set("b"))
    assert await node.reload() == "changed: eval set 'a' is gone"
    assert node.names == ["b"]


async def test_data_and_graders_are_read_again_though_the_config_is_the_same(node: Node) -> None:
    before = node.path.read_bytes()
    node.rows("a", ["1", "3"])
    assert await node.reload() == "changed: eval set 'a' has other data"
    assert node.path.read_bytes() == before
    grader = node.work / "mine.py"
    more = 'grader = "python"\n[eval.grader_config]\nfunction = "mine:score"'
    grader.write_text("def score(response, reference, metadata):\n    return 0\n")
    node.write(node.set("a", more))
    assert "grader" in await node.reload()
    grader.write_text("def score(response, reference, metadata):\n    return 1\n")
    assert await node.reload() == "changed: eval set 'a' has other grader"


async def test_what_no_score_depends_on_is_taken_over_too(node: Node) -> None:
    node.write(node.set("a", "set_deadline_s = 900.0"))
    said = await node.reload()
    assert said == "changed: eval set 'a' has other settings that no score depends on"
    assert node.used[-1][1][0].eval_set.set_deadline_s == 900.0


async def test_the_rest_is_named_and_not_applied(node: Node) -> None:
    other = _CONFIG.replace('"cpu"', '"cpu"\nengines = 4').replace('"results"', '"elsewhere"')
    node.write(node.set("a"), 'log_level = "debug"\n' + other)
    said = await node.reload()
    assert said == "changed: log_level; needs a restart: results.dir, fleet.engines"
    assert node.reload.fault == "needs a restart: results.dir, fleet.engines"
    config, _ = node.used[-1]
    assert config.log_level == "debug"
    assert config.results.dir == str(node.work / "results")
    assert config.fleet is not None
    assert config.fleet.engines == 1
    node.write(node.set("a"))
    assert await node.reload() == "changed: log_level"
    assert node.reload.fault == ""


@pytest.mark.parametrize(
    ("config", "sets", "why"),
    [
        ("run = ", "", "cannot parse config"),
        (_CONFIG, '[[eval]]\nname = "a"\npath = "gone.jsonl"\n', "gone.jsonl: No such file"),
        (_CONFIG, '[[eval]]\nname = "a"\npath = "a.jsonl"\ntemperatur = 1\n', "'temperature'"),
        (_CONFIG.replace("[results]", "[result]"), "", "results: missing"),
    ],
)
async def test_a_bad_config_changes_nothing_and_stays_in_the_status(
    node: Node, config: str, sets: str, why: str
) -> None:
    node.write(sets, config)
    with capture_logs() as logs, pytest.raises(EvaldError) as caught:
        await node.reload()
    assert why in str(caught.value)
    assert node.reload.fault == str(caught.value)
    assert node.reload.fault.startswith("cannot reload the config, the old one stays: ")
    assert node.used == []
    assert "\n" not in node.reload.fault
    assert [one["event"] for one in logs] == ["config_not_reloaded"]
    node.write(node.set("a"))
    assert await node.reload() == "nothing has changed"
    assert node.reload.fault == ""


async def test_what_is_new_must_fit_what_stays(node: Node) -> None:
    """A set that would fit the file's own deadline, but not the one that the daemon has."""
    longer = _CONFIG + "[dispatch]\npoint_deadline_s = 90000.0\n"
    node.write(node.set("a", "set_deadline_s = 80000.0"), longer)
    with pytest.raises(EvaldError, match="set_deadline_s"):
        await node.reload()


@pytest.mark.parametrize("refuses", [False, True])
async def test_a_changed_set_breaks_the_curve_or_is_refused(node: Node, *, refuses: bool) -> None:
    if refuses:
        node.write(node.set("a"), _CONFIG + '[dispatch]\non_set_change = "refuse"\n')
        node.reload._config = load_config(node.path, environ={})
    node.index.apply(measured(node.reload._sets))
    node.rows("a", ["1", "3"])
    with capture_logs() as logs:
        if refuses:
            with pytest.raises(EvaldError, match=r"until step 5: other data; restore it"):
                await node.reload()
            assert node.used == []
        else:
            await node.reload()
            assert "curve_breaks" in [one["event"] for one in logs]


def measured(sets: list[LoadedSet]) -> PointRecord:
    """The record of a point that was measured with these sets."""
    return PointRecord(
        seq=1,
        run="r",
        step=5,
        record_id="r/step/5.r0",
        kind=Kind.STEP,
        outcome=Outcome.OK,
        provenance={
            "sets": {
                one.name: {
                    "config": one.config_digest,
                    "data": one.data_digest,
                    "settings": one.settings_digest,
                    "grader_version": one.grader_version,
                }
                for one in sets
            }
        },
    )


async def test_a_signal_in_the_middle_of_a_reload_means_one_more(node: Node) -> None:
    task = asyncio.create_task(node.reload.run())
    node.write("broken")
    node.reload.ask()
    async with asyncio.timeout(30):
        while not node.reload.fault:
            await asyncio.sleep(0.01)
        node.write(node.set("a"))
        node.reload.ask()
        while node.reload.fault:
            await asyncio.sleep(0.01)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def test_differences_name_keys_and_show_no_values() -> None:
    old = {"a": 1, "b": {"token": "x", "same": 2}, "c": [{"d": 1}]}
    new = {"a": 1, "b": {"token": "y", "same": 2}, "c": [{"d": 2}], "e": None}
    assert differences(old, new) == ["b.token", "c"]
