"""What the documentation promises is what the program does."""

import re

import pytest
from readme import README, ROOT, blocks, commands, render

from planner.cli import VERBS

PACKAGES = ("costmodels", "hardware_profiles", "planner", "runtime")


@pytest.fixture(scope="module")
def readme():
    return README.read_text()


def test_every_console_block_is_what_the_commands_print_today(readme, tmp_path):
    assert blocks(readme)
    for block in blocks(readme):
        assert render(block, tmp_path) == block


def test_the_first_command_stands_before_line_15_and_the_page_is_short(readme):
    lines = readme.splitlines()
    assert next(n for n, line in enumerate(lines, 1) if "planner search" in line) < 15
    assert len(lines) < 150


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_is_mentioned(readme, verb):
    assert f"planner {verb}" in readme


def test_the_two_set_up_commands_are_there(readme):
    assert "pip install -e . && planner search --gpus 64 --model 70b -o plan.json" in readme
    assert "pip install -e '.[test]' && pytest" in readme


def test_links_to_files_lead_somewhere(readme):
    for target in re.findall(r"\]\(([^)#]+)\)", readme):
        if not target.startswith("http"):
            assert (ROOT / target).exists(), target


@pytest.mark.parametrize("package", PACKAGES)
def test_every_package_has_a_readme_with_its_decisions(package):
    assert "## Decisions" in (ROOT / package / "README.md").read_text()


def test_the_search_of_the_first_screen_is_proved(readme):
    first = blocks(readme)[0]
    assert commands(first)[0].startswith("planner search --gpus 64 --model 70b")
    assert "optimal" in first
