"""What a record of micro-batches does with passes that are well behaved, and with those that are not; asked by
`test_recorded`, the question being the library of the device."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.stand_in.cuda import pretend, seen

NUM_TOKENS, LENGTH = 64, 32


def main(library: str) -> dict[str, Any]:
    """Try every kind of pass."""
    device = pretend(Path(library))
    import torch

    torch.set_num_threads(1)
    found = {
        "well behaved": try_pass(lambda batch, scale: batch.tokens.float() * scale),
        "remembers": try_pass(remembering()),
        "asks the host": try_pass(lambda batch, scale: batch.tokens.float() * batch.tokens.sum().item() * scale),
        "numbers of the host's": try_pass(lambda batch, scale: torch.ones(NUM_TOKENS).to(scale.device) * scale),
        "borders": try_pass(lambda batch, scale: batch.tokens.float() * documents(batch).lengths[0] * scale),
        "constants": try_constants(),
        "shapes": try_shapes(),
        "nothing finite": try_pass(lambda batch, scale: batch.tokens.float() * torch.nan),
        "many": try_many_micro_batches(),
        "forgotten": try_forgetting(),
    }
    del device
    return found


Pass = Callable[[Any, Any], Any]
"""What it adds for each token, `[t]`."""


def documents(batch: Any) -> Any:
    """As layers see them."""
    from megalite.engine.batch_cut import documents_of_batch

    return documents_of_batch(batch)


def remembering() -> Pass:
    """A pass that adds up what it was given, each time in another tensor."""
    kept: list[Any] = []

    def add(batch: Any, scale: Any) -> Any:
        kept.append(batch.tokens + kept[-1] if kept else batch.tokens)
        return kept[-1].float() * scale

    return add


def make_batch(seed: int, lengths: tuple[int, ...]) -> Any:
    """A micro-batch of two sequences."""
    import torch

    from megalite.data.loader import Batch

    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, 1000, (NUM_TOKENS,), generator=generator)
    borders = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    assert borders[-1] == NUM_TOKENS
    positions = torch.cat([torch.arange(length) for length in lengths])
    mask = torch.ones(NUM_TOKENS, dtype=torch.bool)
    return Batch(tokens, tokens, mask, positions, borders, LENGTH, torch.arange(NUM_TOKENS)).to("cuda")


class Trial:
    """A pass whose result is added to a sum, with and without records.

    Args:
        add: what it adds.
        constants: what it takes from the host.
    """

    def __init__(self, add: Pass, constants: Callable[[], Any] = lambda: None):
        import torch

        from megalite.engine.native.graphs import MicroBatchGraphs

        self.total = torch.zeros(NUM_TOKENS, device="cuda")
        self.add = add
        self.graphs = MicroBatchGraphs(self.run, lambda: [self.total], constants)

    def run(self, batch: Any, scale: Any) -> Any:
        """Both passes."""
        added = self.add(batch, scale)
        self.total += added
        return added.sum().view(1)

    def differs(self, step: int, lengths: list[tuple[int, ...]]) -> float:
        """How far a step with records is from one without: sums and losses."""
        import torch

        scale = torch.full((), 1.0 / (step + 1), device="cuda")
        batches = [make_batch(10 * step + number, each) for number, each in enumerate(lengths)]
        self.total.zero_()
        losses, total = self.graphs.train(batches, scale), self.total.clone()
        self.total.zero_()
        wanted = torch.stack([self.run(batch, scale) for batch in batches]).sum(0)
        both = torch.cat((losses - wanted, total - self.total)).nan_to_num()
        return both.abs().max().item()


TWO, THREE, FIVE = (32, 32), (10, 22, 32), (1, 2, 3, 26, 32)


def try_pass(add: Pass) -> dict[str, Any]:
    """Four steps of three micro-batches, of two shapes: five documents are filled up to eight, and three to four."""
    from megalite.errors import UnavailableError

    trial = Trial(add)
    seen.clear()
    try:
        worst = max(trial.differs(step, [TWO, THREE, TWO] if step % 2 else [THREE, TWO, TWO]) for step in range(5))
    except UnavailableError as error:
        return {"refused": str(error)}
    return {"worst": worst, "repeated": seen.calls["graph replayed"]}


def try_constants() -> dict[str, Any]:
    """A number of the host's that changes after three steps: recorded again."""
    factor = [1.0]
    trial = Trial(lambda batch, scale: batch.tokens.float() * scale * factor[0], lambda: tuple(factor))
    seen.clear()
    worst = []
    for step in range(8):
        factor[0] = 1.0 if step < 4 else 3.0
        worst.append(trial.differs(step, [TWO, TWO]))
    return {"worst": max(worst), "repeated": seen.calls["graph replayed"], "records": num_records(trial)}


def try_shapes() -> dict[str, Any]:
    """More shapes than are recorded: what is too many is computed as ever."""
    from megalite.engine.native import graphs

    before, graphs.MOST_GRAPHS = graphs.MOST_GRAPHS, 2
    trial = Trial(lambda batch, scale: batch.tokens.float() * scale)
    seen.clear()
    worst = max(trial.differs(step, [each]) for step in range(3) for each in (TWO, THREE, FIVE))
    graphs.MOST_GRAPHS = before
    return {"worst": worst, "repeated": seen.calls["graph replayed"], "records": num_records(trial)}


def num_records(trial: Trial) -> int:
    """Of shapes that are repeated from now on."""
    return sum(each.graph is not None for each in trial.graphs._by_shape.values())


def try_many_micro_batches() -> dict[str, Any]:
    """Losses are added up in their order, however many there are."""
    import torch

    trial = Trial(lambda batch, scale: batch.tokens.float() * 1.1 * scale)
    differs = []
    for step in range(4):
        batches = [make_batch(100 * step + number, TWO) for number in range(23)]
        scale = torch.full((), 0.3, device="cuda")
        trial.total.zero_()
        losses = trial.graphs.train(batches, scale)
        wanted = torch.zeros((), device="cuda")
        for batch in batches:
            wanted += trial.run(batch, scale)[0]
        differs.append((losses[0] - wanted).abs().item())
    return {"worst": max(differs)}


def try_forgetting() -> dict[str, Any]:
    """After it the first micro-batch is one that was never seen."""
    trial = Trial(lambda batch, scale: batch.tokens.float() * scale)
    seen.clear()
    worst = []
    for step in range(4):
        worst.append(trial.differs(step, [TWO]))
        if step == 1:
            trial.graphs.forget()
    return {"worst": max(worst), "repeated": seen.calls["graph replayed"]}


if __name__ == "__main__":
    answer = main(json.load(sys.stdin)["library"])
    print(json.dumps(answer), flush=True)
    os._exit(0)  # threads of autograd's
