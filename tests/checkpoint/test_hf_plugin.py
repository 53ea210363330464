"""A family that a plug-in brings converts both ways, with the same proofs as ours."""

from __future__ import annotations

from pathlib import Path

from megalite.checkpoint.hf.exporter import to_hugging_face
from megalite.checkpoint.hf.families.registry import FAMILIES, exportable
from megalite.checkpoint.hf.to_checkpoint import from_hugging_face
from megalite.cli.main import main
from tests.checkpoint.hf_kit import tiny_model, write_checkpoint
from tests.kit.plugins import loaded, sample

STARCODER = {"norm": "layernorm", "activation": "gelu_tanh", "bias": "all", "num_kv_heads": 2}


def test_starcoder(tmp_path: Path):
    """StarCoder 2, which megalite has not: bit-equal weights and equal logits in transformers, there and back."""
    model = tiny_model(**STARCODER)
    assert exportable(model).architecture is None
    with loaded(sample("families")):
        write_checkpoint(tmp_path / "run", model)
        done = to_hugging_face(tmp_path / "run", tmp_path / "hf")
        assert done.architecture == "Starcoder2ForCausalLM"
        assert done.verdict.num_weights > 0
        back = from_hugging_face(tmp_path / "hf", tmp_path / "back")
        assert back.model == model
    assert "starcoder2" not in FAMILIES


def test_by_the_command(tmp_path: Path, capsys, monkeypatch):
    """`--plugin` names it for a command without a config; without, the class is refused by name."""
    monkeypatch.setenv("MEGALITE_PLUGINS", "")
    with loaded(sample("families")):
        write_checkpoint(tmp_path / "run", tiny_model(**STARCODER))
        to_hugging_face(tmp_path / "run", tmp_path / "hf")

    def convert(*plugin: str) -> tuple[object, str]:
        try:
            main([*plugin, "convert", "from-hf", str(tmp_path / "hf"), str(tmp_path / "back")])
        except SystemExit as end:
            return end.code, capsys.readouterr().err
        raise AssertionError("a command ends by SystemExit")

    code, said = convert()
    assert code == 2
    assert "model_type is 'starcoder2'" in said
    with loaded():
        code, said = convert("--plugin", sample("families"))
    assert code == 0, said
