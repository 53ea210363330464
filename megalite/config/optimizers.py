"""Optimizers by name: which rule updates which weights, what a rule keeps, and what it reads of `optimizer`. No torch.

    optimizer   matrices of the blocks   tables and head   norms, biases     kept for each number of a matrix
    adamw       adamw                    adamw             adamw             two moments, 8 bytes
    adamw8bit   adamw8bit                adamw8bit         adamw             two codes and two scales a block, 2 bytes
    lion        lion                     lion              lion              momentum, 4 bytes
    adafactor   adafactor                adafactor         adafactor         a row and a column, next to nothing
    muon        muon                     adamw             adamw             momentum, 4 bytes
    muon8bit    muon8bit                 adamw8bit         adamw             a code and a scale a block, 1 byte
    lion8bit    lion8bit                 lion8bit          lion              a code and a scale a block, 1 byte
    soap        soap                     adamw             adamw             two moments, and squares of both sides
    sgd         sgd                      sgd               sgd               momentum, 4 bytes

    schedule_free_adamw    itself, for all weights                           a second moment, and z - x, 8 bytes

State that has a number for every number of the weight is cut as the weight is, by tp and by ZeRO. adafactor's factors,
the blocks of 8 bits and soap's bases are not such: they are kept for whole rows or whole weights, by one rank
(`optim.exchange`). In a checkpoint all are tensors named after their canonical weight, in fp32. What has 8 bits is
saved unpacked, so that a run may go on with adamw, muon or lion and back, and packing it again gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from megalite.addition import Addition
from megalite.plugins import Table


@dataclass(frozen=True)
class UpdateRule:
    """How a weight is updated."""

    make: str | Addition
    """`module:class`, made of the section `optimizer`; or a plug-in's class, made of `optimizer.options`."""
    state: tuple[str, ...] = ()
    """State with a number for each number of the weight, by its name in checkpoints."""
    settings: tuple[str, ...] = ()
    """Keys of the section that it reads."""
    rate_exponent: float | None = None
    """muP divides a matrix's rate by its width multiplier to this power (`optim.groups` says why); None: not known."""
    whole_state: str | Callable[[Any], dict[str, tuple[int, ...]]] | None = None
    """`module:function` from a weight and the section to the shapes, by kind, of state that one rank keeps whole; or a
    plug-in's function, from a weight alone."""
    state_bytes: str | None = None
    """`module:function` from a weight to the bytes of its state, where a number does not take four."""
    multiplies: bool = False
    """It is given the format of its matrix products, too."""
    multiply_adds: str | None = None
    """`module:function` from a weight and the section to what a step's products of a whole matrix take; None for none.
    Those of a rule that is given no format are in fp32."""
    results_beside: int = 0
    """Of an elementwise rule: fp32 numbers that it makes for each that it is at work on."""
    work: str | None = None
    """Of a rule that works on whole units: `module:function` from the shape of one, and formats, to the bytes beside it
    (`optim.at_work`)."""
    in_rows: bool = False
    """Its units are runs of rows (`optim.rules.unit_rows`), not whole weights."""
    makes_what_travels: bool = False
    """To units' owners, who get the gradients themselves otherwise."""
    travels_as_products: bool = False
    """In the format of its products; else in fp32."""
    averages: bool = False
    """The model is an average of the weights, not the ones that gradients are taken at (`optim.averaging`)."""


@dataclass(frozen=True)
class Optimizer:
    """Names of the rules that update each kind of weight."""

    matrices: str
    """In the blocks."""
    tables: str
    """Matrices outside: the embedding tables and the head."""
    vectors: str
    """Norms and biases."""

    @property
    def rules(self) -> tuple[str, ...]:
        """Each once; the matrices' comes first."""
        return tuple(dict.fromkeys((self.matrices, self.tables, self.vectors)))


MOMENTS = ("exp_avg", "exp_avg_sq")

LEAD = "z_minus_x"
"""State of rules that average (`optim.averaging`)."""

FROZEN = "frozen"
"""The rule of weights that stay as they are (`optimizer.groups`); no optimizer by itself."""

_IN = "megalite.optim"

