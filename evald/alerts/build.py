"""From the config's ``[[alert]]`` and ``[webhook]`` to what watches."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from evald.alerts.alerts import Alerts, Ledger
from evald.alerts.comparing import Comparing, Watched
from evald.alerts.verdict import Rule
from evald.alerts.watching import Disk, Quarantined, Silent
from evald.alerts.webhook import Poster, webhook_target
from evald.config import AlertRule, Config
from evald.status.view import StatusView

_SHARES = {"truncated": "-truncated_ratio", "no_answer": "/no_answer_ratio"}


def build_alerts(
    config: Config, environ: Mapping[str, str], *, ledger: Ledger, view: Callable[[], StatusView]
) -> Alerts:
    """Make all of it; raises ConfigError when a secret of the webhook is not there."""
    webhook = config.webhook
    poster = None if webhook is None else Poster(webhook, webhook_target(webhook, environ))
    return Alerts(build_rules(config), run=config.run, ledger=ledger, view=view, poster=poster)


def build_rules(config: Config) -> list[Rule]:
    """Make the rules of a config."""
    return [_build(rule, config) for rule in config.alert]


def _build(rule: AlertRule, config: Config) -> Rule:
    match rule.kind:
        case "drop":
            return Comparing(rule, _scores(rule, config))
        case "truncated" | "no_answer":
            return Comparing(rule, _shares(rule, config))
        case "silent":
            return Silent(rule)
        case "quarantined":
            return Quarantined(rule)
        case "disk":
            return Disk(rule)
        case "builtin":
            return Rule(rule)  # it finds nothing: what it is about is in the ledger already


def _scores(rule: AlertRule, config: Config) -> list[Watched]:
    heads = {f"eval/{one.name}": [one.name] for one in config.eval}
    heads |= {f"eval/{one.name}": one.sets for one in config.aggregate}
    perplexities = {one.name for one in config.eval if one.kind == "perplexity"}
    watched = []
    for metric in rule.metrics or list(heads):
        # "eval/aime-pass@4" is made of what "eval/aime" is made of
        of = [
            head for head in heads if metric == head or metric.startswith((f"{head}/", f"{head}-"))
        ]
        sets = heads[max(of, key=len)] if of else []
        lower = bool(sets) and perplexities.issuperset(sets)
        best = rule.rule or ("min" if lower else "max")
        watched.append(Watched(metric=metric, sign=1 if best == "min" else -1, sets=sets))
    return watched


def _shares(rule: AlertRule, config: Config) -> list[Watched]:
    each = {one.name: one.n_samples_per_eval_prompt for one in config.eval}
    return [
        Watched(
            metric=f"eval/{name}{_SHARES[rule.kind]}",
            sign=1,
            sets=[name],
            samples_each=each.get(name, 1),
        )
        for name in rule.sets or list(each)
    ]
