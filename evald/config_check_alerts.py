"""What no single field of ``[[alert]]`` and ``[webhook]`` can know."""

from __future__ import annotations

import difflib

from evald.alerts.builtin import BUILTIN
from evald.config import Config
from evald.config_alerts import COMPARING, AlertRule, Webhook
from evald.results.records import is_own_metric

#: field -> the kinds that have it; every kind has those that are not here.
_FIELDS = {
    "metrics": {"drop"},
    "sets": {"truncated", "no_answer"},
    "against": COMPARING,
    "k": COMPARING,
    "at_least": COMPARING,
    "rule": {"drop"},
    "after_s": {"silent"},
    "below_share": {"disk"},
    "below_bytes": {"disk"},
    "where": {"disk"},
    "names": {"builtin"},
}


def check_alerts(config: Config) -> list[str]:
    """Return one sentence for each fault of the rules and the webhook."""
    problems: list[str] = []
    names = [rule.name for rule in config.alert]
    for i, rule in enumerate(config.alert):
        if names.index(rule.name) != i:
            problems.append(f"alert[{i}].name: {rule.name!r} is there twice; rename one")
        if rule.name in BUILTIN:
            problems.append(
                f"alert[{i}].name: {rule.name!r} is an alert of evald's own; choose another name"
            )
        problems += [f"alert[{i}].{sentence}" for sentence in _check_rule(rule, config)]
    if config.webhook is not None:
        problems += _check_webhook(config.webhook)
        if not any(rule.webhook for rule in config.alert):
            problems.append("webhook: no [[alert]] rule tells it anything; add one, or remove it")
    return problems


def _check_rule(rule: AlertRule, config: Config) -> list[str]:
    problems = [
        f"{field}: kind {rule.kind!r} has none; remove it"
        for field, kinds in _FIELDS.items()
        if rule.kind not in kinds and getattr(rule, field) not in (None, [])
    ]
    for field in ("metrics", "sets", "names"):
        values = getattr(rule, field)
        if len(set(values)) < len(values):
            problems.append(f"{field}: one is there twice; name each once")
    match rule.kind:
        case "drop" | "truncated" | "no_answer":
            problems += _check_compared(rule, config)
        case "silent" if rule.after_s is None:
            problems.append("after_s: missing; say how long no point may end")
        case "disk" if rule.below_share is None and rule.below_bytes is None:
            problems.append("below_share: missing; set it, below_bytes, or both")
        case "quarantined" if config.fleet is None:
            problems.append("kind: only engines of a [fleet] come into quarantine; remove the rule")
        case "builtin":
            problems += _check_builtin(rule, config)
    return problems


def _check_compared(rule: AlertRule, config: Config) -> list[str]:
    field = "metrics" if rule.kind == "drop" else "sets"
    if config.blackbox is not None:
        if not getattr(rule, field):
            return [f"{field}: missing; what a black box measures, only you know"]
        return []
    known = [one.name for one in config.eval]
    return [
        f"sets: there is no eval set {name!r}; there are {', '.join(known)}"
        for name in rule.sets
        if name not in known
    ]


def _check_builtin(rule: AlertRule, config: Config) -> list[str]:
    problems = []
    if config.webhook is None or not rule.webhook:
        problems.append(
            "kind: 'builtin' only tells the webhook of what is recorded anyway; add [webhook], or "
            "remove the rule"
        )
    problems += [
        f"names: evald has no alert {name!r}; it has {', '.join(sorted(BUILTIN))}"
        for name in rule.names
        if name not in BUILTIN
    ]
    return problems


def _check_webhook(webhook: Webhook) -> list[str]:
    problems = []
    if (webhook.url_env is None) == (webhook.url_file is None):
        got = "neither" if webhook.url_env is None else "both"
        problems.append(f"webhook: set exactly one of url_env and url_file, got {got}")
    if webhook.token_env is not None and webhook.token_file is not None:
        problems.append("webhook.token_file: token_env is set, too; keep one")
    return problems


def metric_notes(config: Config) -> list[str]:
    """Warn of metrics that no eval set gives: rules would never speak, no snapshot be the best."""
    if config.blackbox is not None:
        return []
    names = [one.name for one in config.eval] + [one.name for one in config.aggregate]
    heads = [f"eval/{name}" for name in names]
    wanted = [
        (f"alert[{i}].metrics", m) for i, rule in enumerate(config.alert) for m in rule.metrics
    ]
    if config.keep_best is not None:
        wanted.append(("keep_best.metric", config.keep_best.metric))
    notes = []
    for key, metric in wanted:
        if any(metric == head or metric.startswith((f"{head}/", f"{head}-")) for head in heads):
            continue
        if is_own_metric(metric.removeprefix("eval/")):
            continue
        near = difflib.get_close_matches(metric, heads, n=1)
        meant = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(heads)}"
        notes.append(f"WARNING: {key}: no eval set or aggregate gives {metric!r}; {meant}")
    return notes
