"""The demo from start to end: prepare, start evald and the trainer, show, judge, clean up.

evald runs as it would on an eval node (``evald run configs/demo.toml``), the trainer as a training
job of its own; the show only watches their files.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass, field

from evald.demo.children import Child, Interruptions, interruptions, stop_all, wait_gone
from evald.demo.layout import DemoError, Layout
from evald.demo.scene import Scene
from evald.demo.screen import Screen, chart_lines, duration, table_lines
from evald.demo.tasks import TASKS, write_eval_sets

EXIT_INTERRUPTED = 130
#: the whole demo; it takes two to five minutes on two cores.
DEADLINE_S = 1800.0
#: evald lets running samples finish and stops its engine within this.
STOP_GRACE_S = 30.0
#: engines whose daemon was killed are killed by their guard.
GONE_TIMEOUT_S = 15.0
_TICK_S = 0.2


class _Interrupted(Exception):
    """Somebody asked the demo to stop."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the command line says."""

    steps: int = 1800
    every: int = 150
    seed: int = 0
    min_mean: float = 0.85
    keep_files: bool = False


@dataclass(frozen=True, kw_only=True)
class Commands:
    """The command lines of the three child processes."""

    base: list[str]
    evald: list[str]
    train: list[str]

    @classmethod
    def of(cls, layout: Layout, options: Options) -> Commands:
        """Return the real ones."""
        python = [sys.executable, "-m"]
        base, seed = ["--base", str(layout.base)], ["--seed", str(options.seed)]
        pace = ["--steps", str(options.steps), "--every", str(options.every)]
        return cls(
            base=[*python, "evald.demo.model", str(layout.base), *seed],
            evald=[*python, "evald", "run", str(layout.config), "--exit-on-run-end"],
            train=[*python, "evald.demo.train", *base, "--root", str(layout.root), *pace, *seed],
        )


@dataclass
class Demo:
    """One run of the demo."""

    layout: Layout
    options: Options
    commands: Commands
    screen: Screen
    interrupts: Interruptions
    lock: int
    started: float = field(default_factory=time.monotonic)
    children: list[Child] = field(default_factory=list)

    def run(self) -> int:
        """Run all of it; return the exit code."""
        options, layout = self.options, self.layout
        self.screen.say("preparing: eval sets and an untrained model")
        layout.prepare()
        write_eval_sets(layout.data)
        self._finish(self._start("base", self.commands.base))
        evald = self._start("evald", self.commands.evald)
        trainer = self._start("train", self.commands.train)
        self.screen.say(
            f"started:   evald run {layout.config} (process {evald.pid}) "
            f"and a trainer (process {trainer.pid})"
        )
        sets = [task.name for task in TASKS]
        scene = Scene(layout, steps=options.steps, every=options.every, sets=sets)
        try:
            self._watch(scene, evald, trainer)
        finally:
            scene.close()
            self._stop(scene)
        return self._judge(scene)

    def _watch(self, scene: Scene, evald: Child, trainer: Child) -> None:
        """Show the scene until both processes have ended well; raises DemoError otherwise."""
        while True:
            ended = [child.poll() for child in (evald, trainer)]
            scene.refresh()
            self.screen.show(scene, self._elapsed_s())
            for child, code in zip((evald, trainer), ended, strict=True):
                if code not in {None, 0}:
                    raise DemoError(child.failure())
            if ended == [0, 0]:
                return
            if ended[0] == 0 and not scene.training.ended:
                raise DemoError(f"evald stopped before the training ended: {evald.failure()}")
            self._tick()

    def _judge(self, scene: Scene) -> int:
        """Print curve, outcomes and where the files are; return the exit code."""
        means = [row.mean for row in scene.rows.values() if row.mean is not None]
        faults = scene.shortfalls(self.options.min_mean)
        climb = f"; the mean went from {means[0]:.3f} to {means[-1]:.3f}" if means else ""
        self.screen.say(
            "",
            *chart_lines(scene, unicode=self.screen.unicode),
            "",
            *table_lines(scene),
            "",
            f"{len(scene.published)} snapshots, {len(scene.points)} points ended{climb}",
            f"wall time {duration(self._elapsed_s())}",
            f"ledger    {self.layout.ledger}",
            f"samples   {self.layout.samples}",
            f"logs      {self.layout.log('evald')}, {self.layout.log('train')}",
            *(f"fell short: {fault}" for fault in faults),
        )
        return 1 if faults else 0

    def _start(self, name: str, command: list[str]) -> Child:
        quiet = {
            # one core for the trainer, one for evald's engine
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONUNBUFFERED": "1",
        }
        child = Child(
            name,
            command,
            log=self.layout.log(name),
            env={**os.environ, **quiet, **self.layout.environment()},
            lock=self.lock,
        )
        self.children.append(child)
        return child

    def _finish(self, child: Child) -> None:
        """Wait for a child that must end well before the next thing starts."""
        while (code := child.poll()) is None:
            self._tick()
        if code != 0:
            raise DemoError(child.failure())

    def _tick(self) -> None:
        time.sleep(_TICK_S)
        if self.interrupts.count:
            raise _Interrupted
        if self._elapsed_s() > DEADLINE_S:
            raise DemoError(f"the demo did not end within {duration(DEADLINE_S)}")

    def _elapsed_s(self) -> float:
        return time.monotonic() - self.started

    def stop_children(self) -> list[str]:
        """Stop what still runs; a second signal cuts the grace short."""
        seen = self.interrupts.count
        return stop_all(
            self.children, grace_s=STOP_GRACE_S, hurry=lambda: self.interrupts.count > max(seen, 1)
        )

    def _stop(self, scene: Scene) -> None:
        """Stop the children and see to it that the engines are gone, too."""
        for name in self.stop_children():
            self.screen.say(f"{name} did not stop within {STOP_GRACE_S:g} s and was killed")
        engines = scene.status.engines if scene.status is not None else []
        left = wait_gone([e.pid for e in engines if e.pid is not None], GONE_TIMEOUT_S)
        if left:
            raise DemoError(f"engine processes are still there: {', '.join(map(str, left))}")


def show(options: Options, layout: Layout | None = None, commands: Commands | None = None) -> int:
    """Run the demo; return its exit code: 0 when all went as promised, 130 when interrupted.

    ``layout`` and ``commands`` default to this checkout's. Raises DemoError when the demo cannot
    start, or when a process of it fails.
    """
    layout = layout or Layout.find()
    commands = commands or Commands.of(layout, options)
    screen = Screen()
    with interruptions() as interrupts, layout.locked() as lock:
        demo = Demo(layout, options, commands, screen, interrupts, lock)
        try:
            return demo.run()
        except _Interrupted:
            demo.stop_children()
            screen.say("interrupted: all processes of the demo have been stopped")
            return EXIT_INTERRUPTED
        except BrokenPipeError:  # nobody reads the output any more
            return EXIT_INTERRUPTED
        finally:
            demo.stop_children()
            if not options.keep_files:
                layout.remove_models()
