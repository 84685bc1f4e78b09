"""Before a point has the engines: prompts become token ids, and the record learns with what."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import structlog
import xxhash

from evald.errors import ConfigError, EvalSkip, InvalidSnapshot, SnapshotGone
from evald.evals.chat_template import PromptError, PromptTooLong
from evald.evals.heap import give_back_memory
from evald.evals.kinds import kind_of
from evald.evals.prompts import ModelLimits, PromptEncoder, TokenizerFiles, tokenizer_digest
from evald.evals.sampling import base_sampling
from evald.evals.sets import LoadedSet
from evald.point import EvalPoint

log = structlog.get_logger(__name__)

#: what the set's kind makes of a question, or (text) why it cannot be asked.
Encoded = Any

#: questions of one set that are named with their fault, and those that are only too long.
_MAX_NAMED = 3
_MAX_LONG_NAMED = 20


class TooLong(str):
    """Why a question cannot be asked: its prompt and response do not fit into the context."""

    __slots__ = ()


class PreparedSet(msgspec.Struct, frozen=True):
    """An eval set with its prompts as token ids."""

    loaded: LoadedSet
    #: in the order of the questions.
    prompts: list[Encoded]
    #: the set's own, and tokenizer and template: a sample of another one does not count.
    config_digest: str


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
    """Encodes every set once for each pair of tokenizer and template. Blocking; one at a time.

    ``context_len`` (tokens) is what the engines were told, if they were; it wins over config.json.
    """

    def __init__(
        self, sets: list[LoadedSet], model_dir: Path, *, context_len: int | None = None
    ) -> None:
        self._sets = sets
        self._context_len = context_len
        self._model_dir = model_dir
        self._limits: ModelLimits | None = None
        self._base: _Source | None = None
        self._encoder: PromptEncoder | None = None
        #: by digests of tokenizer and template, then by set: the base's and the newest others.
        self._encoded: dict[tuple[str | None, str | None], dict[str, list[Encoded]]] = {}
        #: digest of the bytes -> digest of the meaning, which takes much longer to find.
        self._meaning: dict[str, str] = {}

    def prepare(self, point: EvalPoint) -> PreparedPoint:
        """Read what is needed of the snapshot, and encode what is not encoded yet.

        Raises InvalidSnapshot (a set wants the snapshot's own tokenizer, which cannot be used),
        SnapshotGone, and EvalSkip "crashed" when the base model's cannot be used.
        """
        directory = point.snapshot.directory
        base = self.base()
        own = self._read(directory)
        if not directory.is_dir():
            raise SnapshotGone(f"cannot read snapshot {directory}: it vanished before the pin")
        try:
            prepared = [
                self._prepare_set(loaded, base if loaded.eval_set.tokenizer == "base" else own)
                for loaded in self._sets
            ]
        finally:
            if self._encoder is not None:
                self._encoder = None
                give_back_memory()
        self._base = msgspec.structs.replace(base, files=None)
        kept = {_key(base), _key(own)}
        self._encoded = {key: sets for key, sets in self._encoded.items() if key in kept}
        return PreparedPoint(point, prepared, _provenance(prepared, base, own))

    def base(self) -> _Source:
        """Read the base model's tokenizer and limits, once; raises EvalSkip "crashed"."""
        if self._base is None or self._limits is None:
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
                self._meaning[raw] = tokenizer_digest(files.content)
        except PromptError as error:
            return _Source(fault=str(error))
        return _Source(self._meaning[raw], files.template.digest, files)

    def _prepare_set(self, loaded: LoadedSet, source: _Source) -> PreparedSet:
        encoded = self._encoded.setdefault(_key(source), {})
        if loaded.name not in encoded:
            try:
                encoded[loaded.name] = self._encode_set(loaded, source)
            except PromptError as error:
                sentence = f"cannot prepare eval set {loaded.name!r}: {error}"
                if loaded.eval_set.tokenizer == "base":
                    raise EvalSkip(sentence) from error
                raise InvalidSnapshot(f"{sentence} (it uses the snapshot's tokenizer)") from error
        digest = whole_digest(loaded, source.tokenizer, source.template)
        return PreparedSet(loaded, encoded[loaded.name], digest)

    def _encode_set(self, loaded: LoadedSet, source: _Source) -> list[Encoded]:
        if source.files is None:
            raise PromptError(source.fault)
        if self._encoder is None or self._encoder.files is not source.files:
            self._encoder = PromptEncoder(source.files, self._limits or ModelLimits())
        eval_set, kind = loaded.eval_set, kind_of(loaded.eval_set)
        try:
            self._encoder.check_ids(eval_set.stop_token_ids)
        except PromptError as error:
            raise PromptError(f"stop_token_ids: {error}") from error
        prompts: list[Encoded] = []
        for question in loaded.questions:
            try:
                prompts.append(kind.encode(self._encoder, question))
            except PromptTooLong as error:
                prompts.append(TooLong(error))
            except PromptError as error:
                prompts.append(str(error))
        faults = sum(isinstance(prompt, str) for prompt in prompts)
        log.info("set_encoded", set=loaded.name, questions=len(prompts), faults=faults)
        if long := too_long(loaded, prompts):
            log.warning("prompts_too_long", set=loaded.name, questions=name_some(long))
        return prompts


def whole_digest(loaded: LoadedSet, tokenizer: str | None, template: str | None) -> str:
    """Digest of all that a score depends on but the weights; of a set at one point."""
    whole = [loaded.config_digest, tokenizer, template]
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(whole))


def too_long(loaded: LoadedSet, prompts: list[Encoded]) -> list[str]:
    """Return the ids of the questions whose prompts are too long."""
    pairs = zip(loaded.questions, prompts, strict=True)
    return [question.id for question, prompt in pairs if isinstance(prompt, TooLong)]


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
            f"question {question.id}: {prompt}"
            for question, prompt in zip(loaded.questions, prompts, strict=True)
            if isinstance(prompt, str)
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
