"""The tables of what is measured: ``[defaults]``, ``[[eval]]`` and ``[[aggregate]]``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from evald.config_types import Count, Function, Name, Positive, Seconds, Table, Text


class Defaults(Table, frozen=True, kw_only=True):
    """What each eval set inherits unless it says otherwise."""

    #: how a response becomes a score; "boxed_" in front: only the last box counts.
    grader: str = "exact"
    #: settings of that grader, see its file in ``evald/evals/graders``; a set that names another
    #: grader than [defaults] does not inherit them.
    grader_config: dict[str, Any] = {}
    #: only what stands behind thinking_end is the answer; "auto": where the model thinks at all.
    thinking: Literal["auto"] | bool = "auto"
    #: closing tag of the thinking; without its slash it is the opening tag.
    thinking_end: Text = "</think>"
    #: keys of a data row; the prompt is text or a list of chat messages.
    input_key: str = "prompt"
    label_key: str = "label"
    metadata_key: str | None = None
    #: what is laid over each row's metadata.
    metadata_overrides: dict[str, Any] = {}
    #: key of the tools that the chat template is told of: a list, or the text of one in JSON; a row
    #: may have none.
    tool_key: str | None = None
    #: key of a stable question id; None: the row's number.
    id_key: str | None = None
    #: key of a cluster: rows with the same value are not independent (one document, one family).
    cluster_key: str | None = None
    temperature: Annotated[float, Meta(ge=0)] = 0.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: int = -1
    repetition_penalty: Annotated[float, Meta(gt=0, le=2)] = 1.0
    min_new_tokens: Count = 0
    max_response_len: Positive = 512
    #: kinds "loglikelihood_choice" and "perplexity" ask once, whatever this says: asking again
    #: would give the same.
    n_samples_per_eval_prompt: Positive = 1
    #: fewest samples that must have a score: with fewer the point is "partial", whatever
    #: max_error_share says.
    min_eval_samples: Positive | None = None
    #: the samples of one question share a request up to this max_response_len; of longer ones
    #: each has its own, so that none waits for another and a lost engine costs one.
    list_up_to_tokens: Count = 8192
    stop: list[str] = []
    stop_token_ids: list[int] = []
    #: the stop string stays at the end of the response.
    no_stop_trim: bool = False
    skip_special_tokens: bool = True
    #: "auto" wraps chat messages and sends text as it is; true wraps text as one user message.
    apply_chat_template: Literal["auto"] | bool = "auto"
    apply_chat_template_kwargs: dict[str, Any] = {}
    #: whose tokenizer and template: the base model's, or the snapshot's own.
    tokenizer: Literal["base", "snapshot"] = "base"
    #: pattern of grader "regex"; the first group, or the whole match, is the answer.
    regex: str | None = None
    #: letters of grader "choice".
    choices: Text = "ABCD"
    #: kind "loglikelihood_choice": key of a row's options (a list of texts); None: the letters of
    #: ``choices`` are the options, and the prompt says what they mean.
    options_key: str | None = None
    #: what stands between prompt and option; None: a space behind text, nothing behind a chat.
    option_prefix: str | None = None
    #: the option with the highest log-probability, or with the highest for each character.
    choose_by: Literal["sum", "per_character"] = "sum"
    #: kind "perplexity": the whole text, or the label behind the prompt.
    perplexity_of: Literal["document", "response"] = "document"
    #: longest piece of a document that is scored at once, in tokens, context included.
    window_tokens: Annotated[int, Meta(ge=2)] = 2048
    #: tokens of context that each later window of a document sees.
    window_overlap_tokens: Positive = 1
    #: one answer's grading.
    grader_timeout_s: Seconds = 10.0
    #: part of every sample's seed; SGLang heeds seeds in deterministic inference only.
    seed: int = 0
    #: k of pass@k, for scores of 0 and 1; empty: 1, 2, 4, ... up to n_samples_per_eval_prompt.
    #: Kinds that ask once have none.
    pass_k: list[Positive] = []
    #: the whole set, from its first request (like point_deadline_s over all lives of the daemon);
    #: None: the point's deadline alone.
    set_deadline_s: Seconds | None = None
    #: the last samples of a set: "wait" for them until a deadline, or "cut" them off at what comes
    #: first of cut_at_share and cut_after_s. What is cut off is aborted at the engines, never
    #: counts, and makes the point "partial" with the bounds of its score.
    stragglers: Literal["wait", "cut"] = "wait"
    #: share of the set's samples that are done, whatever has come of them.
    cut_at_share: Annotated[float, Meta(gt=0, lt=1)] | None = None
    #: from the set's first request.
    cut_after_s: Seconds | None = None


class EvalSet(Defaults, frozen=True, kw_only=True):
    """A named data set with its prompt format, sampling parameters and grader."""

    name: Name
    #: what is asked: a response, or (see ``evald/evals/kinds``) something else.
    kind: Literal["generate", "loglikelihood_choice", "perplexity", "custom", "procedural"] = (
        "generate"
    )
    #: JSONL or (``.parquet``) Parquet file, one question a row; ``FILE@[a:b]`` takes the rows that
    #: Python's slice takes, negative numbers from the end. A row keeps its number in the file.
    #: Every kind but "procedural" needs one.
    path: str = ""
    #: kind "custom": the user's async generate function, "module:function", and its settings
    #: (``evald/evals/custom/settings.py``).
    function: Function | None = None
    function_config: dict[str, Any] = {}
    #: kind "procedural": name of a reasoning-gym task, and its settings in their own names.
    task: Text | None = None
    task_config: dict[str, Any] = {}
    #: questions that are made, and the seed that they are made from.
    task_size: Positive = 100
    task_seed: Count = 0
    #: the prompt, with {question} in it where the task's own text belongs.
    task_prompt: Annotated[
        str, Meta(pattern=r"\{question\}", description="text with {question} in it")
    ] = "{question}"


class Aggregate(Table, frozen=True, kw_only=True):
    """One number over several eval sets."""

    name: Name
    #: names of the eval sets.
    sets: Annotated[list[Name], Meta(min_length=1)]
    #: the mean of the sets, or of all their questions.
    how: Literal["macro", "micro"] = "macro"
