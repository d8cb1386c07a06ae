"""A task that a compiled loop would not train on as it is meant is refused in a sentence, and no other is."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import streamgrad as sg
from streamgrad_lab import Task, find_task
from streamgrad_lab.tasks.checking import check_task
from streamgrad_lab.training import Plan, train
from tests.lab.counting import parts
from tests.tools import one_sentence

INPUTS = jnp.ones((2, 3, 1))


def task_of(sample, init=lambda key: (), data=()):
    return Task("mine", 1, sg.heads.squared_error(1), 2, 3, False, data, init, sample)


def arrays():
    rng = np.random.default_rng(0)
    while True:
        yield rng.normal(size=(2, 3, 1))


def draws(how):
    """A sample that reads something which the next trace finds changed."""
    count, values, rng = itertools.count(), arrays(), np.random.default_rng(0)
    compiled = jax.jit(lambda values: jnp.asarray(values))

    def in_a_loop():
        value = next(values)[0]
        return jax.lax.scan(lambda carry, x: (carry, x + value), 0.0, INPUTS)[1]

    targets = {
        "counter": lambda: float(next(count)) * INPUTS,
        "generator": lambda: jnp.asarray(next(values)),
        "iterator": lambda: jnp.asarray(next(iterator)),
        "numpy": lambda: jnp.asarray(rng.normal(size=(2, 3, 1))),
        "global": lambda: jnp.asarray(np.random.normal(size=(2, 3, 1))),
        "inside": lambda: jax.jit(lambda: compiled(next(values)))(),
        "loop": in_a_loop,
        "compiled": lambda: jnp.asarray(next(values)),
    }[how]
    iterator = iter(np.ones((1, 2, 3, 1)))  # ended when it is traced again

    def sample(data, state, key):
        return sg.Chunk(INPUTS, targets()), state

    return jax.jit(sample) if how == "compiled" else sample


CASES = ("counter", "generator", "iterator", "numpy", "global", "inside", "loop", "compiled")


@pytest.mark.parametrize("how", CASES)
def test_what_changes_outside_of_the_arguments_is_refused(how):
    with pytest.raises(ValueError, match="sample of the task mine gives other numbers each time") as caught:
        check_task(task_of(draws(how)))
    assert one_sentence(caught)


def test_training_refuses_a_generator(tmp_path):
    with pytest.raises(ValueError, match=r"put what it reads into Task\.data"):
        train(tmp_path, Plan(updates=4, checkpoints=False), *parts(task_of(draws("generator"))))


def test_what_only_looks_so_is_taken():
    """Numbers of a fixed seed, functions whose address changes, constants, keys, another order of the same program."""
    table, turn, key = np.arange(6.0).reshape(2, 3, 1), itertools.count(), jax.random.key(3)

    @jax.custom_jvp
    def double(x):
        return 2 * x

    double.defjvp(lambda primals, tangents: (double(*primals), 2 * tangents[0]))

    def sample(data, state, _):
        fixed = np.random.default_rng(0).normal(size=(2, 3, 1))
        targets = jax.nn.relu(double(jnp.asarray(fixed))) + table + jax.random.normal(key, (2, 3, 1))
        both = [jnp.sin, jnp.cos]
        if next(turn) % 2:  # the same numbers by another program
            both.reverse()
        made = {f: f(INPUTS) for f in both}
        return sg.Chunk(made[jnp.sin] + made[jnp.cos], targets), state + 1

    check_task(task_of(sample, lambda key: jnp.zeros((), jnp.int32)))


@pytest.mark.parametrize("name, options", [("queue", {}), ("copy", {}), ("digits", {}), ("series", {"values": 99})])
def test_the_tasks_of_the_laboratory_pass(name, options):
    check_task(find_task(name, batch_size=2, **options))


def swapped(data, state, key):
    return sg.Chunk(jnp.swapaxes(INPUTS, 0, 1), INPUTS), state


WRONG = {
    "no task": (3, "task must be a streamgrad_lab.Task, not int"),
    "head": (
        task_of(None)._replace(head="softmax"),
        "must be one of streamgrad.heads, not str",
    ),
    "size": (task_of(None)._replace(batch_size=0), "batch_size must be a whole number of at least 1, not 0"),
    "no function": (task_of(None), "sample must be a function, not None"),
    "arguments": (task_of(lambda key: None), r"is called as sample\(data, state, key\)"),
    "return": (task_of(lambda *_: INPUTS), "must return a streamgrad.Chunk and the state after it, not float"),
    "time first": (task_of(swapped), r"must have 2 streams and 3 steps .* and their inputs are float64\[3, 2, 1\]"),
    "state": (
        task_of(lambda data, state, key: (sg.Chunk(INPUTS, INPUTS), {"at": 1.0}), lambda key: {}),
        "must return a state like that of init, PyTreeDef",
    ),
    "state's kind": (
        task_of(lambda data, state, key: (sg.Chunk(INPUTS, INPUTS), {"at": state["at"] + 0.5}), lambda key: {"at": 1}),
        r"state\['at'\] is int64\[\], and float64\[\] after it",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_task_that_does_not_fit_together(case, as_a_user):
    task, words = WRONG[case]
    with pytest.raises(ValueError, match=words) as caught:
        check_task(task)
    assert one_sentence(caught)
