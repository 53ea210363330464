"""A sweep as its file or the command line gives it, and what can be seen to be wrong with it by itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from megalite.config.load import build
from megalite.config.yaml_source import Source, command_line_source, read_source
from megalite.errors import ConfigError
from megalite.section import FrozenOptions, Options, Problem, Section
from megalite.sweeps.space import MAX_GRID, Dimension, grid_size, read_dimension

SPACE = "space"


class HalvingConfig(Section):
    """Successive halving (Jamieson & Talwalkar 2016): all trials train a little, the best of them on."""

    min_steps: PositiveInt
    """Steps of the first rung; the last one has train.steps."""
    factor: int = Field(3, ge=2, le=100)
    """Of the trials of a rung one in so many goes on, for so many times the steps."""


class SweepConfig(Section):
    """What to try, how, and what to judge it by."""

    config: Path
    """The run's YAML file, which every trial starts from."""
    overrides: tuple[str, ...] = ()
    """Settings of all trials, `section.key=value`."""
    dir: Path
    """Folder of the sweep; each trial is an ordinary run folder in it."""
    method: Literal["grid", "random", "tpe"] = "grid"
    """Every combination; points drawn at random; or points drawn where the trials so far were good (TPE, Bergstra et
    al. 2011). The last two need `pip install 'megalite[sweep]'`."""
    trials: PositiveInt | None = Field(None, le=MAX_GRID)
    """How many, for random and tpe; more may be asked for when the sweep is run again."""
    seed: NonNegativeInt = 0
    """Of the points that are drawn; the runs have their own, `run.seed`."""
    metric: str = "validation"
    """What a trial is judged by, at its last step: `validation` (the watched loss), `validation/SET`, `task/NAME`
    (accuracy), or a number of metrics.jsonl, such as `loss`: its mean over the last tenth of the steps."""
    goal: Literal["min", "max"] = "min"
    """Whether less of it is better, or more."""
    halving: HalvingConfig | None = None
    """Stop most trials early; null trains all to the end."""
    space: Options = Field(default_factory=FrozenOptions)
    """What is varied: keys of the config, each with a list or a range (docs/sweep.md)."""

    def problems(self) -> Iterator[Problem]:
        for name, given in self.space.items():
            yield from (((SPACE, name), each) for each in read_dimension(name, given)[1])
        keys = Counter(key for dimension in self.dimensions() for key in dimension.keys)
        for key in sorted(key for key, count in keys.items() if count > 1):
            yield (
                (SPACE,),
                f"{key} is in {keys[key]} of its dimensions, and a trial has one value of it; name it in one",
            )
        if not self.space:
            yield (SPACE,), "empty; name at least one key of the config, as in `optimizer.lr: [1e-3, 3e-3]`"
        if self.method == "grid" and self.trials is not None:
            yield ("trials",), f"{self.trials} has no effect with method=grid, which takes every combination; remove it"
        if self.method != "grid" and self.trials is None:
            yield ("trials",), f"null, but method={self.method} draws points without end; say how many"
        if self.method == "tpe" and self.halving is not None:
            yield ("halving",), "found beside method=tpe, which goes by trials of full length; use random or grid"
        yield from self._grid_problems()

    def _grid_problems(self) -> Iterator[Problem]:
        dimensions = self.dimensions()
        spans = [(each.name, each.span) for each in dimensions if each.span is not None]
        if self.method != "grid":
            for name, span in spans:
                if span.points is not None:
                    yield (SPACE, name), f"points: {span.points} has no effect with method={self.method}; remove it"
            return
        for name, span in spans:
            if span.num_points is None:
                yield (SPACE, name), "a grid needs to know which numbers of the range: add points=5, or step"
            elif span.num_points > MAX_GRID:
                yield (SPACE, name), f"{span.num_points:,} points; at most {MAX_GRID:,}: fewer points, or a larger step"
        is_small = all(span.num_points is not None and span.num_points <= MAX_GRID for _, span in spans)
        if is_small and (size := grid_size(dimensions)) > MAX_GRID:
            yield (SPACE,), f"a grid of {size:,} trials; at most {MAX_GRID:,}: name fewer values, or use method=random"

    def dimensions(self) -> tuple[Dimension, ...]:
        """Those that are as they should be."""
        found = (read_dimension(name, given)[0] for name, given in self.space.items())
        return tuple(each for each in found if each is not None)


def load_sweep(path: Path, overrides: Sequence[str], over: Sequence[str], options: dict[str, Any]) -> SweepConfig:
    """A sweep from its file, or from a run's config and `--over` alone.

    Args:
        path: a sweep file (it has a key `space` or `config`), or a run's YAML file.
        overrides: settings of all trials.
        over: `KEY=LIST or RANGE`, in place of the file's or beside them.
        options: keys of the sweep that the command line gives; None for those that it does not.

    Raises:
        ConfigError: everything that is wrong with it, each with its place.
    """
    source = read_source(path)
    if SPACE not in source.data and "config" not in source.data:
        source = Source({"config": str(path)}, {(): str(path)})
        if not over:
            raise ConfigError(
                [f"{path}: names nothing to vary; give --over KEY=VALUES, as in --over 'optimizer.lr=[1e-3, 3e-3]'"]
            )
    _take_over(source, over)
    given = {key: value for key, value in options.items() if value is not None}
    source.data |= given
    source.places |= {(key,): "command line" for key in given}
    source.data["overrides"] = [*(source.data.get("overrides") or ()), *overrides]
    source.data.setdefault("dir", f"runs/sweep-{path.stem}")
    return build(SweepConfig, source)


def _take_over(source: Source, over: Sequence[str]) -> None:
    """Add `KEY=VALUES` to the space of a file. A key has dots, which are no levels here."""
    space = source.data.get(SPACE)
    if over and space is None:
        space = source.data[SPACE] = {}
    if not isinstance(space, dict):
        return  # said when it is built
    for assignment in over:
        name, equals, text = assignment.partition("=")
        value = command_line_source([f"value={text}"])
        source.problems += [each.replace("value", name, 1) for each in value.problems]
        if not equals or not name.strip():
            source.problems.append(f"--over {assignment!r}: write KEY=VALUES, as in optimizer.lr=[1e-3, 3e-3]")
        space[name.strip()] = value.data.get("value")
        source.places[SPACE, name.strip()] = "command line"