RULES: Table[UpdateRule] = Table(
    "rule of an optimizer",
    {
        "adamw": UpdateRule(f"{_IN}.elementwise:AdamW", MOMENTS, ("betas", "eps"), rate_exponent=1.0),
        "adamw8bit": UpdateRule(
            f"{_IN}.adamw8bit:AdamW8bit",
            settings=("betas", "eps"),
            rate_exponent=1.0,
            whole_state=f"{_IN}.rules:unpacked_shapes",
            state_bytes=f"{_IN}.rules:packed_bytes",
            work=f"{_IN}.at_work:packed_adam_work",
            in_rows=True,
        ),
        "lion": UpdateRule(f"{_IN}.elementwise:Lion", ("exp_avg",), ("betas",), rate_exponent=1.0, results_beside=1),
        "adafactor": UpdateRule(
            f"{_IN}.adafactor:Adafactor",
            settings=("factored_decay", "update_clip"),
            whole_state=f"{_IN}.rules:factored_shapes",
            work=f"{_IN}.at_work:factored_work",
        ),
        "muon": UpdateRule(
            f"{_IN}.muon:Muon",
            ("momentum",),
            ("momentum", "nesterov", "newton_schulz_steps"),
            rate_exponent=0.5,
            multiplies=True,
            multiply_adds=f"{_IN}.rules:orthogonal_multiply_adds",
            work=f"{_IN}.at_work:orthogonal_work",
            makes_what_travels=True,
            travels_as_products=True,
        ),
        "muon8bit": UpdateRule(
            f"{_IN}.momentum8bit:Muon8bit",
            settings=("momentum", "nesterov", "newton_schulz_steps"),
            rate_exponent=0.5,
            multiplies=True,
            multiply_adds=f"{_IN}.rules:orthogonal_multiply_adds",
            whole_state=f"{_IN}.rules:momentum_shapes",
            state_bytes=f"{_IN}.rules:packed_matrix_bytes",
            work=f"{_IN}.at_work:packed_orthogonal_work",
        ),
        "lion8bit": UpdateRule(
            f"{_IN}.momentum8bit:Lion8bit",
            settings=("betas",),
            rate_exponent=1.0,
            whole_state=f"{_IN}.rules:mean_shapes",
            state_bytes=f"{_IN}.rules:packed_rows_bytes",
            work=f"{_IN}.at_work:packed_lion_work",
            in_rows=True,
        ),
        "soap": UpdateRule(
            f"{_IN}.soap:Soap",
            settings=("betas", "eps", "precondition_every", "max_precondition_dim"),
            whole_state=f"{_IN}.rules:soap_shapes",
            multiply_adds=f"{_IN}.rules:soap_multiply_adds",
            work=f"{_IN}.at_work:soap_work",
        ),
        "sgd": UpdateRule(f"{_IN}.elementwise:Sgd", ("momentum",), ("momentum", "nesterov"), results_beside=1),
        "schedule_free_adamw": UpdateRule(
            f"{_IN}.elementwise:ScheduleFreeAdamW",
            (LEAD, "exp_avg_sq"),
            ("betas", "eps"),
            rate_exponent=1.0,
            averages=True,
            results_beside=1,
        ),
        FROZEN: UpdateRule(f"{_IN}.elementwise:Frozen", rate_exponent=0.0),
    },
)

OPTIMIZERS: Table[Optimizer] = Table(
    "optimizer",
    {
        "adamw": Optimizer("adamw", "adamw", "adamw"),
        "adamw8bit": Optimizer("adamw8bit", "adamw8bit", "adamw"),
        "lion": Optimizer("lion", "lion", "lion"),
        "adafactor": Optimizer("adafactor", "adafactor", "adafactor"),
        "muon": Optimizer("muon", "adamw", "adamw"),
        "muon8bit": Optimizer("muon8bit", "adamw8bit", "adamw"),
        "lion8bit": Optimizer("lion8bit", "lion8bit", "lion"),
        "soap": Optimizer("soap", "adamw", "adamw"),
        "sgd": Optimizer("sgd", "sgd", "sgd"),
        "schedule_free_adamw": Optimizer("schedule_free_adamw", "schedule_free_adamw", "schedule_free_adamw"),
    },
)


def settings_read(names: Iterable[str]) -> set[str]:
    """The keys of the section that optimizers read, of those that not all do."""
    return {key for name in names for rule in OPTIMIZERS[name].rules for key in RULES[rule].settings}


def averages(name: str) -> bool:
    """Whether the model that an optimizer trains is an average of the weights that it updates."""
    return any(RULES[rule].averages for rule in OPTIMIZERS[name].rules)


def scales_with_width(name: str) -> bool:
    """Whether muP knows all rules of an optimizer."""
    return all(RULES[rule].rate_exponent is not None for rule in OPTIMIZERS[name].rules)
