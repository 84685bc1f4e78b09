"""What other frameworks write, as named settings of ``[staging]``: plain strings, no imports.

A preset says how a checkpoint directory is named and how one can tell that it is finished. The
rules themselves are in ``evald/staging/completeness.py``; training jobs may read this table, too.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

#: how a directory is known to be finished; each is a class of ``evald/staging/completeness.py``.
Rule = Literal["marker", "fresh_marker", "weights_index", "trainer_state", "latest_file"]


class Preset(msgspec.Struct, frozen=True, kw_only=True):
    """Where one framework writes its checkpoints, and which file comes last."""

    #: of the directory, below the root or a run's folder.
    pattern: str
    #: the file that tells, relative to the directory (``latest_file``: to the root).
    marker: str
    rule: Rule = "marker"
    #: the framework resumes from these directories and deletes old ones by itself.
    rotated: bool = False
    #: completes "a snapshot is finished ..."; {marker} stands for the file.
    finished: str
    #: how to make the framework save weights that engines can load, where that is not the rule.
    weights: str = ""

    @property
    def settings(self) -> dict[str, Any]:
        """Keys of ``[staging]`` that the preset stands for; what a config says wins."""
        return {"pattern": self.pattern, "marker": self.marker, "owned": False}

    @property
    def has_marker(self) -> bool:
        """Whether there is a file for nothing but that, whose name may differ."""
        return self.rule in {"marker", "fresh_marker"}


PRESETS: dict[str, Preset] = {
    # eval exports and --save-hf (give its own pattern): the old marker goes first, the new one last
    "miles": Preset(
        pattern="step_{step}",
        marker=".complete",
        finished="when it has {marker}",
    ),
    # --save-hf without a marker: old weights and index go first, the new index comes last
    "slime": Preset(
        pattern="step_{step}",
        marker="model.safetensors.index.json",
        rule="weights_index",
        finished="when {marker} is whole",
    ),
    # weight_broadcast type "filesystem"; a marker of an earlier life stays while files are written
    "prime-rl": Preset(
        pattern="broadcasts/step_{step}",
        marker="STABLE",
        rule="fresh_marker",
        rotated=True,
        finished="when it has {marker} and no weights that are newer",
        weights="set weight_broadcast.type = 'filesystem' (and no LoRA) in prime-rl",
    ),
    # transformers' Trainer, and what is built on it: TRL, Axolotl, LLaMA-Factory
    "hf-trainer": Preset(
        pattern="checkpoint-{step}",
        marker="trainer_state.json",
        rule="trainer_state",
        rotated=True,
        finished="when {marker} is whole, names the same step, and no weights are newer",
        weights=(
            "let the Trainer save whole weights: FSDP with state_dict_type FULL_STATE_DICT, "
            "DeepSpeed with stage3_gather_16bit_weights_on_model_save"
        ),
    ),
    # checkpoint.save_contents with "hf_model"
    "verl": Preset(
        pattern="global_step_{step}/actor/huggingface",
        marker="latest_checkpointed_iteration.txt",
        rule="latest_file",
        rotated=True,
        finished="when {marker} in the root names it or a later step, and nothing in it is newer",
        weights="add 'hf_model' to actor_rollout_ref.actor.checkpoint.save_contents of verl",
    ),
}
