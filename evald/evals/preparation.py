"""Before a point has the engines: prompts become token ids, and the record learns with what."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import structlog
import xxhash

from evald.errors import ConfigError, EvalSkip, InvalidSnapshot, SnapshotGone
from evald.evals.chat_template import PromptError
from evald.evals.custom.functions import Tokens
from evald.evals.encoding import Encoded, Encoding, Fault, SetEncoder
from evald.evals.prompts import ModelLimits, TokenizerFiles
from evald.evals.sampling import base_sampling
from evald.evals.sets import LoadedSet
from evald.point import EvalPoint

log = structlog.get_logger(__name__)

#: questions of one set that are named with their fault, and those that are only too long.
_MAX_NAMED = 3
_MAX_LONG_NAMED = 20


class PreparedSet(msgspec.Struct, frozen=True):
    """An eval set with its prompts as token ids."""

    loaded: LoadedSet
    #: in the order of the questions.
    prompts: list[Encoded]
    #: the set's own, and tokenizer and template: a sample of another one does not count.
    config_digest: str
    #: of kind "custom": with what the function's prompts become token ids.
    tokens: Tokens | None = None


class PreparedPoint(msgspec.Struct, frozen=True):
    """A point that needs nothing of its snapshot's directory but the weights."""

    point: EvalPoint
    sets: list[PreparedSet]
    provenance: dict[str, Any]


class _Source(msgspec.Struct, frozen=True):
    """Tokenizer and template of one directory."""

    #: digests; None without one.
    tokenizer: str | None = None
    template: str | None = None
    #: given up once everything is encoded.
    files: TokenizerFiles | None = None
    #: why there is no tokenizer.
    fault: str = ""


class Preparation:
    """Encodes every set once for each pair of tokenizer and template. Blocking.

    ``context_len`` (tokens) is what the engines were told, if they were; it wins over config.json.
    ``make_encoder`` gives who encodes, when there is something to encode.
    """

    def __init__(
        self,
        sets: list[LoadedSet],
        model_dir: Path,
        *,
        context_len: int | None = None,
        make_encoder: Callable[[], SetEncoder] = Encoding,
    ) -> None:
        self._sets = sets
        self._make_encoder = make_encoder
        self._context_len = context_len
        self._model_dir = model_dir
        self._limits = ModelLimits()
        self._base: _Source | None = None
        self._encoder = make_encoder()
        #: what its tokenizer was loaded from.
        self._loaded: TokenizerFiles | None = None
        #: by digests of tokenizer and template, then by set: the base's and the newest others.
        self._prepared: dict[tuple[str | None, str | None], dict[str, PreparedSet]] = {}
        #: digest of the bytes -> digest of the meaning, which takes much longer to find.
        self._meaning: dict[str, str] = {}
        #: a point that nobody waits for any more leaves its thread behind.
        self._one_at_a_time = threading.Lock()

    def prepare(self, point: EvalPoint) -> PreparedPoint:
        """Read what is needed of the snapshot, and encode what is not encoded yet.

        Raises InvalidSnapshot (a set wants the snapshot's own tokenizer, which cannot be used),
        SnapshotGone, and EvalSkip "crashed" when the base model's cannot be used.
        """
        with self._one_at_a_time:
            return self._prepare(point)

    def _prepare(self, point: EvalPoint) -> PreparedPoint:
        directory = point.snapshot.directory
        self._encoder, self._loaded = self._make_encoder(), None
        try:
            base = self.base()
            own = self._read(directory)
            if not directory.is_dir():
                raise SnapshotGone(f"cannot read snapshot {directory}: it vanished before the pin")
            prepared = [
                self._prepare_set(loaded, base if loaded.eval_set.tokenizer == "base" else own)
                for loaded in self._sets
            ]
        finally:
            self.close()
        self._base = msgspec.structs.replace(base, files=None)
        kept = {_key(base), _key(own)}
        self._prepared = {key: sets for key, sets in self._prepared.items() if key in kept}
        return PreparedPoint(point, prepared, _provenance(prepared, base, own))

    def close(self) -> None:
        """Give up what is being encoded; may be called from another thread."""
        self._encoder.close()
        self._loaded = None

    def base(self) -> _Source:
        """Read the base model's tokenizer and limits, once; raises EvalSkip "crashed"."""
        if self._base is None:
            try:
                limits = ModelLimits.read(self._model_dir)
            except PromptError as error:
                raise EvalSkip(f"cannot use the base model: {error}") from error
            context_len = self._context_len or limits.context_len
            self._limits = msgspec.structs.replace(limits, context_len=context_len)
            base = self._read(self._model_dir)
            if base.files is None:
                raise EvalSkip(f"cannot use the base model's tokenizer: {base.fault}")
            self._base = base
        return self._base

    def encode_base(self, loaded: LoadedSet) -> list[Encoded]:
        """Encode a set with the base model's tokenizer; raises EvalSkip."""
        return self._prepare_set(loaded, self.base()).prompts

    def _read(self, directory: Path) -> _Source:
        try:
            files = TokenizerFiles.read(directory)
            raw = xxhash.xxh3_128_hexdigest(files.content)
            if raw not in self._meaning:
                self._meaning[raw] = self._encoder.digest(files.content)
        except PromptError as error:
            return _Source(fault=str(error))
        return _Source(self._meaning[raw], files.template.digest, files)

    def _prepare_set(self, loaded: LoadedSet, source: _Source) -> PreparedSet:
        prepared = self._prepared.setdefault(_key(source), {})
        if loaded.name not in prepared:
            try:
                prepared[loaded.name] = self._encode_set(loaded, source)
            except PromptError as error:
                sentence = f"cannot prepare eval set {loaded.name!r}: {error}"
                if loaded.eval_set.tokenizer == "base":
                    raise EvalSkip(sentence) from error
                raise InvalidSnapshot(f"{sentence} (it uses the snapshot's tokenizer)") from error
        return prepared[loaded.name]

    def _encode_set(self, loaded: LoadedSet, source: _Source) -> PreparedSet:
        if source.files is None:
            raise PromptError(source.fault)
        if self._loaded is not source.files:
            self._encoder.load(source.files, self._limits)
            self._loaded = source.files
        prompts = self._encoder.encode(loaded.eval_set, loaded.questions)
        faults = sum(isinstance(prompt, Fault) for prompt in prompts)
        log.info("set_encoded", set=loaded.name, questions=len(prompts), faults=faults)
        if long := too_long(loaded, prompts):
            log.warning("prompts_too_long", set=loaded.name, questions=name_some(long))
        digest = whole_digest(loaded, source.tokenizer, source.template)
        tokens = None
        if loaded.eval_set.kind == "custom":
            tokens = Tokens(files=source.files, limits=self._limits)
        return PreparedSet(loaded, prompts, digest, tokens)


