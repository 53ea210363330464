"""Speed of pipeline schedules on this CPU, against each other and against a release before.

    python tools/benchmarks/pipeline.py [--pp 2] [--micro-batches 8] [--hidden 384] [--layers 8] [--seq-len 512]
        [--vocab 2048] [--rounds 3] [--against TREE] [--compile] [--only zb-v,interleaved] [--out F.json]

Llama style with a vocabulary small enough that its head does not outweigh the blocks, micro-batches of one sequence,
fp32, AdamW, clipping, one core a stage. All cases run round by round, because the speed of
a shared machine drifts; a ratio is the median over the rounds of what two cases did in the same one. `--against` names
a checkout of a release before, whose own pipeline runs beside. What each schedule was simulated to take is printed too,
as a ratio to 1f1b.
"""

from __future__ import annotations

import argparse

from arguments import count, folder, names_of, out_file
from cases import Job
from train_cpu import Entry, measure, show, summarise, write_record

from megalite.config.pipeline import chunk_costs, pipeline_schedule
from megalite.config.plan import make_plan
from megalite.config.schema import Config
from megalite.parallel.schedules.kinds import SCHEDULES
from megalite.parallel.schedules.simulation import simulate

BASELINE = "1f1b"
BEFORE = "the release before"
SIZES = ("hidden", "layers", "seq_len", "vocab")
"""Of the model and its sequences, as a job and an option call them."""


def entries(arguments: argparse.Namespace) -> list[Entry]:
    """The cases, the baselines first."""
    names = [name for name in SCHEDULES if name in arguments.only or name == BASELINE]
    sizes = {name: getattr(arguments, name) for name in SIZES} | {"micro_batch_size": 1}
    sizes |= {"accum": arguments.micro_batches, "steps": arguments.steps, "warmup": 2}
    job = {"case": "megalite", "pp": arguments.pp, "compile": arguments.compile, **sizes}
    before = []
    if arguments.against is not None:
        before = [Entry(BEFORE, "pipeline", arguments.pp, job, tree=arguments.against)]
    against = (BASELINE, *(entry.name for entry in before))
    return [
        *before,
        *(
            Entry(name, "pipeline", arguments.pp, job | {"schedule": name}, tuple(x for x in against if x != name))
            for name in names
        ),
    ]


def simulated(arguments: argparse.Namespace, name: str) -> float:
    """Multiply-adds of the step's longest path, for a token of each micro-batch."""
    shape = Job("megalite", **{key: getattr(arguments, key) for key in SIZES}).shape
    config = Config(
        model={
            "hidden_size": shape.hidden,
            "num_layers": shape.layers,
            "num_heads": shape.heads,
            "ffn_hidden_size": shape.ffn,
            "vocab_size": shape.vocab,
            "tie_embeddings": True,
        },
        parallel={"pp": arguments.pp, "schedule": name},
        batch={"seq_len": shape.seq_len, "micro_batch_size": 1, "global_batch_size": arguments.micro_batches},
        train={"steps": 1},
    )
    plan = make_plan(config, arguments.pp)
    return simulate(pipeline_schedule(config, plan, arguments.micro_batches), chunk_costs(config, plan)).end


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pp", type=count, default=2)
    parser.add_argument("--micro-batches", type=count, default=8)
    parser.add_argument("--hidden", type=count, default=384)
    parser.add_argument("--seq-len", type=count, default=512)
    parser.add_argument("--layers", type=count, default=8)
    parser.add_argument("--vocab", type=count, default=2048)
    parser.add_argument("--rounds", type=count, default=3)
    parser.add_argument("--steps", type=count, default=6)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--against", type=folder, help="a checkout of a release before")
    parser.add_argument("--only", type=names_of(tuple(SCHEDULES)), default=list(SCHEDULES))
    parser.add_argument("--out", type=out_file, help="write the figures to this JSON file")
    arguments = parser.parse_args()
    chosen = entries(arguments)
    rows = summarise(chosen, measure(chosen, arguments.rounds))
    reference = simulated(arguments, BASELINE)
    for row in rows:
        if row["case"] in SCHEDULES:
            row["simulated_ratio"] = round(reference / simulated(arguments, row["case"]), 3)
    show(rows)
    for row in rows:
        if "simulated_ratio" in row:
            print(f"simulated  {row['case']:12} {row['simulated_ratio']:.2f} x {BASELINE}")
    if arguments.out:
        given = {key: getattr(arguments, key) for key in ("pp", "micro_batches", *SIZES, "rounds", "steps", "compile")}
        write_record(arguments.out, given, rows)


if __name__ == "__main__":
    main()
