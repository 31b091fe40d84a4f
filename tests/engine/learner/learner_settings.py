"""Settings of [learner] for tests. Each has the last part of its key: `rank` is learner.lora.rank."""

from typing import Any

from asterism.configs.schema.learner_config import LearnerConfig
from asterism.configs.schema.schema_tree import find_section, get_field_types, replace_keys

_KEYS = {
    leaf: f"{name}.{leaf}"
    for name, annotation in get_field_types(LearnerConfig).items()
    if (section := find_section(annotation))
    for leaf in get_field_types(section)
}


def change_learner(learner: LearnerConfig, **settings: Any) -> LearnerConfig:
    return replace_keys(learner, {_KEYS.get(name, name): value for name, value in settings.items()})


def make_learner(**settings: Any) -> LearnerConfig:
    return change_learner(LearnerConfig(), **settings)
