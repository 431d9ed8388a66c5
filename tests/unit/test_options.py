"""Every option and argument of every command: its help, its placeholder, its variable."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from octavo.cli.main import COMMANDS, cli
from octavo.cli.numbers import Count, Number, count

ROOT = Path(__file__).parents[2]
NUMBERS = {"N", "X", "SECONDS", "MS", "BYTES"}
WORDS = {
    "TEXT", "NAME", "MODEL", "KEY", "LIST", "FILE", "FOLDER", "PATH", "URL", "HOST", "ORIGIN",
    "POOL", "SIZE", "TIME", "DEVICE", "PERCENTS",
}  # fmt: skip


def commands(group: click.Command, path: str) -> Iterator[tuple[str, click.Command]]:
    yield path, group
    if isinstance(group, click.Group):
        context = click.Context(group)
        for name in COMMANDS if group is cli else group.list_commands(context):
            command = group.get_command(context, name)
            assert command is not None
            yield from commands(command, f"{path} {name}")


ALL = dict(commands(cli, "octavo"))
PARAMETERS = {
    f"{path} {p.opts[0]}": (c, p)
    for path, c in ALL.items()
    for p in c.params
    if not getattr(p, "hidden", False)  # for octavo's own processes
}
OPTIONS = {
    name: p for name, (_, p) in PARAMETERS.items() if isinstance(p, click.Option) and not p.is_flag
}


def placeholder(name: str) -> str:
    command, parameter = PARAMETERS[name]
    return parameter.make_metavar(click.Context(command)).strip("[].")


@pytest.mark.parametrize("name", PARAMETERS)
def test_help_says_what_it_is(name: str) -> None:
    """An option has its own; an argument is named by that of its command, or lists its values."""
    command, parameter = PARAMETERS[name]
    said = parameter.help if isinstance(parameter, click.Option) else command.help
    listed = isinstance(parameter, click.Argument) and isinstance(parameter.type, click.Choice)
    wanted = "" if isinstance(parameter, click.Option) or listed else placeholder(name)
    assert said and wanted in said


@pytest.mark.parametrize("name", OPTIONS)
def test_placeholders(name: str) -> None:
    """One word for one kind of value: N for counts, X for other numbers, unless a unit says more."""
    kind, words = OPTIONS[name].type, set(re.split(r"[=|\]]+", placeholder(name)))
    if isinstance(kind, click.Choice):
        assert words == set(kind.choices)
    elif isinstance(kind, Number):
        whole = isinstance(kind, Count)
        assert words - {"p95"} <= NUMBERS - ({"X"} if whole else {"N"})
    else:
        assert words <= WORDS


@pytest.mark.parametrize("path", ALL)
def test_ranges_are_in_words(path: str) -> None:
    assert not re.search(r"[<>]=?x|x[<>]", ALL[path].get_help(click.Context(ALL[path])))


def test_ranges_are_true() -> None:
    said = {}
    for name, option in OPTIONS.items():
        if found := re.search(r"\((?:from )?([\d.]+)(?: to ([\d.]+))?\)", option.help or ""):
            low, high = found.groups()
            assert isinstance(option.type, Number)
            assert (option.type.low, high and option.type.high) == (
                float(low),
                high and float(high),
            )
            said[name] = found[0]
    assert said["octavo serve --replicas"] == "(1 to 64)" and len(said) >= 10


def test_the_page_lists_the_variables() -> None:
    variable = re.compile(r"(?<![A-Z_])OCTAVO_[A-Z_]+")
    source = {v for f in (ROOT / "src").rglob("*.py") for v in variable.findall(f.read_text())}
    page = (ROOT / "docs" / "cli.md").read_text()
    assert set(variable.findall(page)) | {"OCTAVO_CUDA_HOST"} == source  # that one is for tests


@pytest.mark.parametrize(
    ("kind", "value", "said"),
    [
        (count(1, 256), "-1", "-1 is not a number from 1 to 256."),
        (count(), "2147483648", "2147483648 is not a number from 1 to 2147483647."),
        (count(), "2.5", "'2.5' is no whole number."),
        (count(), "9" * 400, f"{'9' * 400} is not a number from 1 to 2147483647."),
        (Number(0), "nan", "nan is not a number from 0."),
        (Number(), "inf", "inf is not a finite number."),
        (Number(0, 1, above=True), "0", "0 is not a number above 0 to 1."),
        (Number(0, 1), "x", "'x' is no number."),
    ],
)
def test_numbers_that_are_refused(kind: Number, value: str, said: str) -> None:
    with pytest.raises(click.BadParameter) as e:
        kind.convert(value, None, None)
    assert e.value.message == said
