"""Which models `octavo serve` serves: those it names, those of a folder, those in the caches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from octavo.backends import device_memory
from octavo.checkpoint.hub import Located, locate, locate_published, located_here, models_in
from octavo.checkpoint.open import open_checkpoint
from octavo.checkpoint.progress import ProgressBar
from octavo.engine.open import OpenModel
from octavo.engine.plan import Plan, Share, make_plan, memory_budget
from octavo.errors import UsageError
from octavo.models.mmproj import AUTO, NONE
from octavo.server.source import ModelOptions, ModelSource, NamedSource


@dataclass
class ServedChoice:
    """The models of a server. like: what all of them have in common; sizing: arguments of
    `make_plan`. folder: whose models are served; on_demand: those in the caches are."""

    like: ModelOptions
    sizing: dict[str, Any]
    memory: str | None
    folder: Path | None = None
    on_demand: bool = False
    known: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.budget = memory_budget(self.memory, device=device_memory(self.like.device))[1]
        self._count = 1
        self._fetched = False  # a model has been, while serving

    @property
    def finds(self) -> bool:
        """Whether models may be found later."""
        return self.folder is not None or self.on_demand

    @property
    def several(self) -> bool:
        return self._count > 1 or self.finds or self._fetched

    def named(
        self, names: Sequence[str], pinned: Sequence[str], aliases: Sequence[tuple[str, str]],
        offline: bool, progress: ProgressBar,
    ) -> list[NamedSource]:  # fmt: skip
        """The models that are named. Raises OctavoError."""
        self._count = max(1, len(names))
        served, models = [], set[str]()
        for name in names:
            located = locate(name, offline=offline, progress=progress)
            called = {name, self.like.name or located.name, located.name, *located.aliases}
            models |= called
            served.append(
                replace(
                    self.like,
                    located=located,
                    name=self.like.name or located.name,
                    aliases=tuple(alias for alias, model in aliases if model in called),
                    pinned=bool(called & set(pinned)),
                )
            )
        for option, wanted in (("--pin", pinned), ("--alias", [m for _, m in aliases])):
            if unknown := [model for model in wanted if model not in models]:
                raise UsageError(f"{option}: {unknown[0]!r} is none of the models that are named")
        self.known |= models.union(*(options.also for options in served))
        return [(options, self._source(options, self.sizing)) for options in served]

    def find(self) -> list[NamedSource]:
        """Models of the folder and the caches that were not known before."""
        found = models_in(self.folder) if self.folder is not None else []
        if self.on_demand:
            found += located_here(self.known)
        return [self._found(located) for located in found if located.name not in self.known]

    def _found(self, located: Located) -> NamedSource:
        """A model that was not named, for which options about one model do not hold."""
        self.known.add(located.name)
        mmproj = NONE if self.like.mmproj == NONE else AUTO
        options = replace(
            self.like, located=located, name=located.name, chat_template=None, adapters=(),
            mmproj=mmproj,
        )  # fmt: skip
        sizing = self.sizing | {"draft": None}
        if sizing["speculation"] == "draft":
            sizing["speculation"] = "auto"
        return options, self._source(options, sizing)

    def fetch(self, name: str, progress: ProgressBar) -> NamedSource | None:
        """A model as `octavo pull` fetches it; None if it is served already. Raises OctavoError."""
        located = locate_published(name, progress=progress, hub_progress=progress)
        open_checkpoint(located.path)  # a damaged file is better noticed now
        self._fetched = True
        return None if located.name in self.known else self._found(located)

    def _source(self, options: ModelOptions, sizing: dict[str, Any]) -> ModelSource:
        return ModelSource(options, lambda opened: self._plan(options, opened, sizing))

    def _plan(self, options: ModelOptions, opened: OpenModel, sizing: dict[str, Any]) -> Plan:
        if not self.several:
            return make_plan(
                opened.compiled, name=options.name, memory=self.memory, encoder=opened.encoder,
                **sizing,
            )  # fmt: skip
        context = sizing["context"]
        found = self.finds or self._fetched  # such a model has a share, too
        share = Share(self.budget, self.budget // (self._count + found))
        return make_plan(
            opened.compiled, name=options.name, share=share, encoder=opened.encoder,
            **sizing | {"context": context and min(context, opened.program.context)},
        )  # fmt: skip


def parse_aliases(given: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Parses NAME=MODEL options. Raises UsageError."""
    for text in given:
        name, equals, model = text.partition("=")
        if not (equals and name and model):
            raise UsageError(f"--alias {text!r} is not NAME=MODEL", "--alias gpt-4o=smollm2")
        yield name, model


def read_template(file: Path) -> str:
    """A chat template. Raises UsageError, OSError."""
    try:
        return file.read_text("utf-8")
    except UnicodeDecodeError:
        raise UsageError(f"--chat-template {file} is not in UTF-8") from None


def parse_seconds(text: str) -> float | None:
    """`30s`, `5m`, `2h`, or seconds; -1: None, for ever. Raises UsageError."""
    units = {"s": 1, "m": 60, "h": 3600}
    number, unit = (text[:-1], text[-1]) if text[-1:] in units else (text, "s")
    try:
        value = float(number) * units[unit]
    except ValueError:
        value = float("nan")
    if value == -1:
        return None
    if not 0 <= value <= 366 * 86_400:
        raise UsageError(f"--keep-alive {text!r} is no time", "--keep-alive 5m", "--keep-alive -1")
    return value
