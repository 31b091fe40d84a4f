"""The configuration of most simulated runs: two engines with room for nine of sixteen trajectories."""

from asterism.configs.schema.algorithm import EvaluationConfig, RlConfig
from asterism.configs.schema.dialogue import DialogueConfig
from asterism.configs.schema.machines import EngineConfig
from asterism.configs.schema.run_config import RunConfig

SMALL = RunConfig(
    name="simulated",
    dialogue=DialogueConfig(prompt_tokens=16, response_tokens=400),
    engine=EngineConfig(kv_tokens=2048, num_engines=2),
    rl=RlConfig(steps=3, prompts=4, rollouts=4, max_refill_groups=2),
    evaluation=EvaluationConfig(questions=3),
)
