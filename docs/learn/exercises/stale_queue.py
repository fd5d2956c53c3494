"""A queue whose samples are never too old (chapter 10)."""


class StaleQueue:
    """Groups between samplers and the learner; none is dropped, whatever the order they finish in.

    A step takes the next `groups_per_step` groups in the order in which they were begun, and makes
    version v + 1 of version v. A group begun with version v must be learned from at version
    v + `max_staleness` at the latest. Therefore samplers may not always begin another group.
    """

    def __init__(self, groups_per_step, max_staleness):
        """The learner has version 0; nothing is begun."""
        raise NotImplementedError

    def may_begin(self):
        """Returns whether a group that is begun now keeps the bound."""
        raise NotImplementedError

    def begin(self):
        """Returns the number of a new group, from 0 on; RuntimeError if none may be begun."""
        raise NotImplementedError

    def finish(self, number, group):
        """Puts a finished group into the queue."""
        raise NotImplementedError

    def take(self):
        """Returns the groups of the next step in their order, or None while one is unfinished."""
        raise NotImplementedError
