"""The doors for code from outside: one function for each kind of thing that a plug-in can bring.

    from megalite import extend

    @extend.activation("cubed")
    def cubed(x):
        return x.relu() ** 3

A plug-in is a module, or a file, that calls these when it is imported; a config names it under `plugins`
(docs/extending.md has an example of each kind). Options that a config may give to a thing are the keyword-only
parameters of its function or class, checked against their annotations before anything starts. A name is given once.

Each door opens the room behind it when it is used, so that a filter rule does not wait for torch.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from megalite.addition import Addition, addition, check_argument, check_call, check_method, made
from megalite.plugins import NAME, PluginError

if TYPE_CHECKING:
    from megalite.architecture.weights import Weight
    from megalite.checkpoint.hf.family import Family

Code = TypeVar("Code", bound=Callable[..., Any])
Door = TypeVar("Door", bound=Callable[..., Any])

NEAR = 0.85
"""How alike two names are, of 1, when one is taken for the other's misprint."""


def _door(way_in: Door) -> Door:
    """A function of this module whose name must be given: `@extend.loss` without brackets would add nothing."""

    @functools.wraps(way_in)
    def checked(name: str, **told: Any) -> Any:
        kind = way_in.__name__.replace("_", " ")
        check_argument(kind, "name", name, isinstance(name, str), f'text, as in @extend.{way_in.__name__}("my_own")')
        return way_in(name, **told)

    return cast("Door", checked)


@_door
def activation(name: str, *, is_gated: bool = False, kept: int | None = None) -> Callable[[Code], Code]:
    """An activation of feed-forward layers, for `model.activation`.

    The function takes what the first product has put out, `[t, f]`, and returns as much; with a gate it is
    `function(gate, up)`. It works number by number, so that any cut by tensor parallelism is right.

    Args:
        is_gated: the layer has a gate beside what it lets through.
        kept: tensors `[t, f]` that the backward pass keeps, the result among them; None for as many as most have.
    """
    from megalite.architecture.activations import ACTIVATIONS, Activation

    def add(code: Code) -> Code:
        is_number = kept is None or (isinstance(kept, int) and not isinstance(kept, bool) and kept > 0)
        check_argument(f"activation {name}", "kept", kept, is_number, "a whole number of at least 1, or None")
        check_argument(f"activation {name}", "is_gated", is_gated, isinstance(is_gated, bool), "True or False")
        _check_without_options("activation", name, code, ("gate", "up") if is_gated else ("x",))
        ACTIVATIONS.add(name, Activation(code, is_gated=is_gated, kept=kept))
        return code

    return add


@_door
def norm(
    name: str, *, has_bias: bool = False, init: Literal["ones", "zeros"] = "ones", of_heads: str = "rmsnorm"
) -> Callable[[Code], Code]:
    """A normalisation of the stream, for `model.norm`.

    The class is made as `Class(size, eps, *, tp, sequence_parallel)` and is a torch module from `[t, h]` to `[t, h]`
    with a parameter `weight` `[h]` and, if it has a bias, `bias`, and no buffer to be saved. `layers.norm.RMSNorm` is
    one to build on: it sees to the gradient of the weight under sequence parallelism.

    Args:
        init: what its weight starts as.
        of_heads: the norm of queries and keys beside it, where a model has one: rmsnorm or zero_centered_rmsnorm.
    """
    from megalite.architecture.norms import NORMS, Norm

    def add(code: Code) -> Code:
        if not inspect.isclass(code):
            raise PluginError(f"norm {name}: found {code!r}, expected a class of torch modules")
        for key, found, choices in (
            ("init", init, ("ones", "zeros")),
            ("of_heads", of_heads, ("rmsnorm", "zero_centered_rmsnorm")),
        ):
            check_argument(f"norm {name}", key, found, found in choices, " or ".join(choices))
        check_argument(f"norm {name}", "has_bias", has_bias, isinstance(has_bias, bool), "True or False")
        check_call(f"norm {name}", code, ("size", "eps"), ("tp", "sequence_parallel"))
        make = partial(made, f"model.norm: {name}", partial(_norm, code, has_bias))
        NORMS.add(name, Norm(make, has_bias=has_bias, init=init, of_heads=of_heads))
        return code

    return add