def whole_digest(loaded: LoadedSet, tokenizer: str | None, template: str | None) -> str:
    """Digest of all that a score depends on but the weights; of a set at one point."""
    whole = [loaded.config_digest, tokenizer, template]
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(whole))


def too_long(loaded: LoadedSet, prompts: list[Encoded]) -> list[str]:
    """Return the ids of the questions whose prompts are too long."""
    pairs = zip(loaded.questions, prompts, strict=True)
    return [question.id for question, one in pairs if isinstance(one, Fault) and one.too_long]


def name_some(ids: list[str]) -> str:
    """Name questions for people, but not without end."""
    more = len(ids) - _MAX_LONG_NAMED
    return ", ".join(ids[:_MAX_LONG_NAMED]) + (f" and {more} more" if more > 0 else "")


def _key(source: _Source) -> tuple[str | None, str | None]:
    return source.tokenizer, source.template


def check_prompts(
    sets: list[LoadedSet], model_dir: Path, *, context_len: int | None = None
) -> list[str]:
    """Encode all sets with the base model's tokenizer, before anything starts. Blocking.

    Return a sentence for each set with questions that cannot be asked (they will count as
    errors). Raises ConfigError when the tokenizer cannot be used, or no question of a set can.
    Sets that use the snapshot's own tokenizer are looked at with the base model's, too.
    """
    preparation = Preparation(sets, model_dir, context_len=context_len)
    problems: list[str] = []
    notes: list[str] = []
    for loaded in sets:
        try:
            prompts = preparation.encode_base(loaded)
        except EvalSkip as skip:
            problems.append(skip.detail)
            continue
        faults = [
            f"question {question.id}: {prompt.sentence}"
            for question, prompt in zip(loaded.questions, prompts, strict=True)
            if isinstance(prompt, Fault)
        ]
        if not faults:
            continue
        sentence = (
            f"eval set {loaded.name!r}: {len(faults)} of {len(prompts)} questions cannot be asked: "
            + "; ".join(faults[:_MAX_NAMED])
        )
        if long := too_long(loaded, prompts):
            sentence += f"; too long for the context: {name_some(long)}"
        (problems if len(faults) == len(prompts) else notes).append(sentence)
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return notes


def _provenance(sets: list[PreparedSet], base: _Source, own: _Source) -> dict[str, Any]:
    def changed(mine: str | None, theirs: str | None) -> dict[str, Any]:
        return {
            "base": mine,
            "snapshot": theirs,
            "differs": None if theirs is None else mine != theirs,
        }

    return {
        "tokenizer": changed(base.tokenizer, own.tokenizer),
        "chat_template": changed(base.template, own.template),
        "sets": {
            prepared.loaded.name: {
                "data": prepared.loaded.data_digest,
                "config": prepared.config_digest,
                "settings": prepared.loaded.settings_digest,
                "asked": prepared.loaded.asked_digest,
                "tokenizer": prepared.loaded.eval_set.tokenizer,
                "grader": prepared.loaded.eval_set.grader,
                "grader_version": prepared.loaded.grader_version,
                "function_version": prepared.loaded.function_version,
                **_made_by(prepared.loaded),
                "questions": len(prepared.prompts),
                "samples_per_question": prepared.loaded.eval_set.n_samples_per_eval_prompt,
                "seed": prepared.loaded.eval_set.seed,
                "sampling": base_sampling(prepared.loaded.eval_set),
            }
            for prepared in sets
        },
    }


def _made_by(loaded: LoadedSet) -> dict[str, Any]:
    """Say whose function has asked, or which file the questions were made into."""
    if loaded.eval_set.kind == "custom":
        return {"function": loaded.eval_set.function, "function_version": loaded.function_version}
    return {"path": loaded.eval_set.path} if loaded.eval_set.kind == "procedural" else {}
