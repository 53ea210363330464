"""The optimizer that DeepSpeed steps: it knows which numbers of which weight it holds.

DeepSpeed shows an optimizer flat tensors, in which the weights of a group lie one after the other and end anywhere.
Here all weights are in one group, so that a step sees all gradients at once, and `bind` tells which run of each flat
tensor belongs to which canonical weight. Everything that differs between weights (rule, rate, decay, clipping) follows
from that, and is the same in every layout.

    flat gradient of DeepSpeed -> slices by canonical weight -> rules -> the same memory
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import overload

import torch
from torch import Tensor

from megalite.architecture.weights import Rectangle, Weight
from megalite.config.optimizers import FROZEN
from megalite.optim.averaging import Averaging, AveragingState
from megalite.optim.elementwise import ElementwiseRule, ScheduleFreeAdamW, shrink_and_add
from megalite.optim.exchange import Exchange, Unit
from megalite.optim.gradients import GradientChanges
from megalite.optim.groups import Pacing, Rates
from megalite.optim.qk_clip import scale_rows
from megalite.optim.rounding import update_and_round, update_in_place
from megalite.optim.slices import Slice, batches
from megalite.optim.whole import Placed, WholeRule
from megalite.parallel.axes import Axis

Rule = ElementwiseRule | ScheduleFreeAdamW | WholeRule


@dataclass(frozen=True)
class OwnedState:
    """State of some rows of a weight that one rank keeps whole."""

    unit: Unit
    tensors: Placed
    """fp32."""
    is_live: bool
    """The tensors are the memory that is worked on, not made for the moment."""


class SlicedOptimizer(torch.optim.Optimizer):
    """Updates slices of weights by the rule that each weight has.

    Args:
        parameters: of the stage, in order.
        rules: by name.
        state: of each rule the kinds of state with a number for each number of a weight.
        rule_of: name of a weight's rule.
        rates_of: a weight's factor on the learning rate and its decay.
        seed: of the rounding of weights that live in bf16.
        changes: makes what changes the gradients first, given slices, axis, `world`, `tp_rank` and `device`.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        *,
        lr: float,
        rules: dict[str, Rule],
        state: dict[str, tuple[str, ...]],
        rule_of: Callable[[Weight], str],
        rates_of: Callable[[Weight], Rates],
        seed: int,
        changes: Callable[..., GradientChanges],
    ):
        super().__init__(list(parameters), {"lr": lr})
        self._rules, self._kinds = rules, state
        self._rule_of, self._rates_of, self._make_changes = rule_of, rates_of, changes
        self._seed, self._rounds = seed, False  # rounds by chance: weights in bf16
        self._changes: GradientChanges | None = None
        self._exchanges: dict[str, Exchange] = {}
        self._members: dict[str, dict[Rates, list[int]]] = {}
        self._places: list[tuple[Tensor, int, int]] = []
        self.slices: list[Slice] = []
        """What this rank updates, with its state."""
        self.num_updates = 0
        """Steps that changed the weights."""
        self.pacing = Pacing()
        """Of the coming step."""
        self.averaging = Averaging()
        """Of weights whose rule averages."""

    def bind(
        self, slices: Iterable[Slice], flat_weights: Sequence[Tensor], axis: Axis, world: Axis, tp_rank: int
    ) -> None:
        """Tell what lies where, and make the state. Collective over the axis.

        Args:
            slices: this rank's parts of the weights: views of `flat_weights`.
            flat_weights: the tensors that DeepSpeed hands over with gradients.
            axis: ranks that share these weights: dp x tp under ZeRO, tp without.
            world: all ranks of the run.
            tp_rank: this rank's place in tensor parallelism.
        """
        self.slices = [replace(part, tensors=self._with_state(part)) for part in slices]
        self._places = [_find(part.tensors["weight"], flat_weights) for part in self.slices]
        device = flat_weights[0].device
        self._rounds = flat_weights[0].dtype == torch.bfloat16
        self._changes = self._make_changes(self.slices, axis, world=world, tp_rank=tp_rank, device=device)
        self._members = {name: {} for name in self._rules}
        for index, part in enumerate(self.slices):
            weight = part.local.weight
            self._members[self._rule_of(weight)].setdefault(self._rates_of(weight), []).append(index)
        for name, rule in self._rules.items():
            if isinstance(rule, WholeRule):
                self._exchanges[name] = self._start(name, rule, axis, tp_rank, device)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update the weights; nothing happens when the gradients have been taken away, as a skipped step does.

        Args:
            closure: called first, as torch's own optimizers do; its result is returned.
        """
        loss = None if closure is None else closure()
        self._step_all()
        return loss

    @torch.no_grad()
    def _step_all(self) -> None:
        gradients = [_gradient(*place) for place in self._places]
        present = [gradient for gradient in gradients if gradient is not None]
        if len(present) < len(gradients):
            assert not present, "some gradients are missing"
            return
        self.num_updates += 1
        self.averaging.advance(self.param_groups[0]["lr"], self.pacing.lr_of_groups)
        assert self._changes is not None, "not bound"
        if self._changes.are_any:
            present = [gradient.float() for gradient in present]  # no copy where they are fp32
            self._changes.apply(present, self.num_updates)
        for name, rule in self._rules.items():
            if isinstance(rule, WholeRule):
                self._step_whole(name, rule, present)
            else:
                self._step_elementwise(name, rule, present)
        scale_rows(self.slices, self.pacing.row_scales, rounds=self._rounds, seed=self._seed, step=self.num_updates)

    def gradients(self) -> list[Tensor]:
        """The gradient of each slice, flat: only where a step is about to be made."""
        return [gradient for place in self._places if (gradient := _gradient(*place)) is not None]

    def forget_frozen(self) -> None:
        """Make the gradients of weights that stay as they are zero: they are no part of anything."""
        if FROZEN in self._members:
            gradients = [_gradient(*self._places[index]) for index in self._indices(FROZEN)]
            for gradient in gradients:
                if gradient is not None:
                    gradient.zero_()

    @property
    def beta(self) -> float | None:
        """Of weights whose rule averages (`optim.averaging`); None where none does."""
        return next((rule.betas[0] for rule in self._rules.values() if isinstance(rule, ScheduleFreeAdamW)), None)

    def averaging_state(self) -> AveragingState:
        """Of the averages, for `set_averaging`; empty where nothing is averaged."""
        return {} if self.beta is None else self.averaging.state()

    def set_averaging(self, state: AveragingState) -> None:
        """Go on from a state; an optimizer that has made no update has nothing to go on from."""
        self.averaging.load(state if self.num_updates else {})

    def owned_states(self) -> Iterator[OwnedState]:
        """State that this rank keeps whole."""
        for name, exchange in self._exchanges.items():
            rule = self._rules[name]
            assert isinstance(rule, WholeRule)
            for unit in exchange.units:
                tensors = rule.state(unit)
                if tensors:
                    yield OwnedState(unit, tensors, rule.is_state_live)

    def load_owned_states(self, read: Callable[[Weight, str, Rectangle, tuple[int, ...]], Tensor]) -> None:
        """Set the state that this rank keeps whole; `read` yields a rectangle of a kind, given its whole shape."""
        for name, exchange in self._exchanges.items():
            rule = self._rules[name]
            assert isinstance(rule, WholeRule)
            for unit in exchange.units:
                rule.load(unit, partial(read, unit.weight))

    def elementwise_kinds(self, weight: Weight) -> tuple[str, ...]:
        """The state that has a number for each number of a weight."""
        return self._kinds[self._rule_of(weight)]

    def _with_state(self, part: Slice) -> dict[str, Tensor]:
        weight, kinds = part.tensors["weight"], self.elementwise_kinds(part.local.weight)
        return {"weight": weight, **{kind: torch.zeros_like(weight, dtype=torch.float32) for kind in kinds}}

    def _start(self, name: str, rule: WholeRule, axis: Axis, tp_rank: int, device: torch.device) -> Exchange:
        exchange = Exchange(
            [self.slices[index] for index in self._indices(name)],
            axis,
            tp_rank,
            like=torch.empty(0, dtype=rule.wire_dtype, device=device),
            rows_of_units=rule.rows_of_units,
            cost_of_unit=rule.cost,
        )
        for unit in exchange.units:
            rule.start(unit, device)
        return exchange

    def _indices(self, name: str) -> list[int]:
        """The slices that a rule updates, those of one rate together."""
        return [index for members in self._members[name].values() for index in members]

    def _states(self, name: str) -> dict[str, dict[int, Tensor]]:
        """The state of a rule's slices, by kind and slice."""
        indices = self._indices(name)
        return {kind: {i: self.slices[i].tensors[kind] for i in indices} for kind in self._kinds[name]}

    def _step_elementwise(self, name: str, rule: ElementwiseRule | ScheduleFreeAdamW, gradients: list[Tensor]) -> None:
        def update(weights: list[Tensor], columns: dict[str, list[Tensor]], *, lr: float, rates: Rates) -> None:
            given, decay = columns["gradient"], self._decay(rates)
            if rates.is_coupled and decay:
                given, decay = list(torch._foreach_add(given, weights, alpha=decay)), 0.0
            make: Callable[..., None] = rule.update
            if isinstance(rule, ScheduleFreeAdamW):
                make = partial(rule.update, share=self.averaging.share(rates.group))
            make(weights, given, columns, lr=lr, decay=decay, step=self.num_updates)

        self._update(name, {"gradient": dict(enumerate(gradients)), **self._states(name)}, update)

    def _step_whole(self, name: str, rule: WholeRule, gradients: list[Tensor]) -> None:
        def update(weights: list[Tensor], columns: dict[str, list[Tensor]], *, lr: float, rates: Rates) -> None:
            decay = 0.0 if rates.is_coupled else self._decay(rates)
            shrink_and_add(weights, columns["direction"], lr=lr, decay=decay)

        def outgoing(some: list[int]) -> list[Tensor]:
            mine = [self._with_coupled_decay(indices[each], gradients[indices[each]].float()) for each in some]
            return rule.outgoing(mine, {kind: [of[indices[each]] for each in some] for kind, of in states.items()})

        def take(arrived: dict[int, Tensor]) -> None:
            for some in batches(list(arrived), lambda each: arrived[each].numel()):
                directions = {indices[e]: rule.incoming(self.slices[indices[e]].local.weight, arrived[e]) for e in some}
                self._update(name, {"direction": directions}, update)

        indices, states, step = self._indices(name), self._states(name), self.num_updates
        self._exchanges[name].map(outgoing, lambda unit, whole: rule.direction(unit, whole, step), take)

    def _update(self, name: str, columns: dict[str, dict[int, Tensor]], update: Callable[..., None]) -> None:
        """Update those weights of a rule that the columns are of, those of one rate together; see `rounding.Update`."""
        there = next(iter(columns.values())).keys()
        for rates, all_members in self._members[name].items():
            members = [index for index in all_members if index in there]
            parts = [self.slices[index] for index in members]
            of_parts = {kind: [column[index] for index in members] for kind, column in columns.items()}
            step = partial(update, lr=self._lr(rates), rates=rates)
            if self._rounds:
                update_and_round(parts, of_parts, step, seed=self._seed, step=self.num_updates)
            else:
                update_in_place(parts, of_parts, step)

    def _with_coupled_decay(self, index: int, gradient: Tensor) -> Tensor:
        """A slice's gradient in fp32, with decay times weight added where it is coupled."""
        part = self.slices[index]
        rates = self._rates_of(part.local.weight)
        decay = self._decay(rates) if rates.is_coupled else 0.0
        return gradient.add(part.tensors["weight"], alpha=decay) if decay else gradient

    def _lr(self, rates: Rates) -> float:
        of_run = self.param_groups[0]["lr"]
        return rates.lr_scale * (of_run if rates.group is None else self.pacing.lr_of_groups.get(rates.group, of_run))

    def _decay(self, rates: Rates) -> float:
        return rates.weight_decay * self.pacing.decay_scale


def _find(weight: Tensor, flat_weights: Sequence[Tensor]) -> tuple[Tensor, int, int]:
    """The flat tensor that a slice is part of, where in it the slice begins, and its length."""
    for flat in flat_weights:
        offset, remainder = divmod(weight.data_ptr() - flat.data_ptr(), flat.element_size())
        if 0 <= offset < flat.numel():
            assert remainder == 0
            return flat, offset, weight.numel()
    raise AssertionError("a slice lies in none of the optimizer's tensors")


def _gradient(flat: Tensor, start: int, length: int) -> Tensor | None:
    return None if flat.grad is None else flat.grad.view(-1).narrow(0, start, length)
