"""The attached posture against fake servers: pinned or verified, never stopped, waited for."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import msgspec
import pytest
import structlog
from fleet_rig import texts
from pool_rig import KEY, ask, attached, hosts, running, snapshot, states, until, urls

from evald.config import Attached
from evald.errors import ConfigError, EvaldError, PinViolation, Unhealthy, VersionChanged
from evald.postures.attached import attached_engines
from evald.testing import Fault

UPDATE = "/update_weights_from_disk"


pytestmark = pytest.mark.usefixtures("quick_engines")


async def test_pins_and_verifies_like_the_fleet_and_leaves_the_servers_running(base: Path) -> None:
    async with hosts(base, 2) as servers:
        engines = attached(base, servers)
        async with running(engines):
            for step in (1, 2, 1):
                pin = await engines.pin(snapshot(base, step))
                await until(lambda: len(pin.weight_versions) == 2)  # noqa: B023 (awaited here)
                answers = [a for _ in range(4) for a in await ask(engines, pin, samples=2)]
                assert set(texts(answers)) == {rf"\boxed{{{step}}}"}
                assert {a.weight_version for a in answers} <= set(pin.weight_versions.values())
                await engines.confirm(pin)
                await engines.unpin(pin)
            assert set(pin.weight_versions) == {url.partition("//")[2] for url in urls(servers)}
        assert states(engines) == ["stopped", "stopped"]
        assert all(host.alive for host in servers)
        assert [len(host.fake.updates) for host in servers] == [3, 3]


async def test_tainted_server_is_attached_and_pinned_again_not_killed(base: Path) -> None:
    async with hosts(base) as servers:
        engines = attached(base, servers)
        async with running(engines):
            servers[0].fake.script(UPDATE, Fault.REJECT)
            pin = await engines.pin(snapshot(base, 1))
            assert texts(await ask(engines, pin)) == [r"\boxed{1}"]
        assert len(servers[0].fake.updates) == 1  # the one before was refused: no second server
        assert servers[0].alive


async def test_snapshot_that_no_server_takes_is_blamed(base: Path) -> None:
    async with hosts(base) as servers:
        engines = attached(base, servers)
        async with running(engines):
            servers[0].fake.script(UPDATE, Fault.REJECT, Fault.REJECT)
            with pytest.raises(PinViolation, match=r"2 attempts failed .* while the server ans"):
                await engines.pin(snapshot(base, 1))
            pin = await engines.pin(snapshot(base, 2))
            assert texts(await ask(engines, pin)) == [r"\boxed{2}"]


async def test_foreign_weights_are_got_rid_of_by_another_pin(base: Path) -> None:
    async with hosts(base) as servers:
        engines = attached(base, servers)
        async with running(engines):
            pin = await engines.pin(snapshot(base, 1))
            servers[0].fake.weight_version = "somebody-else"
            assert texts(await ask(engines, pin)) == [r"\boxed{1}"]
            assert len(servers[0].fake.updates) == 2
            assert servers[0].alive


async def test_lost_server_is_waited_for_and_pinned_again(base: Path) -> None:
    async with hosts(base) as servers:
        engines = attached(base, servers, probe_interval_s=0.1, probe_failures=1)
        async with running(engines):
            pin = await engines.pin(snapshot(base, 1))
            servers[0].die()
            asking = asyncio.create_task(ask(engines, pin, samples=2))
            await until(lambda: states(engines) != ["serving"])
            await servers[0].start()
            assert texts(await asking) == [r"\boxed{1}"] * 2
            assert len(set(pin.weight_versions.values())) == 1


async def test_servers_that_stay_away_make_the_point_unhealthy(base: Path) -> None:
    async with hosts(base) as servers:
        servers[0].die()
        engines = attached(base, servers, alive_timeout_s=0.3)
        async with running(engines) as task:
            with pytest.raises(Unhealthy, match=r"no engine was alive for 0\.3 s"):
                await engines.pin(snapshot(base, 1))
            await asyncio.sleep(0.5)
            assert not task.done()  # looked for as long as evald runs
            await servers[0].start()
            pin = await engines.pin(snapshot(base, 1))
            assert texts(await ask(engines, pin)) == [r"\boxed{1}"]


async def test_requests_of_others_are_not_aborted_by_a_drain(base: Path) -> None:
    async with hosts(base) as servers:
        engines = attached(base, servers, drain_timeout_s=0.1)
        async with running(engines):
            pin = await engines.pin(snapshot(base, 1))
            fake = servers[0].fake
            fake.delay_s = 30.0
            own = asyncio.create_task(ask(engines, pin))
            await until(lambda: bool(fake._running))
            [rid] = fake._running
            fake._running["rollout-1"] = asyncio.Event()  # somebody else's
            await engines.unpin(pin)
            second = asyncio.create_task(engines.pin(snapshot(base, 2)))
            await until(lambda: bool(fake.aborted))
            assert fake.aborted == [rid]
            await asyncio.sleep(0.1)
            assert fake.aborted == [rid]
            del fake._running["rollout-1"]
            async with fake._idle:
                fake._idle.notify_all()
            fake.delay_s = 0.0
            assert texts(await ask(engines, await second)) == [r"\boxed{2}"]
            with pytest.raises(EvaldError):
                await own


async def test_key_from_the_environment_or_a_file_reaches_the_server_and_no_log(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    structlog.reset_defaults()
    logging.getLogger().setLevel(logging.DEBUG)
    file = tmp_path / "key"
    file.write_text(KEY + "\n")
    async with hosts(base, api_key=KEY) as servers:
        for where in ({"api_key_env": "KEY"}, {"api_key_file": str(file)}):
            engines = attached(base, servers, **where)
            file.write_text("read once" if "api_key_file" in where else KEY)
            async with running(engines):
                pin = await engines.pin(snapshot(base, 1))
                assert texts(await ask(engines, pin)) == [r"\boxed{1}"]
        wrong = attached(base, servers, alive_timeout_s=0.3)
        async with running(wrong):
            with pytest.raises(Unhealthy, match="is the API key right"):
                await wrong.pin(snapshot(base, 1))
    seen = capsys.readouterr()
    assert KEY not in seen.out + seen.err
    assert "engine_pinned" in seen.out


@pytest.mark.parametrize(
    ("where", "sentence"),
    [
        ({"api_key_env": "NOT_THERE"}, "environment variable NOT_THERE is not set"),
        ({"api_key_file": "/not/there"}, "cannot read /not/there"),
        ({"api_key_file": "/dev/null"}, "/dev/null is empty"),
    ],
)
def test_missing_key_is_a_config_error(base: Path, where: dict[str, str], sentence: str) -> None:
    table = {"model": str(base), "urls": ["http://localhost:1"]} | where
    config = msgspec.convert(table, Attached)
    with pytest.raises(ConfigError, match=sentence):
        attached_engines(config, environ={})


async def test_path_map_applies_to_what_the_server_is_told(base: Path, tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.symlink_to(tmp_path)
    async with hosts(base) as servers:
        engines = attached(base, servers, path_map={str(tmp_path): str(there)})
        async with running(engines):
            pin = await engines.pin(snapshot(base, 1))
            assert texts(await ask(engines, pin)) == [r"\boxed{1}"]
        assert servers[0].fake.updates[0]["model_path"] == str(there / "step_1")


async def test_operator_verbs_are_refused_with_the_names(base: Path) -> None:
    async with hosts(base) as servers:
        engines = attached(base, servers)
        name = servers[0].url.partition("//")[2]
        async with running(engines):
            with pytest.raises(EvaldError, match="evald did not start it"):
                await engines.restart(name)
            with pytest.raises(EvaldError, match="not in quarantine"):
                await engines.release(name)
            with pytest.raises(EvaldError, match=f"there are {name}"):
                await engines.restart("engine-7")


# --- pin = false --------------------------------------------------------------------------------


async def test_verify_only_waits_until_the_version_has_come(base: Path) -> None:
    async with hosts(base, 2) as servers:
        engines = attached(base, servers, pin=False)
        async with running(engines):
            await asyncio.sleep(0.1)
            assert all(host.fake.requests == [] for host in servers)  # nothing while idle
            pinning = asyncio.create_task(engines.pin(snapshot(base, 7)))
            await asyncio.sleep(0.3)
            assert not pinning.done()
            servers[1].fake.weight_version = "7"
            pin = await pinning
            answers = await ask(engines, pin, samples=2)
            assert {a.weight_version for a in answers} == {"7"}
            assert {a.engine for a in answers} == {servers[1].url.partition("//")[2]}
            await engines.confirm(pin)
            servers[0].fake.weight_version = "7"
            await until(lambda: len(pin.weight_versions) == 2)
            await engines.unpin(pin)
            # the next point: what is there is not what is wanted
            named = msgspec.structs.replace(snapshot(base, 8), weight_version="eight")
            pinning = asyncio.create_task(engines.pin(named))
            await asyncio.sleep(0.1)
            for host in servers:
                host.fake.weight_version = "eight"
            await engines.unpin(await pinning)
            assert all(host.fake.updates == [] for host in servers)


async def test_verify_only_gives_up_at_its_deadline(base: Path) -> None:
    async with hosts(base, weight_version="6") as servers:
        engines = attached(base, servers, pin=False, alive_timeout_s=0.5)
        async with running(engines):
            with pytest.raises(
                PinViolation, match=r"cannot verify weight version '7': after 0\.5 s .*: '6'"
            ):
                await engines.pin(snapshot(base, 7))


async def test_verify_only_notices_other_weights_in_an_answer_and_at_the_end(base: Path) -> None:
    async with hosts(base, weight_version="7") as servers:
        engines = attached(base, servers, pin=False)
        async with running(engines):
            pin = await engines.pin(snapshot(base, 7))
            await ask(engines, pin)
            servers[0].fake.weight_version = "8"
            with pytest.raises(VersionChanged, match="after the last answer"):
                await engines.confirm(pin)
            with pytest.raises(VersionChanged, match=r"came from weights \['8'\]"):
                await ask(engines, pin)
            with pytest.raises(VersionChanged, match="came from weights"):
                await ask(engines, pin)  # the point is over
            await engines.unpin(pin)


async def test_verify_only_waits_for_a_server_that_answers_nothing(base: Path) -> None:
    async with hosts(base, weight_version="7") as servers:
        engines = attached(base, servers, pin=False)
        async with running(engines):
            # the first look finds the server, the second one fails
            servers[0].fake.script("/server_info", Fault.BUSY)
            pinning = asyncio.create_task(engines.pin(snapshot(base, 7)))
            await until(lambda: "/server_info" in servers[0].fake.requests)
            servers[0].fake.script("/model_info", Fault.FAIL)
            pin = await pinning
            assert texts(await ask(engines, pin)) == [r"\boxed{0}"]
            await engines.unpin(pin)


async def test_verify_only_confirms_without_a_server_that_was_lost(base: Path) -> None:
    async with hosts(base, 2, weight_version="7") as servers:
        engines = attached(base, servers, pin=False, probe_interval_s=0.05, probe_failures=1)
        async with running(engines):
            pin = await engines.pin(snapshot(base, 7))
            await until(lambda: len(pin.weight_versions) == 2)
            await ask(engines, pin)
            servers[1].die()
            await engines.confirm(pin)  # seen dead or not yet: its answers have been checked
            await until(lambda: states(engines)[1] == "starting")
            await servers[1].start(weight_version="6")
            await asyncio.sleep(0.3)
            await engines.confirm(pin)  # it serves no request of the point
            await engines.unpin(pin)
