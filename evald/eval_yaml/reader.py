"""``eval_config``: the eval YAML of miles and slime, as the eval sets that it means.

``eval: {defaults, datasets}`` or the two at the root; ``datasets`` is a list, or a mapping by name.
Values of a data set lie over ``defaults``, those over ``[defaults]`` of the config file, and every
field can stand in both. ``null`` means what evald has by itself, whatever lies below. Relative
paths are relative to the YAML file.
"""

from __future__ import annotations

import base64
import binascii
import difflib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from evald.config import EvalSet
from evald.config_convert import convert_field, lay_over, meant_key, unknown_key
from evald.errors import ConfigError
from evald.eval_yaml.dialect import FIELDS, RENAMED, UNSERVED
from evald.eval_yaml.nodes import Misread, Node, read_yaml

INLINE = "base64:"
_MAX_BYTES = 1 << 20


class YamlSet(msgspec.Struct, frozen=True):
    """An eval set, and its place for sentences."""

    where: str
    eval_set: EvalSet


class _Placed(msgspec.Struct, frozen=True):
    """The value of a field, and where it stands; None for null."""

    where: str
    value: Any
    #: its fault has been told, and there is no value.
    faulty: bool = False


_Fields = dict[str, _Placed]


def read_eval_config(
    eval_config: str,
    *,
    base: Path,
    environ: Mapping[str, str],
    defaults: Mapping[str, Any],
    problems: list[str],
) -> list[YamlSet]:
    """Read the YAML that ``eval_config`` names or holds; ``base`` anchors its path.

    ``defaults``: what is good of [defaults] in the config file. Faults are added to ``problems``,
    one sentence each with file and line, and then sets may be missing. Blocking.
    """
    try:
        source, text, directory = _content(eval_config, base)
        root = read_yaml(text, source, environ, problems)
    except ConfigError as error:
        problems += error.problems
        return []
    return _Reader(source, directory, defaults, problems).sets(root)


def _content(eval_config: str, base: Path) -> tuple[str, str, Path]:
    """Return what to call the YAML, its text, and the directory of its relative paths."""
    if eval_config.startswith(INLINE):
        source, directory = "eval_config (base64)", base
        try:
            content = base64.b64decode(
                "".join(eval_config.removeprefix(INLINE).split()), validate=True
            )
        except binascii.Error as error:
            problem = f"eval_config: what follows {INLINE} is no base64: {error}"
            raise ConfigError([problem]) from error
    else:
        path = Path(os.path.normpath(base / Path(eval_config).expanduser()))
        source, directory = str(path), path.parent
        try:
            with path.open("rb") as file:
                content = file.read(_MAX_BYTES + 1)
        except OSError as error:
            raise ConfigError([f"eval_config: cannot read {path}: {error.strerror}"]) from error
    if len(content) > _MAX_BYTES:
        raise ConfigError([f"cannot read {source}: it is larger than {_MAX_BYTES} bytes"])
    try:
        return source, content.decode(), directory
    except UnicodeDecodeError as error:
        raise ConfigError([f"cannot read {source}: not UTF-8 at byte {error.start}"]) from error


