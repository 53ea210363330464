"""What a stage, its products and its messages take on a device, timed.

Blocks are measured as differences between stages of few and of more blocks, so that head and embedding do not count. A
GPU is kept at work before it is timed, on numbers as drawn as those of training: a cool one, and one whose numbers are
all alike, runs at a clock that its power does not allow for long.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor, nn

from megalite.architecture.architecture import Architecture, FeedForwardSpec
from megalite.architecture.attention_costs import projections
from megalite.config.schema import Config
from megalite.layers.documents import Targets
from megalite.layers.gemm import Gemm, choose_gemm
from megalite.layers.parts import choose_parts
from megalite.layers.weight_gradients import WeightGradient
from megalite.model.spec import StageSpec
from megalite.model.transformer import Stage, documents_of
from megalite.parallel.axes import SINGLE, Axis

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TRIES = 9
BUSY_SECONDS = {"cpu": 0.0, "cuda": 1.0}
"""Of the same work, before the tries that count end: power limits show within tenths of a second."""
LAUNCHES = {"cpu": 1, "cuda": 8}
"""Of the same work one behind the other, where the host gives work ahead and would be timed with a single one."""
BLOCKS = 2, 6
"""Of the two stages whose difference is what blocks take."""
IN_A_ROW = 4
"""Times that a message is sent without a wait between."""
NEARLY_NONE = 1e-9


class _Sums:
    """Gradients of weights, which products add to by themselves."""

    def __init__(self) -> None:
        self._totals: dict[nn.Parameter, Tensor] = {}

    def __call__(self, weight: nn.Parameter, gradient: WeightGradient) -> None:
        if weight not in self._totals:
            self._totals[weight] = torch.zeros_like(weight, dtype=torch.float32)
        gradient.add_to(self._totals[weight])


@dataclass(frozen=True)
class Bench:
    """A device with a model."""

    config: Config
    """On one rank, without a pipeline."""
    model: Architecture
    device: torch.device
    is_compiled: bool = False
    """Blocks are, as in training."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the config."""
        return DTYPES[self.config.precision.dtype]

    def seconds(self, work: Callable[[], object]) -> float:
        """What something takes while the other ranks do the same: the median of some times."""
        count = LAUNCHES[self.device.type]

        def several() -> None:
            for _ in range(count):
                work()

        several()
        return self._median(lambda: self._once(several)) / count

    def block_seconds(self, num_tokens: int, tp: Axis = SINGLE) -> float:
        """Of a block, both ways. The two stages take turns, so that both meet what else the machine does.

        Args:
            tp: the ranks that share it; all of them call this.
        """
        few, more = (self._step_of(number, num_tokens, tp) for number in BLOCKS)
        few()
        more()
        return max(NEARLY_NONE, self._median(lambda: self._once(more) - self._once(few)) / (BLOCKS[1] - BLOCKS[0]))

    def seconds_behind(self, work: Callable[[], object], before: Callable[[], object]) -> float:
        """What something takes behind other work, in whose caches and whose order of ranks it begins; some times in a
        row, so that ranks which came late once do not count."""

        def row(*each: Callable[[], object]) -> Callable[[], None]:
            def run() -> None:
                for _ in range(IN_A_ROW):
                    for one in each:
                        one()

            return run

        both, alone = row(before, work), row(before)
        both()
        found = median(self._once(both) - self._once(alone) for _ in range(TRIES))
        return max(NEARLY_NONE, found / IN_A_ROW)

    def _median(self, once: Callable[[], float]) -> float:
        """Of the last tries, when the device has been at work for a while. Not for messages: ranks may try more or less
        often."""
        found, begin = list[float](), time.perf_counter()
        while len(found) < TRIES or time.perf_counter() - begin < BUSY_SECONDS[self.device.type]:
            found.append(once())
        return median(found[-TRIES:])

    def _once(self, work: Callable[[], object]) -> float:
        self._wait()
        begin = time.perf_counter()
        work()
        self._wait()
        return time.perf_counter() - begin

    def product_seconds(self, num_tokens: int) -> float:
        """Of the products of a block, both ways."""
        gemm = choose_gemm(self.device.type, self.dtype)
        return sum(self._of_layer(gemm, num_tokens, *sizes) for sizes in self._linear_sizes())

    def attention_seconds(self, num_tokens: int, lengths: tuple[int, int]) -> float | None:
        """What attention takes longer in documents of the second length than in those of the first, both ways: what
        grows with the scores alone. The two take turns. None where it has more than queries, keys and values."""
        attention, count = self.model.block(0).attention, LAUNCHES[self.device.type]
        if attention.sinks or self.model.attention_dropout:
            return None
        short, long = (self._attention_step(num_tokens, length) for length in lengths)

        def of(step: Callable[[], object]) -> float:
            return self._once(lambda: [step() for _ in range(count)])

        of(short)
        of(long)
        return self._median(lambda: of(long) - of(short)) / count

    def _attention_step(self, num_tokens: int, length: int) -> Callable[[], object]:
        attention = self.model.block(0).attention
        parts = choose_parts(self.model, self.device.type, self.dtype)
        attend = (parts.attend_within if attention.latent is None else parts.attend_latents)(attention.soft_cap)
        tokens = torch.zeros(num_tokens // length, length, dtype=torch.int64, device=self.device)
        heads, groups = attention.num_heads, attention.num_kv_heads
        widths = ((heads, attention.head_dim), (groups, attention.head_dim), (groups, attention.value_dim))
        given = [self.draw(tokens.numel(), *width).requires_grad_() for width in widths]
        gradient, documents = self.draw(tokens.numel(), heads, attention.value_dim), documents_of(tokens)
        return lambda: torch.autograd.grad(attend(*given, documents, attention.window), given, gradient)

    def _linear_sizes(self) -> list[tuple[int, int]]:
        block, hidden = self.model.block(0), self.model.hidden_size
        found = [(each.inputs, each.outputs) for each in projections(block.attention, hidden)]
        mlp = block.feed_forward
        assert isinstance(mlp, FeedForwardSpec), "others were refused"
        return [*found, (hidden, mlp.num_expanding * mlp.width), (mlp.width, hidden)]

    def _of_layer(self, gemm: Gemm, tokens: int, inputs: int, outputs: int) -> float:
        x, weight, grad = (self.draw(*shape) for shape in ((tokens, inputs), (outputs, inputs), (tokens, outputs)))
        total = torch.zeros_like(weight)
        forth = self.seconds(lambda: gemm.multiply(x, weight))
        back = self.seconds(lambda: gemm.multiply(grad, weight.t()))
        return forth + back + self.seconds(lambda: gemm.begin_product(total, grad, x))

    def _step_of(self, num_blocks: int, num_tokens: int, tp: Axis) -> Callable[[], object]:
        model = self.model.model_copy(update={"num_layers": num_blocks, "mtp": None})
        take = _Sums() if tp.size > 1 else None  # beside whose products messages travel
        parts = choose_parts(model, self.device.type, self.dtype, take_gradient=take)
        stage = Stage(StageSpec(model, tp=tp, parts=parts))
        stage = stage.to(self.device, self.dtype).train()
        if self.is_compiled:
            stage.compile_blocks()
        length = min(num_tokens, self.config.batch.seq_len)
        rows = max(1, num_tokens // length)
        tokens = torch.randint(self.model.vocab_size, (rows, length), device=self.device)
        targets = Targets(tokens.flatten(), torch.ones(tokens.numel(), device=self.device) / tokens.numel())

        def step() -> None:
            stage(tokens.flatten(), documents_of(tokens), targets).backward()

        return step

    def draw(self, *shape: int) -> Tensor:
        """Random numbers, as weights have them."""
        return torch.randn(shape, device=self.device, dtype=self.dtype)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
