"""Hooks around an update: in order, none in another's place."""

from __future__ import annotations

from megalite.engine.hooks import FIRST, LAST, HookList, UpdateHooks


def test_hooks_are_called_in_order():
    """By order, then as they were added; one that is taken away leaves the others, also an equal one."""
    hooks: HookList = HookList()
    for name, order in (("last", LAST), ("b", 0), ("first", FIRST), ("c", 0)):
        hooks.add(name, order=order)
    remove = hooks.add("b")
    assert list(hooks) == ["first", "b", "c", "b", "last"]
    remove()
    assert (list(hooks), len(hooks)) == (["first", "b", "c", "last"], 4)


def test_the_first_reason_counts():
    """All say nothing: the update is made. The first that has a reason is the last that is asked."""
    hooks, asked = UpdateHooks(), []
    assert hooks.veto(1.0, 2.0) == ""
    for name, why in (("a", ""), ("b", "no"), ("c", "never")):
        hooks.vetoes.add(lambda loss, norm, name=name, why=why: (asked.append((name, loss, norm)), why)[1])
    assert hooks.veto(1.0, 2.0) == "no"
    assert asked == [("a", 1.0, 2.0), ("b", 1.0, 2.0)]


def test_hooks_stand_around_each_other():
    """The first is the outermost; the update is made once, in the middle, and also where nobody is around it."""
    hooks, seen = UpdateHooks(), []
    hooks.apply(lambda: seen.append("update"))
    assert seen == ["update"]
    seen.clear()

    def around(name):
        def hook(update):
            seen.append(f"before {name}")
            update()
            seen.append(f"after {name}")

        return hook

    hooks.around_update.add(around("inner"))
    hooks.around_update.add(around("outer"), order=FIRST)
    hooks.apply(lambda: seen.append("update"))
    assert seen == ["before outer", "before inner", "update", "after inner", "after outer"]


def test_who_prepares():
    """Everyone before an update is called, once."""
    hooks, seen = UpdateHooks(), []
    hooks.before_update.add(lambda: seen.append("look"))
    hooks.before_update.add(lambda: seen.append("wait"), order=FIRST)
    hooks.prepare()
    assert seen == ["wait", "look"]
