"""Whether the best rate of a narrow model is the best one of a wide one, with muP and without: docs/recipe.md.

    python tools/benchmarks/mup_transfer.py [--dir runs/mup-transfer] [--widths 64,128,256,512] [--jobs 2] --out F.json
        [--figure F.svg]

A sweep over widths, rates and seeds, around the rates where the best one is expected; at the narrowest width both ways
are one. The multipliers were tuned there (`init_std`, `embedding_multiplier`, `output_multiplier`), as muP asks.
Without muP they are the same, and each width is its own base. Given again it goes on where it was.

Models of this size learn more in a minute from a small vocabulary than the frequencies of words. Data:

    megalite data prepare configs/data/demo.yaml out=data/small tokenizer.vocab_size=512 \\
        "sources=[{kind: python, max_mb: 60}]"
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from pathlib import Path
from typing import Any

import yaml
from arguments import count, existing, listed, new_folder, out_file

from megalite.page.plot import Plot, Series, picture
from megalite.sweeps.local import LocalRunner
from megalite.sweeps.record import SweepBook
from megalite.sweeps.settings import SweepConfig
from megalite.sweeps.sweep import SweepRun, prepare

BASE_WIDTH, HEAD_DIM, SEEDS = 64, 16, (1, 2, 3)
WITH, WITHOUT = "with muP", "without"
MULTIPLIERS = {"embedding_multiplier": 8.0, "output_multiplier": 4.0}
WIDE = (8e-3, 1.6e-2, 3.2e-2)
RATES = {
    WITH: {64: (4e-3, *WIDE, 6.4e-2), 128: (4e-3, *WIDE), 256: (4e-3, *WIDE), 512: WIDE},
    WITHOUT: {
        128: (2e-3, 4e-3, 8e-3, 1.6e-2),
        256: (2e-3, 4e-3, 8e-3, 1.6e-2),
        512: (1e-3, 2e-3, 4e-3, 1.6e-2),
    },
}
"""Factors of two around where the best rate is expected; fewer at the widest."""


def base_config(data: Path, num_steps: int) -> dict[str, Any]:
    """What all runs have in common: 1,024 tokens a step."""
    return {
        "model": {"hidden_size": BASE_WIDTH, "num_layers": 2, "num_heads": 4, "init_std": 0.06},
        "batch": {"micro_batch_size": 4, "global_batch_size": 4, "seq_len": 256},
        "data": {"train": [{"path": str(data / "train")}], "valid": [{"path": str(data / "valid")}]},
        "precision": {"dtype": "fp32"},
        "schedule": {"name": "linear", "warmup_fraction": 0.1},
        "train": {"steps": num_steps, "eval_batches": 32, "compile": "off", "device": "cpu"},
        "monitor": {"tensorboard": False, "layers_every": None},
    }


def cases(widths: list[int]) -> list[dict[str, Any]]:
    """Every one of some widths with each of its rates, with muP and without: the wide ones last."""
    found = []
    for width in widths:
        for way, of_width in RATES.items():
            for rate in of_width.get(width, ()):
                found.append(
                    {
                        "model.hidden_size": width,
                        "model.num_heads": width // HEAD_DIM,
                        "model.ffn_hidden_size": 3 * width,
                        "model.mup": {"base_hidden_size": BASE_WIDTH if way == WITH else width, **MULTIPLIERS},
                        "optimizer.lr": rate,
                    }
                )
    return found


def losses(book: SweepBook) -> dict[str, dict[int, dict[float, list[float]]]]:
    """Validation losses by way, width and rate, one a seed; a run that blew up has an infinite one."""
    found: dict[str, dict[int, dict[float, list[float]]]] = {WITH: {}, WITHOUT: {}}
    for record in book.trials.values():
        case = record.point["case"]
        way = WITH if case["model.mup"]["base_hidden_size"] == BASE_WIDTH else WITHOUT
        of_width = found[way].setdefault(case["model.hidden_size"], {})
        of_width.setdefault(case["optimizer.lr"], []).append(math.inf if record.value is None else record.value)
    found[WITHOUT] = {BASE_WIDTH: found[WITH][BASE_WIDTH], **found[WITHOUT]}
    return found


def best(of_width: dict[float, list[float]]) -> tuple[float, float]:
    """The rate with the lowest mean loss, and that loss."""
    return min(((rate, statistics.fmean(each)) for rate, each in of_width.items()), key=lambda pair: pair[1])


def judge(found: dict[str, dict[int, dict[float, list[float]]]]) -> None:
    """Print the best rate of each width, and what the narrowest width's best rate costs there."""
    base = best(found[WITH][BASE_WIDTH])[0]
    for way, by_width in found.items():
        for width, of_width in by_width.items():
            rate, loss = best(of_width)
            spread = max(of_width[rate]) - min(of_width[rate])
            carried = f"{statistics.fmean(of_width[base]) - loss:+.3f}" if base in of_width else "not tried"
            told = f"best {rate:.1e}, loss {loss:.3f} (seeds within {spread:.3f}), at {base:.1e} {carried}"
            print(f"{way:9} width {width:4}: {told}")


def draw(path: Path, found: dict[str, dict[int, dict[float, list[float]]]]) -> None:
    """Mean losses over rates, a colour a width; bars reach over the seeds."""
    plots = []
    for way, by_width in found.items():
        series = []
        for colour, (width, of_width) in enumerate(by_width.items()):
            kept = sorted((rate, each) for rate, each in of_width.items() if math.isfinite(sum(each)))
            rates, each = [rate for rate, _ in kept], [losses for _, losses in kept]
            means, ends = (
                [statistics.fmean(one) for one in each],
                ([min(one) for one in each], [max(one) for one in each]),
            )
            series.append(Series(f"width {width}", rates, means, colour, "both", *ends))
        plots.append(Plot(way, "learning rate", "validation loss", tuple(series), log_x=True))
    path.write_text(picture(plots) + "\n", encoding="utf-8")


def known_width(text: str) -> int:
    """A width that has rates."""
    if not text.isdecimal() or int(text) not in RATES[WITH]:
        there = ", ".join(map(str, RATES[WITH]))
        raise argparse.ArgumentTypeError(f"found {text!r}, there are {there}")
    return int(text)


def main() -> None:
    """Measure, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=existing, default="data/small/packed")
    parser.add_argument("--dir", type=new_folder, default="runs/mup-transfer")
    parser.add_argument("--widths", type=listed(known_width), default=list(RATES[WITH]), help="the narrowest first")
    parser.add_argument("--steps", type=count, default=400)
    parser.add_argument("--jobs", type=count, default=1)
    parser.add_argument("--out", type=out_file, required=True)
    parser.add_argument("--figure", type=out_file, help="an SVG")
    options = parser.parse_args()
    options.dir.mkdir(parents=True, exist_ok=True)
    base = options.dir / "base.yaml"
    base.write_text(yaml.safe_dump(base_config(options.data, options.steps)), encoding="utf-8")
    settings = SweepConfig(
        config=base,
        dir=options.dir,
        space={"case": cases(options.widths), "run.seed": list(SEEDS)},
        metric="validation",
    )
    runner = LocalRunner(options.dir, settings.metric, options.jobs)
    work = SweepRun(prepare(settings), runner, lambda line: print(line, flush=True), may_grow=True)
    book = work.run()
    if work.was_stopped:
        parser.exit(3, "stopped; the same command goes on\n")
    found = losses(book)
    options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    judge(found)
    if options.figure is not None:
        draw(options.figure, found)


if __name__ == "__main__":
    main()