def _norm(code: Callable[..., Any], has_bias: bool, size: int, eps: float, **axes: Any) -> Any:
    """A module of a norm, with the parameters that it is to have."""
    module = code(size, eps, **axes)
    found = {name: tuple(each.shape) for name, each in module.named_parameters()}
    expected = dict.fromkeys(("weight", "bias") if has_bias else ("weight",), (size,))
    if found != expected:
        raise ValueError(f"it has the parameters {found}, expected {expected}, as has_bias={has_bias} says")
    if others := [name for name in module.state_dict() if name not in expected]:
        raise ValueError(
            f"it has the buffers {others}, which no checkpoint keeps; compute them anew, with persistent=False if they "
            "never change, or leave them out"
        )
    return module


@_door
def attention(name: str) -> Callable[[Code], Code]:
    """A way to mix queries, keys and values, for `model.attention`.

    The function takes `(q, k, v, documents, window)`: q `[t, n, d]`, k and v `[t, m, d]` of this rank's heads, n a
    multiple of m; `documents.lengths` are the tokens of each document of the stream; window is None or the tokens that
    a query sees. It returns `[t, n, d]`, and looks neither ahead nor into another document.
    """
    from megalite.architecture.attentions import ATTENTIONS, Attention

    def add(code: Code) -> Code:
        _check_without_options("attention", name, code, ("q", "k", "v", "documents", "window"))
        ATTENTIONS.add(name, Attention(code))
        return code

    return add


@_door
def optimizer(
    name: str,
    *,
    state: tuple[str, ...] = (),
    tables: str | None = None,
    vectors: str | None = None,
    rate_exponent: float | None = None,
    whole_state: Callable[[Weight], dict[str, tuple[int, ...]]] | None = None,
) -> Callable[[Code], Code]:
    """An optimizer, for `optimizer.name`; its options stand under `optimizer.options`.

    The class has `update(weights, gradients, states, *, lr, decay, step)`, which changes lists of flat tensors in
    place, each any part of a weight: what it does to a number must follow from that number's own history
    (`optim.elementwise`). One that needs whole matrices is an `optim.whole.WholeRule`.

    Args:
        state: names of state with a number for each number of a weight, fp32 and zero at first; `states[name]`. Not
            `weight`, `gradient` or `direction`, which stand beside it.
        tables: the optimizer of the embedding tables and the head, as "adamw", without options; None for this one.
        vectors: that of norms and biases.
        rate_exponent: under muP a matrix's rate is divided by its width multiplier to this power; None: not known.
        whole_state: of a `WholeRule`, from a weight to the shapes of state that one rank keeps whole, by kind.
    """
    from megalite.config.optimizers import OPTIMIZERS, RULES, Optimizer, UpdateRule

    def add(code: Code) -> Code:
        if not hasattr(code, "update") and not _is_whole_rule(name, code):
            raise PluginError(f"optimizer {name}: {code!r} has no method `update`, and is no WholeRule either")
        _check_state_names(name, state)
        is_number = isinstance(rate_exponent, int | float) and math.isfinite(rate_exponent)
        is_right = rate_exponent is None or (is_number and not isinstance(rate_exponent, bool))
        check_argument(f"optimizer {name}", "rate_exponent", rate_exponent, is_right, "a number, or None")
        is_function = whole_state is None or callable(whole_state)
        check_argument(f"optimizer {name}", "whole_state", whole_state, is_function, "a function of a weight, or None")
        for key, other in (("tables", tables), ("vectors", vectors)):
            check_argument(
                f"optimizer {name}", key, other, isinstance(other, str | None), "an optimizer's name, or None"
            )
        making = addition("optimizer", name, code, ())
        for other in filter(None, (tables, vectors)):
            if other not in RULES:
                raise PluginError(f"optimizer {name}: {RULES.unknown(other)}")
            if needed := _required(RULES[other].make):
                raise PluginError(
                    f"optimizer {name}: {other} must be told {needed[0]}, and options are for {name} alone; give it a "
                    "default"
                )
        if hasattr(code, "update"):
            given = ("weights", "gradients", "states")
            check_method(f"optimizer {name}", code, "update", given, ("lr", "decay", "step"))
        rule = UpdateRule(making, state, rate_exponent=rate_exponent, whole_state=whole_state, results_beside=1)
        is_whole = not hasattr(code, "update")
        RULES.add(name, replace(rule, work="megalite.optim.at_work:plain_work") if is_whole else rule)
        OPTIMIZERS.add(name, Optimizer(name, tables or name, vectors or name))
        return code

    return add