class _Reader:
    def __init__(
        self, source: str, directory: Path, defaults: Mapping[str, Any], problems: list[str]
    ) -> None:
        self._source = source
        self._directory = directory
        self._defaults = defaults
        self._problems = problems

    def sets(self, root: Node) -> list[YamlSet]:
        """Read the whole file."""
        if not isinstance(root.value, dict):
            self._fault(root.line, "expected a mapping with eval: or datasets:")
            return []
        top = root.value
        if "eval" in top:
            # sections of other tools and anchors may stand beside it, but not its own content
            for name, node in top.items():
                if name != "eval" and difflib.get_close_matches(name, ["defaults", "datasets"]):
                    self._fault(node.line, f"{name}: belongs under eval:, where it would be read")
            section = top["eval"]
            if not isinstance(section.value, dict):
                self._fault(section.line, "eval: expected a mapping with datasets:")
                return []
            top = section.value
        for name, node in top.items():
            if name not in {"defaults", "datasets"}:
                self._refuse(node.line, name, ["defaults", "datasets"])
        defaults = self._fields(top["defaults"], "defaults") if "defaults" in top else {}
        for field in {"name", "path"} & defaults.keys():
            if not (one := defaults.pop(field)).faulty:
                self._problems.append(f"{one.where}: belongs to one data set; move it there")
        datasets = self._datasets(top.get("datasets") or Node(root.line, None))
        found = [self._set(node, defaults, name) for name, node in datasets]
        return [one for one in found if one is not None]

    def _datasets(self, node: Node) -> list[tuple[str, Node]]:
        """Return the data sets with their names, as far as they have one ("")."""
        if isinstance(node.value, dict) and node.value:
            return list(node.value.items())
        if isinstance(node.value, list) and node.value:
            return [(_name_in(item), item) for item in node.value]
        self._fault(node.line, "datasets: expected a list of data sets, or a mapping by name")
        return []

    def _set(self, node: Node, defaults: _Fields, name: str) -> YamlSet | None:
        before = len(self._problems)
        own = self._fields(node, name or "datasets")
        if name:
            own.setdefault("name", _Placed(self._where(node.line, f"{name}.name"), name))
        merged = defaults | own
        given = {field: one for field, one in merged.items() if one.value is not None}
        below = {field: value for field, value in self._defaults.items() if field not in merged}
        where = self._where(node.line, given["name"].value if "name" in given else "datasets")
        for field in ("name", "path"):
            if field not in given and not _is_faulty(merged, field):
                self._problems.append(f"{where}: {field} is missing; it must be set")
        told = any(
            _is_faulty(merged, field) for field in ("rm_type", "custom_generate_function_path")
        )
        self._grade(given, where, told=told)
        table = lay_over(below, {field: one.value for field, one in given.items()})
        types = {field.name: field.type for field in msgspec.structs.fields(EvalSet)}
        for field, one in given.items():
            table[field] = convert_field(types[field], one.value, one.where, self._problems)
        if len(self._problems) > before:
            return None
        return YamlSet(where, msgspec.convert(table, EvalSet))

    def _fields(self, node: Node, owner: str) -> _Fields:
        """Read the fields of ``defaults`` or of one data set, in evald's names."""
        if node.value is None:
            return {}
        if not isinstance(node.value, dict):
            self._fault(node.line, f"{owner}: expected a mapping of fields")
            return {}
        fields: _Fields = {}
        for name, one in node.value.items():
            if name not in FIELDS:
                empty = one.value in (None, [], {})
                meant = self._refuse(one.line, name, list(FIELDS), empty=empty)
                if meant is not None:
                    told = _Placed(self._where(one.line, name), None, faulty=True)
                    fields.setdefault(RENAMED.get(meant, meant), told)
                continue
            where = self._where(one.line, f"{owner}.{name}")
            field = RENAMED.get(name, name)
            if field != name and field in node.value:
                self._problems.append(f"{where}: is {field}, which is there, too; keep one")
            try:
                value = None if one.value is None else FIELDS[name](one)
            except Misread as error:
                self._problems.append(f"{where}: expected {error}, got {_shown(one)}")
                fields[field] = _Placed(where, None, faulty=True)
                continue
            if name == "path" and isinstance(value, str):
                value = self._path(value, where)
            fields[field] = _Placed(where, value)
        return fields

    def _path(self, path: str, where: str) -> str:
        if found := re.search(r"\$\w+", path):
            self._problems.append(
                f"{where}: {found[0]} is not filled in; write ${{{found[0][1:]}}}"
            )
        return os.path.normpath(self._directory / Path(path).expanduser())

    def _grade(self, given: _Fields, where: str, *, told: bool) -> None:
        """Replace ``rm_type`` and a custom function by what they are here.

        ``told``: a fault of one of the two has been reported.
        """
        from evald.evals.graders.rm_types import grader_for  # noqa: PLC0415 (keeps config light)

        custom = given.pop("custom_generate_function_path", None)
        if custom is not None:
            given |= _custom_kind(custom)
        rm_type = given.pop("rm_type", None)
        if rm_type is None:
            if custom is None and "grader" not in self._defaults and not told:
                self._problems.append(
                    f"{where}: rm_type is missing; name one here or in defaults, or set grader in "
                    "[defaults] of the config file"
                )
            return
        grader = grader_for(rm_type.value)
        if isinstance(grader, str):
            self._problems.append(f"{rm_type.where}: {grader}")
            return
        for field, value in {"grader": grader.grader, **grader.fields}.items():
            given[field] = _Placed(rm_type.where, value)

    def _refuse(
        self, line: int, name: str, allowed: list[str], *, empty: bool = False
    ) -> str | None:
        """Say why a field is not accepted; one that is known and empty asks for nothing.

        Returns which field was probably meant by one that nobody knows.
        """
        if name in UNSERVED:
            if not empty:
                self._fault(line, f"{name} cannot be served: {UNSERVED[name]}")
        elif name in EvalSet.__struct_fields__:
            self._fault(
                line,
                f"{name} is evald's own; set it in [defaults] of the config file, or give the set "
                "as an [[eval]] table",
            )
        else:
            self._problems.append(unknown_key(self._where(line, name), name, allowed))
            return meant_key(name, allowed)
        return None

    def _where(self, line: int, key: str) -> str:
        return f"{self._source} line {line}: {key}"

    def _fault(self, line: int, sentence: str) -> None:
        self._problems.append(f"{self._source} line {line}: {sentence}")


def _is_faulty(fields: _Fields, name: str) -> bool:
    return name in fields and fields[name].faulty


def _custom_kind(path: _Placed) -> _Fields:
    """Let a function of the user's ask; ``a.b.f`` is ``a.b:f`` here.

    It is called as evald calls one (``evald/evals/custom``), which is not as miles does.
    """
    module, _, function = path.value.rpartition(".")
    name = path.value if ":" in path.value else f"{module}:{function}"
    return {"kind": _Placed(path.where, "custom"), "function": _Placed(path.where, name)}


def _name_in(node: Node) -> str:
    name = node.value.get("name") if isinstance(node.value, dict) else None
    return name.value if name is not None and isinstance(name.value, str) else ""


def _shown(node: Node) -> str:
    match node.value:
        case str():
            return repr(node.value)
        case None:
            return "null"
    return "a list" if isinstance(node.value, list) else "a mapping"
