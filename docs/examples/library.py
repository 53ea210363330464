"""megalite from Python: a loop of one's own, then the run itself, then the model in Hugging Face's format.

python docs/examples/library.py CONFIG.yaml OUT [TOKENIZER]
"""

import sys
from pathlib import Path

import torch

from megalite import batches, build_model, load_config, loss, plan_run, run_training, to_hugging_face


def main(config_file: str, out: str, tokenizer: str | None = None) -> None:
    config = load_config(config_file, [f"run.dir={out}/run"])
    plan = plan_run(config)
    print(f"{plan.model.num_layers} blocks, {plan.total_steps} steps, {plan.flops_per_token:.3g} FLOPs a token")

    model = build_model(config)  # the weights and the batches are those that the run will have
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.optimizer.lr)
    for micro_batches in batches(config, last_step=3):
        step_loss = loss(model, micro_batches)
        step_loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"in this process: loss {step_loss.item():.4f}")

    if run_training(config) == 0:
        done = to_hugging_face(Path(out, "run"), Path(out, "hf"), tokenizer=tokenizer, overwrite=True)
        print(f"{done.architecture} in {done.folder}")


if __name__ == "__main__":
    main(*sys.argv[1:])
