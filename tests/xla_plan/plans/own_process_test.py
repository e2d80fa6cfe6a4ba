"""Calls in separate processes."""

import operator
import os

import pytest

from tests.plans import tiny
from xla_plan.plans import own_process


def _where(request):
    return os.getpid(), request


def _dies(request):
    os._exit(1)


def test_a_function_is_called_in_another_process():
    request = tiny.request()
    process, received = own_process.call(_where, request)
    assert process != os.getpid()
    assert (received.model, received.topology) == (request.model, request.topology)
    assert received.partitioning == request.partitioning
    assert received.params.ToText() == request.params.ToText()


def test_an_error_of_the_function_is_raised():
    with pytest.raises(AttributeError, match="'Request' object has no attribute 'cores'"):
        own_process.call(operator.attrgetter("cores"), tiny.request())


@pytest.mark.slow
def test_a_process_that_died_is_a_mistake_in_one_line():
    message = "^toy.MoE8E4L on v3:2x2: the process that compiled it died; this machine's memory .*"
    with pytest.raises(ValueError, match=message) as raised:
        own_process.call(_dies, tiny.request())
    assert "\n" not in str(raised.value)
