"""A queue whose samples are never too old (chapter 10)."""


class StaleQueue:
    def __init__(self, groups_per_step, max_staleness):
        self._each, self._bound = groups_per_step, max_staleness
        self._version, self._begun, self._finished = 0, 0, {}

    def may_begin(self):
        # The n-th group is learned from in step n // each, at that version.
        return self._begun // self._each <= self._version + self._bound

    def begin(self):
        if not self.may_begin():
            raise RuntimeError("it would be too old when it is learned from")
        self._begun += 1
        return self._begun - 1

    def finish(self, number, group):
        self._finished[number] = group

    def take(self):
        wanted = range(self._version * self._each, (self._version + 1) * self._each)
        if any(number not in self._finished for number in wanted):
            return None
        self._version += 1
        return [self._finished.pop(number) for number in wanted]