def _is_whole_rule(name: str, code: Any) -> bool:
    """Whether a class is one, with all that it must have.

    Raises:
        PluginError: it has not.
    """
    if not hasattr(code, "direction"):
        return False
    from megalite.optim.whole import WholeRule

    is_one = inspect.isclass(code) and issubclass(code, WholeRule)
    if is_one and inspect.isabstract(code):
        missing = ", ".join(sorted(code.__abstractmethods__))
        raise PluginError(f"optimizer {name}: it has no {missing}, which a WholeRule must have")
    return is_one


def _required(code: object) -> list[str]:
    """Options without which code cannot be called."""
    fields = code.options.model_fields if isinstance(code, Addition) else {}
    return [option for option, field in fields.items() if field.is_required()]


def _check_without_state(kind: str, name: str, code: object) -> None:
    """Refuse a torch module that has weights or buffers of its own: they would neither be trained nor saved."""
    state = getattr(code, "state_dict", None)
    if not inspect.isclass(code) and callable(state) and (kept := list(state())):
        raise PluginError(
            f"{kind} {name}: it has weights or buffers ({', '.join(kept)}), which nothing trains and no checkpoint "
            "keeps; give a function of what it is called with"
        )


def _check_without_options(kind: str, name: str, code: Callable[..., Any], given: tuple[str, ...]) -> None:
    """Refuse code that cannot be called with these, or that must be told more, where no setting could."""
    _check_without_state(kind, name, code)
    if needed := _required(addition(kind, name, code, given)):
        raise PluginError(
            f"{kind} {name}: option {needed[0]} has no default, and no setting gives an {kind} options; give it one"
        )


def _check_state_names(optimizer: str, names: Any) -> None:
    """Refuse what could not be told apart in a checkpoint, or from what an update is given."""
    if not isinstance(names, tuple):
        raise PluginError(f"optimizer {optimizer}: state={names!r} is no tuple of names, as ('momentum',)")
    for name in names:
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise PluginError(f"optimizer {optimizer}: state {name!r}: a name has lower-case letters, digits and _")
        if name in ("weight", "gradient", "direction") or names.count(name) > 1:
            raise PluginError(f"optimizer {optimizer}: state {name!r}: that name is taken; choose another")


@_door
def schedule(name: str) -> Callable[[Code], Code]:
    """A learning-rate schedule, for `schedule.name`; its options stand under `schedule.options`.

    The function takes `(k, n, peak, min_lr)` and returns the rate of the k-th step after warmup, of n; k counts from 1.
    It is a function of these alone, since a run that is resumed asks again.
    """
    from megalite.config.schedules import SCHEDULES, Schedule

    def add(code: Code) -> Code:
        SCHEDULES.add(name, Schedule(addition("schedule", name, code, ("k", "n", "peak", "min_lr"))))
        return code

    return add


@_door
def loss(name: str) -> Callable[[Code], Code]:
    """A loss, for `train.loss.name`; its options stand under `train.loss.options`.

    The function takes logits `[c, vocabulary]`, at least fp32, and labels `[c]` of some tokens, and returns the loss of
    each `[c]` by differentiable operations. Tokens that do not count have a weight of zero, and any label.
    """
    from megalite.config.brought import LOSSES

    def add(code: Code) -> Code:
        _check_without_state("loss", name, code)
        LOSSES.add(name, addition("loss", name, code, ("logits", "labels")))
        return code

    return add


