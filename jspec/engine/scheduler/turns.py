"""Turns of tenants: whoever has many requests waiting does not keep others from theirs."""

MOST_TENANTS = 1024  # that are remembered before those without a later turn are forgotten


class Turns:
    """Numbers the requests of each tenant, so that sorting by number serves tenants in turn (start-time fair queueing, Goyal
    et al., 1996, with requests of one size).

    The first request of a tenant has the number of the newest one that was served, and each further one the number behind
    that of the one before. So 500 waiting requests of one tenant are overtaken by the first of another. With one tenant the
    order is that in which requests came.
    """

    def __init__(self):
        self._newest = 0  # the largest number that was served
        self._next: dict[str, int] = {}  # tenant -> number of its next request

    def take(self, tenant: str) -> int:
        """The number of a tenant's next request."""
        number = max(self._newest, self._next.get(tenant, 0))
        if len(self._next) >= MOST_TENANTS:
            self._next = {name: following for name, following in self._next.items() if following > self._newest}
        self._next[tenant] = number + 1
        return number

    def served(self, number: int):
        """Note that a request with this number has been given a row."""
        self._newest = max(self._newest, number)
