"""What was found out about a call, kept for later calls that are like it: see _torch's likeness.

A plan holds no tensor and is never changed, so that threads can share it.
"""

_MOST = 1024  # of one kind: the lengths of texts may all differ
_TABLES: list[dict[object, object]] = []


def table():
    """A dict of plans, empty at first. Fill it with `remember`."""
    _TABLES.append({})
    return _TABLES[-1]


def remember(plans, key, plan):
    """plans[key] = plan in a dict that does not grow for ever."""
    if len(plans) >= _MOST:
        plans.clear()
    plans[key] = plan


def forget():
    """Empties all tables, for tests that put another library in a library's place."""
    for plans in _TABLES:
        plans.clear()
