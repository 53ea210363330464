"""A Hugging Face folder as a stranger reads it: transformers in a fresh process, without network or megalite's code.

    python -m megalite.checkpoint.hf.reload FOLDER WORK

    WORK/request.json         sequences to run, texts to encode
    WORK/loaded               there once the model has been read: what fails later fails in computing
    WORK/logits.safetensors   logits of sequence N under the name N
    WORK/report.json          what transformers had to say about the folder, and the ids of the texts

transformers is imported where it is used: the parent process imports this module too, for the file names.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

REQUEST = "request.json"
LOADED = "loaded"
LOGITS = "logits.safetensors"
REPORT = "report.json"


def main(folder: Path, work: Path) -> None:
    """Answer the request in `work`."""
    import transformers

    request = json.loads((work / REQUEST).read_text(encoding="utf-8"))
    model, loading = _load(folder, request["num_blocks"])
    (work / LOADED).touch()
    logits = {str(number): _run(model, **sequence) for number, sequence in enumerate(request["sequences"])}
    save_file(logits, work / LOGITS)
    ids, decoded = _tokenize(folder, request["texts"], request["add_nothing"]) if request["texts"] else ([], [])
    report = {
        "transformers": transformers.__version__,
        "missing": sorted(map(str, loading["missing_keys"])),
        "unexpected": sorted(map(str, loading["unexpected_keys"])),
        "mismatched": sorted(map(str, loading["mismatched_keys"])),
        "ids": ids,
        "decoded": decoded,
    }
    (work / REPORT).write_text(json.dumps(report), encoding="utf-8")


def _load(folder: Path, num_blocks: int) -> tuple[torch.nn.Module, dict[str, Any]]:
    """The model with its first blocks, in fp32, and what transformers says of the loading."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    if num_blocks < config.num_hidden_layers:
        config.num_hidden_layers = num_blocks
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:num_blocks]
    options: dict[str, Any] = {}
    if getattr(config, "attn_logit_softcapping", None):
        options["attn_implementation"] = "eager"  # version 4's others leave the bound out, without a word
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(  # annotated as a model, which here comes in a pair
        folder,
        config=config,
        dtype=torch.float32,
        trust_remote_code=False,
        use_safetensors=True,
        output_loading_info=True,
        **options,
    )
    model, loading = loaded
    return model.eval(), loading


@torch.inference_mode()
def _run(model: torch.nn.Module, tokens: list[int], positions: list[int]) -> Tensor:
    """Logits `[t, v]` of one sequence. The mask keeps positions with gaps from being taken for packed documents."""
    ids = torch.tensor([tokens])
    out = model(
        ids,
        position_ids=torch.tensor([positions]),
        attention_mask=torch.ones_like(ids),
        use_cache=False,
        return_dict=True,
    )
    return out.logits[0].contiguous()


def _tokenize(folder: Path, texts: list[str], add_nothing: bool) -> tuple[list[list[int]], list[str]]:
    """Ids of texts, and texts of ids.

    With `add_nothing` control tokens are neither added nor found in them, whatever the folder says.
    """
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    options = {"add_special_tokens": False, "split_special_tokens": True} if add_nothing else {}
    ids = [tokenizer(text, **options)["input_ids"] for text in texts]
    return ids, [str(tokenizer.decode(each, skip_special_tokens=True)) for each in ids]


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
