"""Every mistake in a configuration has the message in messages.txt; tests/golden_messages.py rewrites that file."""

from pathlib import Path

from asterism.configs.load import load_run, load_stages
from asterism.configs.loading.config_layers import ConfigError
from tests.golden_messages import check_golden_messages


def test_each_mistake_is_refused_with_its_key_and_the_remedy(tmp_path: Path) -> None:
    """An input is the text of a file, then options. `name = "a"` is added if the text has no name."""
    file = tmp_path / "my.toml"

    def load(case: str) -> None:
        text, *overrides = case.split("--set ")
        begin = "" if text.startswith(("name", "nme", "seed")) else 'name = "a"\n'
        file.write_text(begin + text)
        settings = [each.removesuffix(" ") for each in overrides]
        load_stages(file, settings) or load_run(file, settings)

    check_golden_messages(Path(__file__).parent / "messages.txt", load, {f"{tmp_path}/": ""}, ConfigError)
