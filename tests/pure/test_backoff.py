"""A call that fails is repeated, until its deadline or its number of tries."""

import asyncio

import pytest

from service.backoff import Backoff, retried

SHORT = Backoff(0.001, 0.004)


@pytest.mark.parametrize(
    ("failures", "tries", "within", "answered"), [(3, 9, 60, True), (3, 3, 60, False), (3, 9, 0, False)]
)
def test_errors_are_repeated_until_an_answer_or_the_limit(
    failures: int, tries: int, within: float, answered: bool
) -> None:
    calls, noted = list[int](), list[Exception]()

    async def call() -> str:
        calls.append(len(calls))
        if len(calls) <= failures:
            raise ConnectionError(str(len(calls)))
        return "answer"

    asked = retried(call, ConnectionError, SHORT, within=within, tries=tries, failed=noted.append)
    if answered:
        assert asyncio.run(asked) == "answer"
        assert [str(error) for error in noted] == ["1", "2", "3"]
    else:
        with pytest.raises(ConnectionError):
            asyncio.run(asked)


def test_any_other_error_is_raised_at_once() -> None:
    async def call() -> None:
        raise KeyError("a bug")

    with pytest.raises(KeyError):
        asyncio.run(retried(call, ConnectionError, SHORT))
