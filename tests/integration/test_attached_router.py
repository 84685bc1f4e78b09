"""A router in front of attached servers: requests go through it, pins to the workers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from fleet_rig import texts
from pool_rig import KEY, ask, attached, hosts, running, snapshot, states, until, urls

from evald.errors import Unhealthy
from evald.testing import FakeRouter, Fault, serve_fake

pytestmark = pytest.mark.usefixtures("quick_engines")


async def test_router_gets_the_requests_and_the_workers_the_pins(base: Path) -> None:
    async with hosts(base, 2, api_key=KEY) as servers:
        router = FakeRouter(urls(servers), api_key=KEY)
        served = await serve_fake(router)
        engines = attached(base, servers, router=served.url, api_key_env="KEY")
        async with running(engines):
            servers[1].fake.script("/model_info", *[Fault.BUSY] * 5)
            pin = await engines.pin(snapshot(base, 1))
            assert len(pin.weight_versions) == 2  # all of them, before the first request
            answers = [a for _ in range(4) for a in await ask(engines, pin)]
            assert texts(answers) == [r"\boxed{1}"] * 4
            # by its version an answer tells which worker it came from
            assert {a.engine for a in answers} == set(pin.weight_versions)
            asked = [rid for rid in router.rids if rid.startswith("q")]
            assert len(asked) == 4
            reached = [rid for host in servers for rid in host.fake.rids if rid.startswith("q")]
            assert sorted(reached) == sorted(asked)
            assert engines.capacity(pin) > 1
            await engines.unpin(pin)
            second = await engines.pin(snapshot(base, 2))
            assert texts(await ask(engines, second)) == [r"\boxed{2}"]
        await served.process.stop(0.0)


async def test_people_see_the_load_of_each_worker(base: Path) -> None:
    async with hosts(base, 2) as servers:
        router = FakeRouter(urls(servers))
        served = await serve_fake(router)
        engines = attached(base, servers, router=served.url)
        async with running(engines):
            pin = await engines.pin(snapshot(base, 1))
            for server in servers:
                server.fake.delay_s = 20.0
            asking = [asyncio.create_task(ask(engines, pin, timeout_s=60.0)) for _ in range(4)]
            await until(lambda: all(view.kv_use for view in engines.engines()))
            assert [view.waiting for view in engines.engines()] == [0, 0]
            for task in asking:
                task.cancel()
            await asyncio.wait(asking)
        await served.process.stop(0.0)


async def test_router_is_probed_after_a_loss_before_requests_go_on(base: Path) -> None:
    async with hosts(base, 2) as servers:
        router = FakeRouter(urls(servers), closed_s=0.5)
        served = await serve_fake(router)
        engines = attached(base, servers, router=served.url, probe_interval_s=0.1, probe_failures=1)
        async with running(engines):
            pin = await engines.pin(snapshot(base, 1))
            before = len(router.rids)
            servers[0].die()
            await until(lambda: "serving" in states(engines) and len(set(states(engines))) == 2)
            assert texts(await ask(engines, pin)) == [r"\boxed{1}"]
            assert router.rids[before].startswith("route/")
            await servers[0].start()  # comes back: it is pinned again, under a new label
            await until(lambda: states(engines) == ["serving"] * 2)
            router.workers = urls(servers)
            answers = [a for _ in range(4) for a in await ask(engines, pin)]
            assert texts(answers) == [r"\boxed{1}"] * 4
            assert {a.engine for a in answers} == set(pin.weight_versions)
        await served.process.stop(0.0)


async def test_frozen_worker_behind_the_router_does_not_hold_requests(base: Path) -> None:
    async with hosts(base, 2) as servers:
        router = FakeRouter(urls(servers))
        served = await serve_fake(router)
        engines = attached(
            base,
            servers,
            router=served.url,
            probe_interval_s=0.1,
            probe_timeout_s=0.2,
            probe_failures=2,
        )
        async with running(engines):
            pin = await engines.pin(snapshot(base, 1))
            servers[0].fake.freeze()
            asking = [asyncio.create_task(ask(engines, pin, timeout_s=60.0)) for _ in range(4)]
            await until(lambda: states(engines)[0] != "serving")
            router.workers = [servers[1].url]
            async with asyncio.timeout(5.0):
                answers = [a for group in await asyncio.gather(*asking) for a in group]
            assert texts(answers) == [r"\boxed{1}"] * 4
        await served.process.stop(0.0)


async def test_router_that_answers_nothing_is_given_up(base: Path) -> None:
    async with hosts(base) as servers:
        router = FakeRouter([])
        served = await serve_fake(router)
        engines = attached(base, servers, router=served.url, route_timeout_s=0.4)
        async with running(engines):
            with pytest.raises(Unhealthy, match=r"did not answer .* within 0\.4 s; .*HTTP 503"):
                await engines.pin(snapshot(base, 1))
            router.workers = urls(servers)
            pin = await engines.pin(snapshot(base, 1))
            assert texts(await ask(engines, pin)) == [r"\boxed{1}"]
        await served.process.stop(0.0)


async def test_worker_behind_the_router_with_other_weights_is_pinned_again(base: Path) -> None:
    async with hosts(base, 2) as servers:
        router = FakeRouter(urls(servers))
        served = await serve_fake(router)
        engines = attached(base, servers, router=served.url)
        async with running(engines):
            pin = await engines.pin(snapshot(base, 1))
            servers[0].fake.weight_version = "somebody-else"
            answers = [a for _ in range(6) for a in await ask(engines, pin)]
            assert texts(answers) == [r"\boxed{1}"] * 6
            await until(lambda: len(servers[0].fake.updates) == 2)
            assert len(servers[1].fake.updates) == 1
        await served.process.stop(0.0)


async def test_unlisted_worker_behind_the_router_never_counts(
    base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with hosts(base, 2) as servers:
        router = FakeRouter([servers[0].url])
        served = await serve_fake(router)
        engines = attached(base, servers[:1], router=served.url)
        async with running(engines):
            pin = await engines.pin(snapshot(base, 1))
            router.workers = urls(servers)
            answers = [a for _ in range(4) for a in await ask(engines, pin)]
            assert texts(answers) == [r"\boxed{1}"] * 4
            await asyncio.sleep(0.1)
            assert len(servers[0].fake.updates) == 1  # it was not at fault
        await served.process.stop(0.0)
    assert "list every worker of the router" in capsys.readouterr().out


async def test_router_needs_all_of_its_workers(base: Path) -> None:
    async with hosts(base, 2) as servers:
        servers[1].die()
        router = FakeRouter(urls(servers))
        served = await serve_fake(router)
        engines = attached(base, servers, router=served.url, alive_timeout_s=0.5)
        async with running(engines):
            with pytest.raises(Unhealthy, match=r"not every engine was alive for 0\.5 s"):
                await engines.pin(snapshot(base, 1))
        await served.process.stop(0.0)
