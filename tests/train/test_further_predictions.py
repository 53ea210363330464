"""Losses of predictions further ahead stand in the metrics, weigh what their step says, and begin anew where a model
had none."""

from __future__ import annotations

import torch

from megalite.checkpoint.reader import CheckpointReader
from megalite.errors import EXIT_DONE
from tests.kit.runs import metrics
from tests.train.forked import launch
from tests.train.planted import planted_config

STEPS = 30
MTP = {"num_layers": 2, "loss_weight": 1.0}
PARALLEL = {"dp": 1, "pp": 2, "schedule": "zb-v"}


def train(folder, mtp, parallel=PARALLEL, **sections):
    config = planted_config(
        folder, range(0), steps=STEPS, model={"mtp": mtp, "num_layers": 4}, parallel=parallel, **sections
    )
    assert launch(config, 2) == EXIT_DONE
    return config


def weights(config, names: str) -> dict[str, torch.Tensor]:
    """Of the last checkpoint, those whose name begins so."""
    reader = CheckpointReader(config.run.dir / "checkpoints" / f"step-{STEPS:07d}")
    stored = {name.removeprefix("weight/"): record for name, record in reader.manifest.tensors.items()}
    found = [name for name in stored if name.startswith(names) and f"weight/{name}" in reader.manifest.tensors]
    from megalite.architecture.weights import Rectangle

    return {
        name: reader.read(f"weight/{name}", Rectangle((0,) * len(stored[name].shape), stored[name].shape))
        for name in found
    }


def test_losses_are_told_and_fall(tmp_path):
    """By either engine, over a pipeline and over replicas: both fall, and the model's own is not what they add to."""
    curves = {}
    for name, parallel in (("zb-v", PARALLEL), ("zero2", {"dp": 2, "zero_stage": 2})):
        rows = metrics(train(tmp_path / name, MTP, parallel).run.dir)
        curves[name] = [[row[key] for row in rows] for key in ("loss", "mtp_loss_1", "mtp_loss_2")]
        for curve in curves[name]:
            assert curve[-1] < 0.8 * curve[0]
    for one, other in zip(curves["zb-v"], curves["zero2"], strict=True):
        assert max(abs(a - b) for a, b in zip(one, other, strict=True)) < 1e-5


def test_the_weight_of_the_step(tmp_path):
    """Without a weight their layers get no gradient; from the step on that gives them one they do."""
    never, later = ({**MTP, "loss_weight": 0.0, "loss_weight_steps": steps} for steps in ([], [[16, 1.0]]))
    curves = [
        [row["mtp_loss_1"] for row in metrics(train(tmp_path / name, mtp).run.dir)]
        for name, mtp in (("never", never), ("later", later))
    ]
    assert curves[0][:16] == curves[1][:16]
    assert curves[1][-1] < curves[0][-1] - 0.1


def test_layers_begin_anew(tmp_path):
    """A run that begins with weights of a model without them has fresh ones beside; one without leaves them out."""
    plain = train(tmp_path / "plain", None)
    source = plain.run.dir / "checkpoints" / f"step-{STEPS:07d}"
    further = train(tmp_path / "further", MTP, train={"steps": STEPS, "device": "cpu", "init_from": str(source)})
    rows = metrics(further.run.dir)
    assert abs(rows[0]["loss"] - metrics(plain.run.dir)[-1]["loss"]) < 0.3
    assert rows[0]["mtp_loss_1"] > rows[0]["loss"] + 1.0
    assert weights(further, "mtp.1.projection").keys() == {"mtp.1.projection.weight"}
    source = further.run.dir / "checkpoints" / f"step-{STEPS:07d}"
    again = train(tmp_path / "again", None, train={"steps": STEPS, "device": "cpu", "init_from": str(source)})
    assert abs(metrics(again.run.dir)[0]["loss"] - rows[-1]["loss"]) < 0.3
    assert not weights(again, "mtp.")
