"""Tenants whose requests wait take turns."""

from small_engine import entry_order, orders, prompt, simulation

from jspec.engine.scheduler.turns import MOST_TENANTS, Turns


def test_one_tenant_is_served_first_come_first_served():
    played = simulation(max_batch=1)
    for _ in range(5):
        played.arrive(prompt(), 1, tenant="a")
    assert entry_order(played) == [0, 1, 2, 3, 4]


def test_a_tenant_does_not_wait_for_all_requests_of_another():
    played = simulation(max_batch=1)
    for tenant in "aaaaaabbc":
        played.arrive(prompt(), 1, tenant=tenant)
    assert entry_order(played) == [0, 6, 8, 1, 7, 2, 3, 4, 5]


def test_a_full_queue_has_room_for_other_tenants():
    """An eighth for each, up to twice the length, so that their number is no way around it."""
    played = simulation(max_batch=1, max_waiting=16)
    while played.scheduler.has_room(tenant="a"):
        played.arrive(prompt(), 1, tenant="a")
    assert len(played.scheduler.waiting) == 17
    assert not played.scheduler.has_room()
    for tenant in "bc":
        for _ in range(2):
            assert played.scheduler.has_room(tenant=tenant)
            assert not played.scheduler.has_room(2, tenant=tenant)
            played.arrive(prompt(), 1, tenant=tenant)
        assert not played.scheduler.has_room(tenant=tenant)
    for tenant in map(str, range(20)):
        if played.scheduler.has_room(tenant=tenant):
            played.arrive(prompt(), 1, tenant=tenant)
    assert len(played.scheduler.waiting) == 33


def test_a_later_tenant_has_no_turns_to_make_up_for():
    """Requests of ``b`` that come after four of ``a`` were served take turns with the next ones of ``a``."""
    played = simulation(max_batch=1)
    for _ in range(8):
        played.arrive(prompt(), 1, tenant="a")
    found = []
    while len(found) < 4:
        found += orders(played.step().admitted)
    for _ in range(3):
        played.arrive(prompt(), 1, tenant="b")
    rest = entry_order(played)
    assert found == [0, 1, 2, 3]
    assert [order for order in rest if order < 8] == [4, 5, 6, 7]
    assert [order for order in rest if order >= 8] == [8, 9, 10]
    assert rest.index(8) <= 1
    assert rest.index(9) <= 3
    assert rest.index(5) < rest.index(10) <= 5


def test_priorities_come_before_turns():
    played = simulation(max_batch=1)
    for tenant, priority in (("a", 1), ("a", 0), ("b", 1), ("a", 0)):
        played.arrive(prompt(), 1, priority, tenant=tenant)
    assert entry_order(played) == [1, 3, 0, 2]


def test_tenants_without_later_turns_are_forgotten():
    turns = Turns()
    for i in range(3 * MOST_TENANTS):
        turns.served(turns.take(f"tenant {i}"))
        turns.served(turns.take("regular"))
    assert len(turns._next) <= MOST_TENANTS
    assert turns.take("regular") > turns.take("new") - 2
