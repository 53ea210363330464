"""Plug-ins of a model are tried before training: what cannot be trained with is named, with its file and line."""

from __future__ import annotations

from typing import Any

import pytest

from megalite.library import build_model
from megalite.plugins import PluginError
from tests.kit.plugins import loaded, sample
from tests.kit.runs import megalite, write_run
from tests.kit.train import tiny_config

HEADS = {
    "activation": "@extend.activation('odd')\ndef odd(x): return ",
    "attention": "@extend.attention('odd')\ndef odd(q, k, v, documents, window): return ",
    "loss": "@extend.loss('odd')\ndef odd(logits, labels): return ",
    "optimizer": "@extend.optimizer('odd', state=('m',))\nclass Odd:\n"
    "  def update(self, weights, gradients, states, *, lr, decay, step): ",
    "norm": "from megalite.layers.norm import RMSNorm\n@extend.norm('odd')\nclass Odd(RMSNorm):\n"
    "  def forward(self, x): return ",
}

CHOICES: dict[str, dict[str, Any]] = {
    "activation": {"model": {"activation": "odd"}},
    "attention": {"model": {"attention": "odd"}},
    "loss": {"train": {"loss": {"name": "odd"}}},
    "optimizer": {"optimizer": {"name": "odd"}},
    "norm": {"model": {"norm": "odd"}},
}


def write(folder, kind: str, code: str) -> str:
    path = folder / "odd.py"
    path.write_text(f"import torch\nfrom megalite import extend\n{HEADS[kind]}{code}\n")
    return str(path)


@pytest.mark.parametrize(
    ("kind", "code", "complaint"),
    [
        (
            "activation",
            "x[:, :3]",
            r"it returned a tensor \[128, 3\] of torch.float32, expected \[128, 64\] of torch.fl",
        ),
        ("activation", "None", "it returned None, expected a tensor"),
        ("activation", "{}['oops']", r"KeyError: 'oops' \(.*odd.py:4, in odd\); mend the plug-in"),
        ("activation", "x.double()", "of torch.float64, expected"),
        ("activation", "x / 0", "it returned numbers that are not finite"),
        ("activation", "x.detach()", "its result has no gradient"),
        ("activation", "(x * 0).sqrt() + x", "it has a gradient that is not finite"),
        ("attention", "q[:, :1]", r"it returned a tensor \[128, 1, 8\]"),
        ("attention", "v.mean(0, keepdim=True).expand(q.shape)", "it looks ahead: another last token of a doc"),
        ("attention", "v.cumsum(0)", "it looks into another document"),
        ("loss", "logits", r"it returned a tensor \[16, 101\] of torch.float32, expected \[16\]"),
        ("loss", "labels.float()", "its result has no gradient"),
        ("norm", "x[:3] * self.weight", r"it returned a tensor \[3, 64\]"),
        ("optimizer", "1 / 0", r"ZeroDivisionError: division by zero \(.*odd.py:5, in update\)"),
        ("optimizer", "weights[0] = weights[0] + 1", "update put other tensors into its lists; change those"),
        ("optimizer", "states['m'][1].add_(1 / (step - 2.0 + 1e-45))", "update 2 made numbers that are not finite"),
    ],
)
def test_what_cannot_be_trained_with(tmp_path, kind, code, complaint):
    """Whatever is wrong with it."""
    with loaded(path := write(tmp_path, kind, code)):
        config = tiny_config(**{**CHOICES[kind], "model": {"num_kv_heads": 4, **CHOICES[kind].get("model", {})}})
        with pytest.raises(PluginError, match=f"odd of plug-in {path} was tried on a few .* training: .*{complaint}"):
            build_model(config)


def test_samples_pass():
    """With windows for some of the blocks and grouped heads, too."""
    names = ("activations", "norms", "attentions", "optimizers", "losses")
    model = {"activation": "squared_gate", "norm": "magnitude_norm", "attention": "softmax_one"}
    window = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"], "num_kv_heads": 2}
    with loaded(*map(sample, names)):
        config = tiny_config(
            model={**model, **window},
            optimizer={"name": "signum"},
            train={"loss": {"name": "focal"}},
        )
        build_model(config)


def test_a_run_does_not_begin(tmp_path):
    """It is bad input of the run, without a traceback; in the middle of training a fault, whose last line names it."""
    config = write_run(tmp_path, parallel={"tp": 1, "dp": 1}, monitor={"tensorboard": False})
    text = config.read_text()
    for code, number, words in (
        ("None", 2, "model.activation: odd of plug-in"),
        ("x.relu() if len(x) > 64 else {}['oops']", 1, "odd.py:4, in odd): KeyError: 'oops'"),
    ):
        path = write(tmp_path, "activation", code)
        config.write_text(f"plugins: [{path}]\n{text}")
        done = megalite(
            "train", config, "model.activation=odd", "train.compile=off", f"run.dir={tmp_path / str(number)}"
        )
        assert done.returncode == number, done.stderr
        assert words in done.stderr
        assert ("Traceback" in done.stderr) == (number == 1)
