"""``evald tail RESULTS --to wandb|tensorboard|jsonl``: results delivered where people look."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from evald.results.sinks.contract import Sink
    from evald.results.sinks.tables import SampleTables

SINKS = ("wandb", "tensorboard", "jsonl")
PATIENCE_S = 3600.0
ONCE_PATIENCE_S = 60.0


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of deliveries."""
    group = parser.add_argument_group(
        "delivery", "each value once, at its own step; the next call goes on where this one stopped"
    )
    group.add_argument("--to", choices=SINKS, help="deliver there instead of printing")
    group.add_argument(
        "--dir",
        type=Path,
        default=None,
        metavar="DIR",
        help="where wandb/, the event files (DIR/RUN/) or DIR/RUN.jsonl are; default: where you "
        "are (wandb), runs/ (tensorboard), rows/ (jsonl)",
    )
    group.add_argument(
        "--run",
        dest="run_id",
        metavar="RUN",
        help="only this run of evald; default: all, each into its own",
    )
    group.add_argument(
        "--samples",
        type=_count,
        default=0,
        metavar="N",
        help="also tables of N samples of each set, and of the N that changed most since the "
        "point before (wandb, tensorboard)",
    )
    wandb = parser.add_argument_group("W&B", "what is left out comes from W&B's own settings")
    wandb.add_argument("--project", metavar="NAME")
    wandb.add_argument("--entity", metavar="NAME")
    wandb.add_argument(
        "--group", metavar="NAME", help="the trainer's group; default: the run id of evald"
    )
    wandb.add_argument("--id", metavar="ID", help="of the W&B run; default: RUN-eval; wants --run")
    wandb.add_argument("--name", metavar="NAME", help="of the W&B run; default: its id")
    wandb.add_argument("--mode", choices=("online", "offline"))


def check(parser_error: Callable[[str], object], args: argparse.Namespace) -> None:
    """Refuse options that do not go together."""
    of_wandb = ("project", "entity", "group", "id", "name", "mode")
    used = [f"--{name}" for name in of_wandb if getattr(args, name) is not None]
    if args.to is None:
        given = {"--dir": args.dir, "--run": args.run_id, "--samples": args.samples}
        used += [name for name, value in given.items() if value]
        if used:
            parser_error(f"{used[0]} wants --to")
    elif used and args.to != "wandb":
        parser_error(f"{used[0]} wants --to wandb")
    elif args.samples and args.to == "jsonl":
        parser_error("--samples does not go with --to jsonl: samples/ has them as JSON lines")
    elif (args.id or args.name) and args.run_id is None:
        parser_error("--id and --name want --run: each run of evald has a W&B run of its own")
    elif args.after:
        parser_error("--after does not go with --to: it knows where it stopped")


def run(args: argparse.Namespace) -> int:
    """Deliver until a signal tells to end (0); with --once what is there now."""
    from evald.log import configure_logging
    from evald.results.sinks.delivery import Delivery
    from evald.results.sinks.source import FileSource, open_source

    configure_logging("warning")  # this output is for a person
    source = open_source(args.results, token_file=args.token_file)
    make = _maker(args)
    if isinstance(source, FileSource) and not Path(source.name).exists():
        _say(f"{source.name} does not exist yet")
    with _stopped_by_signals() as stop:
        delivery = Delivery(
            source,
            make,
            run=args.run_id,
            say=_say,
            stop=stop,
            patience_s=ONCE_PATIENCE_S if args.once else PATIENCE_S,
        )
        try:
            delivery.run(once=args.once)
        finally:
            source.close()
            _say(f"{delivery.n_rows} row{'' if delivery.n_rows == 1 else 's'} delivered")
    return 0


def _maker(args: argparse.Namespace) -> Callable[[str], Sink]:
    """Return what makes the sink of a run; raises EvaldError where the extra is missing."""
    tables = _tables(args)
    if args.to == "wandb":
        from evald.results.sinks.wandb import WandbOptions, WandbSink, import_wandb

        options = WandbOptions(
            **{
                name: getattr(args, name)
                for name in ("project", "entity", "group", "id", "name", "mode")
            }
        )
        module = import_wandb()
        directory = args.dir or Path()
        return lambda run: WandbSink(directory, run, options, module=module, tables=tables)
    if args.to == "tensorboard":
        from evald.results.sinks.tensorboard import EventFormat, TensorBoardSink

        events = EventFormat()
        directory = args.dir or Path("runs")
        return lambda run: TensorBoardSink(directory, run, events, tables=tables)
    from evald.results.sinks.jsonl import JsonlSink

    directory = args.dir or Path("rows")
    return lambda run: JsonlSink(directory, run)


def _tables(args: argparse.Namespace) -> SampleTables | None:
    if not args.samples:
        return None
    from evald.results.sinks.stored import open_stored
    from evald.results.sinks.tables import SampleTables

    return SampleTables(open_stored(args.results, token_file=args.token_file), args.samples)


@contextlib.contextmanager
def _stopped_by_signals() -> Iterator[threading.Event]:
    """Set an event on the first SIGTERM or SIGINT; a second one does what it always does."""
    stop = threading.Event()
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.getsignal(number) for number in numbers}

    def on_signal(number: int, _frame: object) -> None:
        stop.set()
        signal.signal(number, before[signal.Signals(number)])

    try:
        for number in numbers:
            signal.signal(number, on_signal)
        yield stop
    finally:
        for number in numbers:
            signal.signal(number, before[number])


def _say(sentence: str) -> None:
    print(f"evald: {sentence}", file=sys.stderr)


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number
