"""What no single field of the config can know: the fields checked against each other."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from evald.config import Attached, BlackBox, Config, EvalSet, Fleet, Inherit, Shared
from evald.config_check_alerts import check_alerts
from evald.results.records import is_own_metric


def cross_check(config: Config, places: list[str]) -> list[str]:
    """Check what no single field can know; one sentence for each fault.

    ``places`` says where each eval set stands, such as "eval[0]".
    """
    from evald.evals.graders import check_grader  # noqa: PLC0415 (keeps config light)
    from evald.status.listen import check_listen  # noqa: PLC0415 (keeps config light)

    problems: list[str] = []
    dispatch, staging = config.dispatch, config.staging
    if dispatch.sample_timeout_s >= dispatch.point_deadline_s:
        problems.append(
            f"dispatch.sample_timeout_s: {dispatch.sample_timeout_s:g} must be smaller than "
            f"dispatch.point_deadline_s = {dispatch.point_deadline_s:g}"
        )
    if staging.overtaken_after_s > staging.unmarked_after_s:
        problems.append(
            f"staging.overtaken_after_s: {staging.overtaken_after_s:g} must not be larger than "
            f"staging.unmarked_after_s = {staging.unmarked_after_s:g}"
        )
    problems += _check_places(config)
    problems += check_listen(config.status)
    problems += _check_posture(config)
    names: dict[str, int] = {}
    for i, eval_set in enumerate(config.eval):
        key = places[i]
        if eval_set.name in names:
            problems.append(
                f"{key}.name: {eval_set.name!r} is already the name of "
                f"{places[names[eval_set.name]]}; names must be unique"
            )
        names.setdefault(eval_set.name, i)
        if is_own_metric(eval_set.name):
            problems.append(
                f"{key}.name: eval/{eval_set.name} is a metric of evald's own; choose another name"
            )
        problems += [f"{key}.{sentence}" for sentence in _check_set(eval_set, config)]
        if eval_set.kind in {"generate", "custom"}:
            problems += [f"{key}.{sentence}" for sentence in check_grader(eval_set)]
    return problems + _check_aggregates(config, set(names)) + check_alerts(config)


def _check_aggregates(config: Config, sets: set[str]) -> list[str]:
    problems: list[str] = []
    taken = set(sets)
    kinds = {eval_set.name: eval_set.kind for eval_set in config.eval}
    for i, aggregate in enumerate(config.aggregate):
        key = f"aggregate[{i}]"
        if aggregate.name in taken or is_own_metric(aggregate.name):
            problems.append(
                f"{key}.name: eval/{aggregate.name} is already a metric; choose another name"
            )
        taken.add(aggregate.name)
        unknown = [name for name in aggregate.sets if name not in sets]
        if unknown:
            has = ", ".join(sorted(sets)) or "none"
            problems.append(f"{key}.sets: there is no eval set {unknown[0]!r}; there are {has}")
        if len(set(aggregate.sets)) < len(aggregate.sets):
            problems.append(f"{key}.sets: a set is named twice; name each once")
        lower = [name for name in aggregate.sets if kinds.get(name) == "perplexity"]
        if lower and len(lower) < len(aggregate.sets):
            problems.append(
                f"{key}.sets: {lower[0]!r} is a perplexity, of which less is better; put such "
                "sets into an aggregate of their own"
            )
    return problems


def _check_source(eval_set: EvalSet) -> list[str]:
    """Check that a set says where its questions come from, and nothing that is of no use."""
    problems = []
    if eval_set.kind == "procedural" and eval_set.path:
        problems.append("path: kind 'procedural' makes its own questions; remove it")
    if eval_set.kind != "procedural" and not eval_set.path:
        problems.append("path: missing; it must be set")
    for name, kind in (("function", "custom"), ("task", "procedural")):
        if getattr(eval_set, name) is not None and eval_set.kind != kind:
            problems.append(f"{name}: only kind {kind!r} has one; set kind, or remove it")
    return problems


def _check_posture(config: Config) -> list[str]:
    if config.fleet is not None:
        return _check_fleet(config.fleet)
    if config.blackbox is not None:
        return _check_blackbox(config.blackbox, config)
    if config.attached is not None:
        return _check_urls("attached", config.attached) + _check_attached(config.attached)
    return [] if config.shared is None else _check_shared(config.shared)


def _check_fleet(fleet: Fleet) -> list[str]:
    from evald.engines.sglang_table import check_sglang_table  # noqa: PLC0415 (keeps config light)

    problems = check_sglang_table(fleet.sglang)
    if fleet.deterministic and fleet.device == "cpu":
        problems.append(
            "fleet.deterministic: SGLang's deterministic inference is for GPUs, and device is "
            "'cpu'; remove it, or set fleet.device = 'cuda'"
        )
    tables = [fleet.sglang, *(group.sglang for group in fleet.group)]
    if fleet.deterministic and any(
        value is False and name.replace("-", "_") == "enable_deterministic_inference"
        for table in tables
        for name, value in table.items()
    ):
        problems.append(
            "fleet.deterministic: true, but [fleet.sglang] or a group sets "
            "enable_deterministic_inference = false; keep one"
        )
    if fleet.fast_pin == "on" and fleet.pin_mode == "restart":
        problems.append(
            "fleet.fast_pin: 'on' is for updates, and fleet.pin_mode is 'restart'; remove one"
        )
    formats = [
        value
        for table in tables
        for name, value in table.items()
        if name.replace("-", "_") == "load_format" and value not in {"auto", "safetensors"}
    ]
    if fleet.fast_pin == "on" and formats:
        problems.append(
            "fleet.fast_pin: 'on' takes the place of SGLang's own loader, and [fleet.sglang] or a "
            f"group sets load_format = {formats[0]!r}; remove one"
        )
    names = [group.name for group in fleet.group]
    for i, group in enumerate(fleet.group):
        problems += check_sglang_table(group.sglang, f"[[fleet.group]] {group.name}")
        if names.index(group.name) != i:
            problems.append(f"fleet.group[{i}].name: {group.name!r} is there twice; rename one")
    return problems + ([] if fleet.inherit is None else check_inherit(fleet.inherit))


def check_inherit(inherit: Inherit) -> list[str]:
    """Return one sentence for each fault of [fleet.inherit]."""
    sources = [name for name in ("file", "command", "url") if getattr(inherit, name) is not None]
    keys = [name for name in ("api_key_env", "api_key_file") if getattr(inherit, name) is not None]
    problems = []
    if len(sources) != 1:
        got = " and ".join(sources) or "none of them"
        problems.append(f"fleet.inherit: set exactly one of file, command and url, got {got}")
    if keys and inherit.url is None:
        problems.append(f"fleet.inherit.{keys[0]}: only a url needs a key; remove it")
    if len(keys) > 1:
        problems.append("fleet.inherit.api_key_file: api_key_env is set, too; keep one")
    return problems + _bad_url("fleet.inherit.url", inherit.url)


def _bad_url(key: str, url: str | None) -> list[str]:
    parts = urlsplit(url or "http://unset")
    if parts.scheme in {"http", "https"} and parts.hostname:
        return []
    return [f"{key}: {url!r} is no URL; write http://host:port"]


def _check_blackbox(blackbox: BlackBox, config: Config) -> list[str]:
    from evald.postures.blackbox.config import check_black_box  # noqa: PLC0415 (keeps config light)

    problems = check_black_box(blackbox)
    if config.eval:
        problems.append(
            "eval: a black box measures what it wants, evald has no engine to ask; remove the "
            "[[eval]] tables and eval_config, or use another posture"
        )
    return problems


def _check_urls(posture: str, table: Attached | Shared) -> list[str]:
    problems = []
    urls = [url.rstrip("/") for url in table.urls]
    for i, url in enumerate(table.urls):
        if bad := _bad_url(f"{posture}.urls[{i}]", url):
            problems += bad
        elif urls.index(urls[i]) != i:
            problems.append(f"{posture}.urls[{i}]: {url!r} is there twice; keep one")
    if table.api_key_env and table.api_key_file:
        problems.append(f"{posture}: set api_key_env or api_key_file, not both")
    return problems


def _check_attached(attached: Attached) -> list[str]:
    if attached.router is not None and attached.router.rstrip("/") in [
        url.rstrip("/") for url in attached.urls
    ]:
        return ["attached.router: is one of attached.urls; urls are the workers behind the router"]
    if bad := _bad_url("attached.router", attached.router):
        return bad
    if not attached.pin and attached.path_map:
        return ["attached.path_map: is of no use with pin = false; remove it"]
    return []


def _check_shared(shared: Shared) -> list[str]:
    problems = _check_urls("shared", shared)
    if (shared.pause is None) != (shared.resume is None):
        problems.append("shared: set pause and resume together, or neither")
    problems += _bad_url("shared.pause", shared.pause)
    return problems + _bad_url("shared.resume", shared.resume)


def _check_set(eval_set: EvalSet, config: Config) -> list[str]:
    problems = _check_source(eval_set)
    deadline = eval_set.set_deadline_s
    if deadline is not None and not (
        config.dispatch.sample_timeout_s < deadline < config.dispatch.point_deadline_s
    ):
        problems.append(
            f"set_deadline_s: {deadline:g} must lie between dispatch.sample_timeout_s = "
            f"{config.dispatch.sample_timeout_s:g} and dispatch.point_deadline_s = "
            f"{config.dispatch.point_deadline_s:g}"
        )
    problems += _check_stragglers(eval_set, config)
    if eval_set.min_new_tokens > eval_set.max_response_len:
        problems.append(
            f"min_new_tokens: {eval_set.min_new_tokens} must not be larger than max_response_len "
            f"= {eval_set.max_response_len}"
        )
    too_large = [k for k in eval_set.pass_k if k > eval_set.n_samples_per_eval_prompt]
    if too_large:
        problems.append(
            f"pass_k: {too_large[0]} is more than n_samples_per_eval_prompt = "
            f"{eval_set.n_samples_per_eval_prompt}; draw more samples, or remove it"
        )
    if config.shared is not None and eval_set.tokenizer == "snapshot":
        problems.append("tokenizer: 'snapshot', but [shared] points have no snapshot; use 'base'")
    if eval_set.top_k == 0 or eval_set.top_k < -1:
        problems.append(f"top_k: must be -1 (off) or at least 1, got {eval_set.top_k}")
    return problems


def _check_places(config: Config) -> list[str]:
    """Check that directories do not lie where another one's owner deletes."""
    staging, problems = config.staging, list[str]()
    root, results = Path(staging.root), Path(config.results.dir)
    if results == root or results.is_relative_to(root):
        problems.append(
            f"results.dir: {results} lies inside the staging root {root}; results outlive "
            "snapshots, choose a directory on a disk"
        )
    elif root.is_relative_to(results):
        problems.append(f"staging.root: {root} lies inside results.dir {results}; separate them")
    best = None if config.keep_best is None else Path(config.keep_best.dir)
    if best is not None and (best.is_relative_to(root) or root.is_relative_to(best)):
        problems.append(
            f"keep_best.dir: {best} and the staging root {root} lie in one another; choose a "
            "directory elsewhere, where nothing is deleted"
        )
    if best is not None and config.shared is not None:
        problems.append("keep_best: engines that are shared come with no snapshots; remove it")
    model = config.model_dir
    if staging.owned and model is not None and model.is_relative_to(root):
        posture = type(config.posture).__name__.lower()
        problems.append(
            f"{posture}.model: {model} lies inside the owned staging root, where evald deletes; "
            "move the base model out"
        )
    return problems


def _check_stragglers(eval_set: EvalSet, config: Config) -> list[str]:
    """Check that a cut can happen where one is wanted, before what would come anyway."""
    share, after_s = eval_set.cut_at_share, eval_set.cut_after_s
    if eval_set.stragglers == "wait":
        named = [key for key in ("cut_at_share", "cut_after_s") if getattr(eval_set, key)]
        return [f"{key}: is of no use with stragglers = 'wait'; set 'cut'" for key in named]
    if share is None and after_s is None:
        return ["stragglers: 'cut', but when? set cut_at_share, cut_after_s, or both"]
    deadline, name = eval_set.set_deadline_s, "set_deadline_s"
    if deadline is None:
        deadline, name = config.dispatch.point_deadline_s, "dispatch.point_deadline_s"
    if after_s is not None and after_s >= deadline:
        return [f"cut_after_s: {after_s:g} must be smaller than {name} = {deadline:g}"]
    return []
