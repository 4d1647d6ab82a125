import threading

import jax
import jax.numpy as jnp
import pytest
from jax._src import monitoring

from jaxoverlap.device.compile_guard import CompileError, CompileGuard, _on_event


@pytest.fixture
def guard():
    guard = CompileGuard()
    yield guard
    guard.close()


def fresh():
    return jax.jit(lambda x: x * 2 + 1)


def test_raises_for_its_own_call_and_names_the_program(guard):
    x = jnp.ones(3)
    step = fresh()
    guard.program = "decode_4"
    with guard:
        step(x)
    assert guard.compiles == 1
    guard.armed = True
    with guard:
        step(x)
    assert guard.compiles == 1
    y = jnp.ones(4)
    with pytest.raises(CompileError, match="program decode_4 compiled after warm-up"), guard:
        step(y)


def test_other_compiles_are_nobodys_business(guard):
    guard.armed = True
    x = jnp.ones(3)
    fresh()(x)
    with guard:
        thread = threading.Thread(target=lambda: fresh()(x))
        thread.start()
        thread.join()
    assert guard.compiles == 0


def test_an_error_of_the_call_is_not_hidden(guard):
    guard.armed = True

    def fail():
        with guard:
            fresh()(jnp.ones(7))
            raise KeyError

    with pytest.raises(KeyError):
        fail()


def listeners():
    return monitoring.get_event_duration_listeners().count(_on_event)


def test_one_listener_for_all_and_none_afterwards():
    before = listeners()
    guards = [CompileGuard() for _ in range(3)]
    assert listeners() == 1
    for g in guards:
        g.close()
        g.close()
    assert listeners() == before