@_door
def metric(name: str) -> Callable[[Code], Code]:
    """A number in every step's line of metrics.jsonl, under its name, for `monitor.metrics`.

    The function takes `(step, result, context)` (`train.components.component`) and returns a number. It is called on
    all ranks, so it may be collective; what rank 0 returns is written.
    """
    from megalite.config.brought import METRICS
    from megalite.monitor.records import whose_name

    def add(code: Code) -> Code:
        if (others := whose_name(name)) is not None:
            raise PluginError(f"metric {name}: {others} a number of this name; give it another")
        METRICS.add(name, addition("metric", name, code, ("step", "result", "context")))
        return code

    return add


@_door
def component(name: str) -> Callable[[Code], Code]:
    """A part of the training loop, for `train.components`.

    The class is a `train.components.component.Component`, made as `Class(context, *, options...)`. It is called on all
    ranks at the same points; its `state` is in every checkpoint, and comes back by `load_state`.
    """
    from megalite.config.brought import COMPONENTS
    from megalite.train.components.component import Component

    def add(code: Code) -> Code:
        if not inspect.isclass(code) or not issubclass(code, Component):
            raise PluginError(f"component {name}: found {code!r}, expected a class derived from Component")
        importlib.import_module("megalite.train.components.assemble")  # which loads ours
        if name in {ours.name for ours in Component.__subclasses__() if ours.__module__.startswith("megalite.")}:
            raise PluginError(f"component {name}: megalite has a component of this name; give it another")
        _check_hooks(f"component {name}", code, Component)
        COMPONENTS.add(name, addition("component", name, code, ("context",)))
        return code

    return add


def _check_hooks(who: str, code: type, base: type) -> None:
    """Refuse methods that the loop could not call, or never would because of a slip in their names."""
    hooks = {name: method for name, method in vars(base).items() if inspect.isfunction(method) and name[0] != "_"}
    for name, method in inspect.getmembers(code, callable):
        if name in hooks:
            _, *given = inspect.signature(hooks[name]).parameters
            check_method(who, code, name, tuple(given))
            if inspect.isgeneratorfunction(method):
                raise PluginError(f"{who}: {name}: it has a `yield`, so that a call of it does nothing; use `return`")
        elif name[0] != "_" and (near := difflib.get_close_matches(name, hooks, n=1, cutoff=NEAR)):
            raise PluginError(
                f"{who}: the loop never calls a method {name}; call it {near[0]}, or _{name} if it is the class's own"
            )


@_door
def filter_rule(name: str) -> Callable[[Code], Code]:
    """A rule of `megalite data clean`, for `clean.custom` of a recipe, which says what number a document may have.

    The function takes a text and returns a number.
    """
    from megalite.corpus.rules.settings import FILTER_RULES

    def add(code: Code) -> Code:
        FILTER_RULES.add(name, addition("filter rule", name, code, ("text",)))
        return code

    return add


@_door
def data_source(name: str, *, num_shards: int = 1) -> Callable[[Code], Code]:
    """A kind of source of documents, for `sources: [{kind: NAME, options: ...}]` of a recipe.

    The function takes `(shard, num_shards)` and yields the documents of that shard, the same each time: texts, or
    groups of fields with `text` and, perhaps, `id`.

    Args:
        num_shards: in how many tasks it is read.
    """
    from megalite.corpus.source import SOURCES, BroughtSource

    def add(code: Code) -> Code:
        is_number = isinstance(num_shards, int) and not isinstance(num_shards, bool) and num_shards > 0
        check_argument(f"data source {name}", "num_shards", num_shards, is_number, "a whole number of at least 1")
        SOURCES.add(name, BroughtSource(addition("data source", name, code, ("shard", "num_shards")), num_shards))
        return code

    return add


def family(description: Family) -> Family:
    """A family of Hugging Face models, for `megalite convert` and `train.init_from`; families/*.py are examples."""
    from megalite.checkpoint.hf.families.registry import FAMILIES
    from megalite.checkpoint.hf.family import Family

    check_argument("family", "description", description, isinstance(description, Family), "a Family(...)")
    FAMILIES.add(description.model_type, description)
    return description
