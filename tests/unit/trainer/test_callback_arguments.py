"""What an EvaldCallback refuses when it is made, with the remedy."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from small_training import trainer

from evald.trainer.callback import EvaldCallback
from evald.trainer.trainer_setup import base_model, check_trainer, reuse_options


def job(**settings: Any) -> Any:
    """What a check reads of a Trainer, for hardware that is not here."""
    plugins = {"deepspeed_plugin": None, "fsdp_plugin": None}
    args = {
        "world_size": 1,
        "ddp_timeout": 1800,
        "output_dir": "/out",
        "save_strategy": "steps",
        "save_steps": 100,
    }
    return SimpleNamespace(
        callback_handler=None,
        model=settings.get("model"),
        args=SimpleNamespace(**{key: settings.get(key, value) for key, value in args.items()}),
        accelerator=SimpleNamespace(
            state=SimpleNamespace(
                **{key: settings.get(key, value) for key, value in plugins.items()}
            )
        ),
    )


def zero(stage: int) -> Any:
    return SimpleNamespace(zero_stage=stage)


def fsdp(version: int, kind: str = "FULL_STATE_DICT") -> Any:
    return SimpleNamespace(fsdp_version=version, state_dict_type=f"StateDictType.{kind}")


@pytest.mark.parametrize(
    ("given", "call", "remedy"),
    [
        (job(deepspeed_plugin=zero(3)), {}, "use ZeRO-2 or FSDP2, or reuse=True"),
        (job(fsdp_plugin=fsdp(1)), {}, "set fsdp_version 2"),
        (
            job(fsdp_plugin=fsdp(2, "SHARDED_STATE_DICT")),
            {"reuse": True},
            "set the state_dict_type FULL_STATE_DICT",
        ),
        (job(world_size=2), {"drain_timeout_s": 1800.0}, "lower drain_timeout_s, or raise ddp_"),
        (job(), {"drain_timeout_s": -1.0}, "give 0 or more seconds"),
        ("trainer", {}, "give the transformers Trainer itself"),
    ],
)
def test_trainers_whose_weights_cannot_be_had(given: Any, call: Any, remedy: str) -> None:
    with pytest.raises(ValueError, match=remedy):
        check_trainer(given, **{"reuse": False, "drain_timeout_s": 1.0, **call})


@pytest.mark.parametrize(
    ("given", "reuse"),
    [
        (job(), False),
        (job(deepspeed_plugin=zero(2)), False),
        (job(deepspeed_plugin=zero(3)), True),
        (job(fsdp_plugin=fsdp(2, "SHARDED_STATE_DICT")), False),
        (job(fsdp_plugin=fsdp(1)), True),
        (job(world_size=2), False),
    ],
)
def test_trainers_whose_weights_can_be_had(given: Any, reuse: bool) -> None:
    check_trainer(given, reuse=reuse, drain_timeout_s=600.0)


PEFT = SimpleNamespace(
    peft_config={}, get_base_model=lambda: SimpleNamespace(name_or_path="/models/base")
)


@pytest.mark.parametrize(
    ("given", "call", "remedy"),
    [
        (job(model=PEFT), {}, "leave reuse out, and the merged weights are exported"),
        (job(save_strategy="no"), {}, 'set "steps" and a whole number'),
        (job(save_steps=0.1), {}, 'set "steps" and a whole number'),
        (job(), {"epochs": True}, 'set it to "epoch"'),
        (job(save_strategy="epoch"), {"epochs": True, "has_interval": True}, "without interval"),
    ],
)
def test_checkpoints_that_cannot_be_reused(given: Any, call: Any, remedy: str) -> None:
    with pytest.raises(ValueError, match=remedy):
        reuse_options(given, **{"has_interval": False, "epochs": False, **call})


def test_the_base_model_is_where_the_trainers_model_came_from() -> None:
    assert base_model(job(model=PEFT)) == "/models/base"
    assert base_model(job(model=SimpleNamespace(name_or_path="/m"))) == "/m"
    assert base_model(job(model=SimpleNamespace(name_or_path=""))) is None
    assert base_model(job()) is None  # a model_init makes it later


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        ({}, "give interval, steps or every_minutes, or epochs=True"),
        ({"interval": 0}, "interval=0"),
        ({"interval": 2, "every_minutes": 1.0}, "give one of them"),
        ({"interval": 2, "mode": "reuse"}, "reuse=True alone reads"),
        ({"interval": 2, "mode": "async", "reuse": True}, "reuse=True alone reads"),
        ({"interval": 3, "reuse": True}, "multiple of save_interval=2"),
        ({"interval": 2}, "without base_dir.*reuse=True"),
        ({"interval": 2, "base_dir": "/b", "overflow": "queue"}, "overflow='queue'"),
        ({"interval": 2, "first_step": 0}, "Trainer counts from 1; leave it out"),
        ({"interval": 2, "num_steps": 5}, "knows its max_steps; leave it out"),
        ({"intervall": 5}, "'intervall' in EvaldCallback.*did you mean interval"),
        ({"interval": 2, "drain_timeout_s": "10"}, "drain_timeout_s='10': give a number"),
        ({"interval": 2, "poll_s": "2"}, "poll_s='2': give a number"),
        ({"interval": 2, "base_dir": "/", "export_options": ["dtype"]}, "give a dict"),
        ({"interval": 2, "base_dir": "/", "export_options": {"dtyp": 1}}, "did you mean dtype"),
        ({"interval": 2, "base_dir": "/", "export_options": {"mode": 1}}, "'mode' in export_opt"),
    ],
)
def test_arguments_that_are_wrong_show_before_the_training(
    tmp_path: Path, settings: dict[str, Any], remedy: str
) -> None:
    given = trainer(tmp_path / "out", save_strategy="steps", save_steps=2)
    with pytest.raises(ValueError, match=remedy):
        EvaldCallback(given, tmp_path / "root", **settings)


def test_a_second_callback_is_refused(tmp_path: Path) -> None:
    given = trainer(tmp_path / "out")
    callback = EvaldCallback(given, tmp_path / "root", interval=2, base_dir=tmp_path)
    given.add_callback(callback)
    with pytest.raises(ValueError, match="cannot add a second EvaldCallback to one Trainer"):
        EvaldCallback(given, tmp_path / "root", interval=2, base_dir=tmp_path)
    given.remove_callback(callback)
    EvaldCallback(given, tmp_path / "root", interval=2, base_dir=tmp_path)
