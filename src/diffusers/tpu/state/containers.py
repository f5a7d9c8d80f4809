"""What can change in place: dicts, lists, sets, variables of closures, classes. A copy of each, compared and put back."""

import types


def copy_of(container):
    """What the container holds now; comparing it with the container later is one comparison in C, by identity first."""
    if isinstance(container, types.CellType):
        return types.CellType(*content(container))
    if isinstance(container, (dict, types.MappingProxyType)):
        return dict(container)
    return list(container) if isinstance(container, list) else set(container)


def differ(now, before) -> bool:
    """Whether the container no longer holds what its copy does."""
    try:
        return bool(now != before)
    except Exception:  # an array in the place of another: their comparison is an array, or refused
        return True


def put_back(container, before, cls: type | None = None):
    """The container holds what its copy does. `cls`: whose attributes the container is."""
    if isinstance(container, types.CellType):
        (container.cell_contents,) = content(before) or (None,)
    elif isinstance(container, list):
        container[:] = before
    elif isinstance(container, set):
        container.clear()
        container.update(before)
    else:
        _put_back_dict(container, before, cls)


def _put_back_dict(container, before: dict, cls: type | None):
    for name in container.keys() - before.keys():
        delattr(cls, name) if cls is not None else container.__delitem__(name)
    for name, value in before.items():
        if name not in container or container[name] is not value:
            setattr(cls, name, value) if cls is not None else container.__setitem__(name, value)


def rewritten(now, before, shadowed: type | None = None) -> bool:
    """Whether a number, flag or name that was there has another value: a counter, say. What is merely new does not count.

    `shadowed`: the class whose attributes an instance's may hide: a number that takes the place of the class's counts too.
    """
    if isinstance(now, list):
        return any(_other(x, y) for x, y in zip(now, before))
    if not isinstance(now, dict):
        return False
    return any(
        _other(value, before[name] if name in before else getattr(shadowed, name, None))
        for name, value in now.items()
        if name in before or (shadowed is not None and hasattr(shadowed, name))
    )


def _other(now, before) -> bool:
    plain = (bool, int, float, str)
    return isinstance(now, plain) and isinstance(before, plain) and now != before


def content(cell: types.CellType) -> tuple:
    """What the variable holds, in a tuple of one; none while it is not bound."""
    try:
        return (cell.cell_contents,)
    except ValueError:
        return ()
